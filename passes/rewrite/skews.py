"""Skews: a row of scores that begins further left with each position, written as reshapes.

Relative positions are scored once per distance, ``[T, R]``, and each row is then moved so that the
distances line up with the keys: ``[T, R]`` is read as ``[R, T]``, its first row is dropped, and
what is left is read as ``[T, R - 1]``. As reshapes these mix all rows; yet every entry among the
first columns comes from its own row, at a place that depends on positions only. So it is gathered
there.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.rewrite.normalize import Writer, size_of
from seqsplit.passes.rules.registry import arguments_of

__all__ = ["gather_skews"]

aten = torch.ops.aten


def gather_skews(lowered: Lowered) -> None:
    """Replace such reshapes, cut to their first columns, by lookups (in place)."""
    changed = False
    for node in list(lowered.graph.nodes):
        if node.op == "call_function" and (found := _columns(lowered, node)) is not None:
            changed |= _gather(lowered, node, *found)
    if changed:
        lowered.graph.eliminate_dead_code(
            is_impure_node=lambda node: node.op in ("placeholder", "output")
        )
        lowered.graph.lint()


def _columns(lowered: Lowered, node: fx.Node) -> tuple[fx.Node, Any] | None:
    """What the first columns are taken of, and their numbers or how many there are."""
    held, arguments = node.meta["val"], arguments_of(node)
    if node.target is aten.slice.Tensor:
        first = arguments["start"] in (0, None) and arguments["step"] == 1
        size = lowered.shape(node)[-1]
        places = arguments["end"] if first and isinstance(arguments["end"], fx.Node) else None
        if places is not None and lowered.expr(places.meta["val"]) != size:
            return None
    elif node.target is aten.index_select.default:
        places = arguments["index"]
        places = places if places.target is aten.arange.default else None
    else:
        return None
    if places is None or arguments["dim"] % held.ndim != held.ndim - 1:
        return None
    return arguments["self"], places


def _gather(lowered: Lowered, node: fx.Node, moved: fx.Node, places: Any) -> bool:
    found = _skewed(lowered, moved)
    if found is None or node.meta["region"] != moved.meta["region"]:
        return False
    source, dropped = found
    *lead, length, width = lowered.shape(source)
    # Entry (i, j) stands at dropped * (length - i) + j of row i, which has to be within the row.
    if not (width - dropped * length - lowered.shape(node)[-1]).is_nonnegative:
        return False
    write, device, rank = Writer(node), source.meta["val"].device, len(lead) + 2
    sizes = [size_of(write, source, dim) for dim in range(rank - 1)]
    if not isinstance(places.meta["val"], torch.Tensor):
        places = write(aten.arange.default, places, device=device)
    begin = write(aten.rsub.Scalar, write(aten.arange.default, sizes[-1], device=device), sizes[-1])
    begin = write(aten.mul.Scalar, begin, dropped)
    index = write(aten.add.Tensor, write(aten.unsqueeze.default, begin, 1), places)
    index = write(aten.expand.default, index, [*sizes, -1])
    node.replace_all_uses_with(write(aten.gather.default, source, rank - 1, index))
    return True


def _skewed(lowered: Lowered, node: fx.Node | None) -> tuple[fx.Node, int] | None:
    """``(x, k)`` for ``[.., T, R] -> [.., R, T] -> [.., R - k, T] -> [.., T, R - k]``."""
    if not _is(node, aten.reshape.default) or not _is(cut := node.args[0], aten.slice.Tensor):
        return None
    if not _is(turned := cut.args[0], aten.reshape.default):
        return None
    source, arguments = turned.args[0], arguments_of(cut)
    dropped, rank = arguments["start"], cut.meta["val"].ndim
    if arguments["dim"] % rank != rank - 2 or not isinstance(dropped, int) or dropped <= 0:
        return None
    if source.meta["val"].ndim != rank or arguments["step"] != 1:
        return None
    *lead, length, width = lowered.shape(source)
    wanted = [
        (turned, [*lead, width, length]),
        (cut, [*lead, width - dropped, length]),
        (node, [*lead, length, width - dropped]),
    ]
    for value, shape in wanted:
        own = lowered.shape(value)
        if len(own) != rank or any(sympy.expand(a - b) != 0 for a, b in zip(own, shape)):
            return None
        if value.meta["region"] != node.meta["region"]:
            return None
    return source, dropped


def _is(node: fx.Node | None, target: torch._ops.OpOverload) -> bool:
    return isinstance(node, fx.Node) and node.target is target
