"""Stencils: the many ways to say "the rows before this one", brought to two functions.

- ``pad`` and slice, ``pad`` by (k, -k), zeros put before all but the last rows: a shift
- a convolution that is padded on the left only, or on both sides and cut off: a causal one

Both are in :mod:`seqsplit.stencil`; their rows read a window of the sequence. So do those of a
piece of the model that works in blocks of positions (:mod:`.windows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .. import stencil
from .facts import Facts
from .rules.registry import arguments_of

__all__ = [
    "STENCILS",
    "WindowedPiece",
    "normalize_stencils",
    "reach_of",
    "sequence_dim_of",
    "windowed_of",
]

aten = torch.ops.aten

STENCILS = {stencil.shift, stencil.causal_conv1d}
_PADS = {aten.pad.default, aten.constant_pad_nd.default}


@dataclass(frozen=True)
class WindowedPiece:
    """What is known of a gathered piece.

    Attributes:
        block: the number of positions in a block.
        reach: how many positions before its block a row may see, a multiple of it.
        operand_dims: for each operand the dim that is the sequence, ``None`` for what is whole.
        out_dim: that of the result.
        num_sizes: how many sizes are given after the operands.
        length_at: which of them is the length of the sequence, if one is.
    """

    block: int
    reach: int
    operand_dims: tuple[int | None, ...]
    out_dim: int
    num_sizes: int
    length_at: int | None

    @property
    def window(self) -> int:
        """A row sees fewer than that many positions before its own, its own included."""
        return self.reach + self.block

    def rows(
        self, run: Callable, start: int, first: int, end: int, operands: Sequence[Any]
    ) -> Tensor:
        """Rows ``[start, end)``.

        Args:
            run: the piece.
            start: where the chunk begins.
            first: where the windows of the operands begin.
            end: where both end.
            operands: of the piece; windows of those that are along the sequence.
        """
        begin = max(0, start // self.block * self.block - self.reach)
        length = end - begin
        whole = -(-length // self.block) * self.block
        tensors = [
            operand
            if dim is None
            else _padded(operand.narrow(dim, begin - first, length), dim, whole - length)
            for operand, dim in zip(operands, self.operand_dims)
        ]
        sizes = list(operands[len(self.operand_dims) :])
        if self.length_at is not None:
            sizes[self.length_at] = whole
        return run(*tensors, *sizes).narrow(self.out_dim, start - begin, end - start)


def windowed_of(target: Any) -> WindowedPiece | None:
    """What is known of a node's target, if it is a gathered piece."""
    return getattr(target, "windowed", None)


def _padded(x: Tensor, dim: int, rows: int) -> Tensor:
    """With rows of zeros after the last, which no row before them sees."""
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, rows]) if rows else x


def normalize_stencils(facts: Facts) -> bool:
    """Rewrite stencils in place.

    Returns:
        Whether anything was rewritten (facts then have to be propagated again).
    """
    changed = False
    for node in list(facts.lowered.graph.nodes):
        if node.op != "call_function" or not node.users or not facts.is_active(node):
            continue
        if node.target is aten.conv1d.default:
            changed |= _convolution(facts, node)
        elif node.target in _PADS:
            changed |= _pad(facts, node)
        elif node.target is aten.cat.default:
            changed |= _cat(facts, node)
    if changed:
        facts.lowered.graph.eliminate_dead_code(
            is_impure_node=lambda node: node.op in ("placeholder", "output")
        )
        facts.lowered.graph.lint()
    return changed


def sequence_dim_of(node: fx.Node) -> int:
    """The dim along which a stencil reads."""
    return node.args[1] if node.target is stencil.shift else 2


def reach_of(node: fx.Node) -> int:
    """How many rows before its own a row of a stencil sees."""
    if node.target is stencil.shift:
        return node.args[2]
    weight, dilation = node.args[1].meta["val"], node.args[3]
    return (weight.shape[-1] - 1) * dilation


