"""Dump: a graph as text for a person: one line per node, with its shape in symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from seqsplit.passes.graph.lowered import Lowered

__all__ = ["dump", "name_of"]

_DTYPES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
_DTYPES |= {torch.int64: "i64", torch.int32: "i32", torch.bool: "bool"}


def dump(
    graph: Lowered,
    symbols: dict[sympy.Symbol, str] | None = None,
    note: Callable[[fx.Node], str] = lambda node: "",
) -> str:
    """A graph's nodes, one a line: ``name: dtype[shape] = op(operands)  # note``.

    Args:
        graph: what is shown.
        symbols: how sizes are called; those that are left out keep the name they have.
        note: what is said of a node behind its line.
    """
    names = {symbol: sympy.Symbol(name) for symbol, name in (symbols or {}).items()}
    lines = []
    for node in graph.graph.nodes:
        kind, comment = _kind(graph, node, names), note(node)
        said = f"  # {comment}" if comment else ""
        if node.op == "output":
            lines.append(f"return {_spelled(node.args[0])}{said}")
        elif node.op == "placeholder":
            lines.append(f"{node.name}: {kind}{said}")
        else:
            lines.append(f"{node.name}: {kind} = {name_of(node.target)}{_call(node)}{said}")
    return "\n".join(lines)


def name_of(target: Any) -> str:
    """An op's name as a person would write it."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return target if isinstance(target, str) else target.__name__


def _kind(graph: Lowered, node: fx.Node, names: dict) -> str:
    held = node.meta.get("val")
    if not isinstance(held, torch.Tensor):
        return "int" if isinstance(held, (int, torch.SymInt)) else type(held).__name__
    sizes = ", ".join(str(size.xreplace(names)) for size in graph.shape(node))
    return f"{_DTYPES.get(held.dtype, held.dtype)}[{sizes}]"


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return ""
    named = [f"{name}={_spelled(value)}" for name, value in node.kwargs.items()]
    return f"({', '.join([*map(_spelled, node.args), *named])})"


def _spelled(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_spelled, value))}]"
    return str(value)
