"""The house: imports flow one way, files stay small, no model is known by name."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "seqsplit").rglob("*.py"), *(ROOT / "passes").rglob("*.py")])

# From the ground up: each place imports from places below it, or from itself.
LAYERS = [
    {"errors"},
    {"schedule"},
    {"options"},
    {"ir"},
    {"ops"},
    {"memory"},
    {"runtime"},
    {"deferred"},
    {"passes.graph"},
    {"passes.trials"},
    {"passes.stateful"},
    {"passes.rules"},
    {"passes.capture"},
    {"passes.analysis"},
    {"passes.rewrite"},
    {"passes.split"},
    {"passes.checks"},
    {"passes.driver"},
    {"passes.segments"},
    {"passes.pipeline"},
    {"passes"},
    {"frontend"},
    {"api", "explain", "planning"},
    {"verify", "planner"},
    {"cli"},
    {""},
]
# What passes may know of the package around them: what plans and bodies are written in.
KNOWN_TO_PASSES = {"errors", "schedule", "options", "ir", "ops", "passes"}
# Still to be untied.
CIRCLES = ("deferred.",)
# Where a configuration becomes a module, the library that does it has to be named.
NAMES_A_LIBRARY = "configurations.py"


def module_of(path):
    """A file's module, without the leading ``seqsplit.``."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "seqsplit":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module):
    """The layer of the innermost place that is named: a module, or a folder around it."""
    while True:
        for number, places in enumerate(LAYERS):
            if module in places:
                return number
        if not module:
            raise AssertionError("the top has a layer")
        module = module.rpartition(".")[0]


def imported(path):
    """Modules of seqsplit that a file imports, without the leading ``seqsplit.``."""
    modules = {module_of(file) for file in FILES}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports by dots"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            top, _, inner = name.partition(".")
            assert top != "passes", f"{path.name}: import seqsplit.passes"
            if top == "seqsplit":
                yield inner if inner in modules else inner.rpartition(".")[0]


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_flow_one_way(path):
    own = module_of(path)
    for module in imported(path):
        if own.partition(".")[0] == "passes":
            assert module.partition(".")[0] in KNOWN_TO_PASSES, f"{own} imports {module}"
        assert layer_of(module) <= layer_of(own), f"{own} imports {module}"


def test_no_circles():
    known = {module_of(path): set(imported(path)) for path in FILES}
    known = {m: () if m.startswith(CIRCLES) else names for m, names in known.items()}
    done = set()
    while known.keys() - done:
        free = {m for m in known.keys() - done if not set(known[m]) - {m, ""} - done}
        assert free, f"circles among {sorted(known.keys() - done)}"
        done |= free


def functions_that_import(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.If)):
            inner = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
            yield from (n for n in inner if "seqsplit" in ast.unparse(n))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_import_hides_an_edge(path):
    if module_of(path).startswith(CIRCLES):
        return
    hidden = [ast.unparse(node) for node in functions_that_import(path)]
    assert not hidden, f"{path.name} imports inside of a function: {hidden}"


def test_every_folder_is_packaged():
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        f"seqsplit.{module_of(path)}".rstrip(".") for path in FILES if path.stem == "__init__"
    }
    assert set(settings["packages"]) == folders
    assert {path.parent for path in FILES} == {p.parent for p in FILES if p.stem == "__init__"}


@pytest.mark.parametrize("path", FILES, ids=name)
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
    for path in FILES:
        words = set(re.findall(r"[a-z0-9]+", path.read_text().lower()))
        assert not words & types, path
