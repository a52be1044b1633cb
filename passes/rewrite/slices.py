"""Slices that take off again what was put before or after: ``cat([zeros, x])[:, 1:]`` is ``x``.

A table of sums over stretches is built from cumulative sums with a zero before them, so that it has
one row and one column more than the sequence, and these are cut off in the end. Taken of the
operands instead, the slice meets the ``cat`` and both are gone; a longer value never exists. So it
is with a sequence that is padded to whole blocks and cut off in the end.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.rewrite.normalize import Writer
from seqsplit.passes.rules.registry import arguments_of

__all__ = ["take_off"]

aten = torch.ops.aten

_TO_THE_END = 2**63 - 1


def take_off(lowered: Lowered) -> None:
    """Move such slices up to what they undo (in place)."""
    for node in list(lowered.graph.nodes):
        if node.target is not aten.slice.Tensor:
            continue
        source, dim, start, end, step = arguments_of(node).values()
        dim %= node.meta["val"].ndim
        if not lowered.shape(node)[dim].free_symbols or not isinstance(start, int) or step != 1:
            continue
        if start == 0 and end != _TO_THE_END:
            found = _TakingFirst(lowered, node, dim).of(source, dim)
        elif start > 0 and end == _TO_THE_END:
            found = _Taking(lowered, node, start).of(source, dim)
        else:
            found = None
        if found is not None:
            node.replace_all_uses_with(found)
            node.graph.erase_node(node)
    lowered.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def _is_pointwise(target: Any) -> bool:
    """Whether an op treats every entry by itself, and twice would be the same as once."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return torch.Tag.pointwise in target.tags and not drawn


class _Taking:
    """Writes what a slice from ``start`` gives of a value, without slicing."""

    def __init__(self, lowered: Lowered, node: fx.Node, start: int) -> None:
        self._lowered, self._start = lowered, start
        self._write, self._region = Writer(node), node.meta["region"]

    def of(self, node: fx.Node, dim: int) -> fx.Node | None:
        """The value, or ``None`` if there is no ``cat`` that the slice undoes."""
        if node.op != "call_function" or node.meta["region"] != self._region:
            return None
        arguments = arguments_of(node)
        match node.target:
            case aten.cat.default:
                return self._of_cat(arguments["tensors"], arguments["dim"], dim)
            case aten.transpose.int:
                dims = [arguments[name] % node.meta["val"].ndim for name in ("dim0", "dim1")]
                own = dims[1 - dims.index(dim)] if dim in dims else dim
                return self._again(node, self.of(node.args[0], own))
            case aten.expand.default:
                return self._of_expand(node, dim)
        return self._of_pointwise(node, dim) if _is_pointwise(node.target) else None

    def _of_cat(self, parts: list[fx.Node], along: int, dim: int) -> fx.Node | None:
        shapes = [self._lowered.shape(part) for part in parts]
        same = along % len(shapes[0]) == dim and shapes[0][dim] == self._start
        return parts[1] if same and len(parts) == 2 else None

    def _of_expand(self, node: fx.Node, dim: int) -> fx.Node | None:
        source, sizes = node.args[0], list(node.args[1])
        own = dim - (len(sizes) - source.meta["val"].ndim)
        if own >= 0 and self._lowered.shape(source)[own] != 1:
            source, sizes[dim] = self.of(source, own), -1
        elif isinstance(sizes[dim], fx.Node):
            sizes[dim] = self._write(operator.sub, sizes[dim], self._start)
        else:
            return None
        return None if source is None else self._write(node.target, source, sizes)

    def _of_pointwise(self, node: fx.Node, dim: int) -> fx.Node | None:
        taken: dict[fx.Node, Any] = {}
        for operand in node.all_input_nodes:
            own = _own_dim(self._lowered, node, operand, dim)
            taken[operand] = operand if own is None else self.of(operand, own)
        if None in taken.values():
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), taken.__getitem__)
        return self._write(node.target, *args, **kwargs)

    def _again(self, node: fx.Node, source: fx.Node | None) -> fx.Node | None:
        return None if source is None else self._write(node.target, source, *node.args[1:])


class _TakingFirst:
    """Writes what a slice of the first entries gives of a padded value, without the padding."""

    def __init__(self, lowered: Lowered, node: fx.Node, dim: int) -> None:
        self._lowered, self._size = lowered, lowered.shape(node)[dim]
        self._end = arguments_of(node)["end"]
        self._write, self._region = Writer(node), node.meta["region"]

    def of(self, node: fx.Node, dim: int) -> fx.Node | None:
        """The value, or ``None`` if it is not padded."""
        if node.op != "call_function" or node.meta["region"] != self._region:
            return None
        if node.target in (aten.pad.default, aten.constant_pad_nd.default):
            source, amounts = node.args[:2]
            last = 2 * (node.meta["val"].ndim - 1 - dim)  # amounts begin with the last dim
            others = [a for i, a in enumerate(amounts) if i != last + 1]
            undone = self._lowered.shape(source)[dim] == self._size
            return (
                source if undone and not any(isinstance(a, fx.Node) or a for a in others) else None
            )
        if not _is_pointwise(node.target):
            return None
        dims = {o: _own_dim(self._lowered, node, o, dim) for o in node.all_input_nodes}
        taken = {o: None if own is None else self.of(o, own) for o, own in dims.items()}
        if not any(taken.values()):
            return None
        for operand, own in dims.items():
            if own is None:
                taken[operand] = operand
            elif taken[operand] is None:
                taken[operand] = self._write(aten.slice.Tensor, operand, own, 0, self._end)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), taken.__getitem__)
        return self._write(node.target, *args, **kwargs)


def _own_dim(lowered: Lowered, node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """The dim of an operand of a pointwise op that is a dim of the result, if it has it."""
    held = operand.meta.get("val")
    rank = held.ndim if isinstance(held, torch.Tensor) else 0
    own = dim - (node.meta["val"].ndim - rank)
    return None if own < 0 or lowered.shape(operand)[own] == 1 else own
