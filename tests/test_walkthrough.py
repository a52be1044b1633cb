"""The page that walks a model through the passes shows what they do today."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from seqsplit.passes.pipeline import PASSES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "walkthrough.md"


def test_the_page_names_every_pass():
    headings = re.findall(r"^## \d+\. (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert headings == [*(step.name for step in PASSES), "stitch"]


def test_the_page_is_what_a_run_writes(monkeypatch):
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if not torch.__version__.startswith(pinned.group(1)):
        pytest.skip("other versions of torch name nodes and symbols otherwise")
    path = ROOT / "docs" / "walkthrough.py"
    spec = importlib.util.spec_from_file_location("walkthrough", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "walkthrough", module)
    spec.loader.exec_module(module)
    assert module.page() == PAGE.read_text(), "make walkthrough"
