"""Where in the user's model a node comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

__all__ = ["describe", "scope_of"]


def scope_of(nodes: Sequence[fx.Node]) -> str:
    """The longest module path that most of the nodes share, ``"model"`` for the top."""
    paths = [path for node in nodes if (path := _path(node))]
    if not paths:
        return "model"
    counts: dict[str, int] = {}
    for path in paths:
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            prefix = ".".join(parts[:depth])
            counts[prefix] = counts.get(prefix, 0) + 1
    shared = [prefix for prefix, count in counts.items() if count * 2 > len(paths)]
    return max(shared, key=lambda prefix: prefix.count("."), default="model") or "model"


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    name = list(stack.values())[-1][0]
    name = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", name)
    name = name.replace("_modules.", "").rpartition("__self__")[2].strip(".")
    return re.sub(r"^L(\.\w+)?\.?", "", name).removeprefix("self.").strip(".")


def describe(node: fx.Node) -> str:
    """The user's line, as ``file.py:12  code``; the op's name if it is not known."""
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', trace)
    if not found:
        return str(node.target)
    path, line, code = found[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}  {code}"