def _convolution(facts: Facts, node: fx.Node) -> bool:
    arguments = arguments_of(node)
    stride, padding, dilation = (_one(arguments[n]) for n in ("stride", "padding", "dilation"))
    weight, source = arguments["weight"], arguments["input"]
    kernel = weight.meta["val"].shape[-1]
    if stride != 1 or None in (padding, dilation) or not isinstance(kernel, int):
        return False
    left = right = padding
    padded = _padding(source)
    if padded is not None and padded[1] == source.meta["val"].ndim - 1 and padded[4] == 0.0:
        source, _, more_left, more_right, _ = padded
        left, right = left + more_left, right + more_right
    if left != (kernel - 1) * dilation or left == 0 or right < 0 or source.meta["val"].ndim != 3:
        return False
    if not _is_sequence(facts, source, 2):
        return False
    new = (source, weight, arguments["bias"], dilation, arguments["groups"])
    return _replace(facts, node, stencil.causal_conv1d, new, source, 2)


def _pad(facts: Facts, node: fx.Node) -> bool:
    padded = _padding(node)
    if padded is None:
        return False
    source, dim, left, right, value = padded
    if left <= 0 or right not in (0, -left) or not _is_sequence(facts, source, dim):
        return False
    return _replace(facts, node, stencil.shift, (source, dim, left, value), source, dim)


def _cat(facts: Facts, node: fx.Node) -> bool:
    """A constant put before all but the last rows."""
    arguments = arguments_of(node)
    parts, dim = arguments["tensors"], arguments["dim"] % node.meta["val"].ndim
    if len(parts) != 2 or parts[0].target is not aten.full.default:
        return False
    head, rest = parts
    by, value = head.meta["val"].shape[dim], head.args[1]
    if rest.target is not aten.slice.Tensor or not isinstance(by, int) or by == 0:
        return False
    source = rest.args[0]
    cut = arguments_of(rest)
    same = facts.shape(source)[dim] - facts.shape(rest)[dim] == by
    if cut["dim"] % node.meta["val"].ndim != dim or cut["start"] not in (0, None) or not same:
        return False
    if not isinstance(value, (int, float)) or not _is_sequence(facts, source, dim):
        return False
    if node.meta["val"].dtype != source.meta["val"].dtype:
        return False
    return _replace(facts, node, stencil.shift, (source, dim, by, value), source, dim)


def _replace(
    facts: Facts, node: fx.Node, function: Callable, args: tuple, source: fx.Node, dim: int
) -> bool:
    """Put the stencil in a node's place, which has its length or is cut to it by all users."""
    length = facts.shape(source)[dim]
    if facts.shape(node)[dim] == length:
        replaced = [node]
    else:
        replaced = list(node.users)
        if not all(_keeps_first(facts, user, dim, length) for user in replaced):
            return False
    graph = node.graph
    with graph.inserting_after(node):
        new = graph.call_function(function, args)
    new.meta = {k: v for k, v in node.meta.items() if k not in ("rows", "shape_exprs")}
    new.meta["val"] = replaced[0].meta["val"]
    for old in replaced:
        old.replace_all_uses_with(new)
    return True


def _keeps_first(facts: Facts, node: fx.Node, dim: int, length: Any) -> bool:
    if node.target is not aten.slice.Tensor:
        return False
    arguments = arguments_of(node)
    return (
        arguments["dim"] % node.meta["val"].ndim == dim
        and arguments["start"] in (0, None)
        and arguments["step"] in (1, None)
        and facts.shape(node)[dim] == length
    )


def _padding(node: Any) -> tuple[fx.Node, int, int, int, float] | None:
    """``(source, dim, left, right, value)`` of a constant padding of one dim."""
    if not isinstance(node, fx.Node) or node.target not in _PADS:
        return None
    arguments = arguments_of(node)
    if arguments.get("mode", "constant") != "constant":
        return None
    amounts = list(arguments["pad"])
    if not all(isinstance(amount, int) for amount in amounts):
        return None
    padded = [i for i in range(len(amounts) // 2) if amounts[2 * i] or amounts[2 * i + 1]]
    if len(padded) != 1:
        return None
    dim = node.meta["val"].ndim - 1 - padded[0]
    left, right = amounts[2 * padded[0] : 2 * padded[0] + 2]
    return arguments["self"], dim, left, right, float(arguments["value"] or 0.0)


def _one(value: Any) -> int | None:
    """The number that a list of one stands for."""
    value = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    return value if isinstance(value, int) else None


def _is_sequence(facts: Facts, node: fx.Node, dim: int) -> bool:
    return node in facts.stream | facts.features and facts.shape(node)[dim] == facts.sequence
