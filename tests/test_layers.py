"""The house: imports flow one way, files stay small, no model is known by name."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PASSES = sorted((ROOT / "passes").rglob("*.py"))
RUNTIME = sorted((ROOT / "seqsplit").glob("*.py"))
# What passes may know of the package around them: what plans and bodies are written in.
ALLOWED = {"assumptions", "errors", "options", "placement", "plan", "schedule"}
ALLOWED |= {
    "attention",
    "flex",
    "linear_attention",
    "primitives",
    "recurrence",
    "scan",
    "stencil",
    "weights",
}
# Where a configuration becomes a module, the library that does it has to be named.
NAMES_A_LIBRARY = "configurations.py"


def imported(path):
    """Modules of seqsplit that a file imports, as (level, name)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((node.level, name) for name in names)
        elif isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", PASSES, ids=lambda p: str(p.relative_to(ROOT)))
def test_passes_import_only_the_vocabulary(path):
    depth = len(path.relative_to(ROOT / "passes").parts) - 1
    for level, name in imported(path):
        if level == depth + 2:  # the package around the passes
            assert name.split(".")[0] in ALLOWED, f"{path.name} imports {name}"
        assert not (level == 0 and name.split(".")[0] in ("seqsplit", "passes"))


# The folders of passes: each knows those before it. What lies beside them is what they share.
ORDER = ["trials", "stateful", "capture", "rules", "rewrite", "split", "checks"]


@pytest.mark.parametrize("path", PASSES, ids=lambda p: str(p.relative_to(ROOT)))
def test_folders_of_passes_import_one_way(path):
    inside = path.relative_to(ROOT / "passes").parts
    if len(inside) == 1:
        return
    for level, name in imported(path):
        folder = name.split(".")[0]
        if level == 2 and folder in ORDER:
            assert ORDER.index(folder) < ORDER.index(inside[0]), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", RUNTIME, ids=lambda p: p.name)
def test_only_the_api_imports_passes(path):
    uses = [name for _, name in imported(path) if name.split(".")[0] == "passes"]
    assert path.name == "api.py" or not uses, f"{path.name} imports {uses}"


@pytest.mark.parametrize("path", [*PASSES, *RUNTIME], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_small_and_know_no_model(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    names = r"llama|qwen|gemma|mistral|mixtral|bloom|gpt|neox|falcon|deepseek|transformers\b"
    if path.name == NAMES_A_LIBRARY:
        names = names.removesuffix(r"|transformers\b")
    found = re.findall(names, text, flags=re.IGNORECASE)
    assert not found, f"{path.name} names {found}"


def test_no_model_is_named():
    """The code knows ops, never models: no type of the library's catalogue occurs as a word."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = {name.lower() for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    for folder in ("seqsplit", "passes"):
        for path in (ROOT / folder).rglob("*.py"):
            words = set(re.findall(r"[a-z0-9]+", path.read_text().lower()))
            assert not words & types, path
