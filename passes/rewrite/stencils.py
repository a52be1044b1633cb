"""Stencils: the many ways to say "the rows before this one", brought to two functions.

- ``pad`` and slice, ``pad`` by (k, -k), a constant or a state put before all but the last rows: a
  shift
- a convolution of what is padded on the left only, or on both sides and cut off, or has a state put
  before it: a causal one. Where more stands before than it sees, it gives rows of its own for that,
  which the next convolution finds before its input.

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

from seqsplit.ops import stencil
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.rewrite.normalize import Writer, size_of
from seqsplit.passes.rules.registry import arguments_of

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


@dataclass(frozen=True)
class _Before:
    """What stands before a value of the stream.

    Attributes:
        source: the value.
        rows: how many rows stand before it, and how many zeros after.
        what: a number, or a tensor of these rows.
    """

    source: fx.Node
    rows: int
    after: int
    what: fx.Node | float


def _convolution(facts: Facts, node: fx.Node) -> bool:
    arguments = arguments_of(node)
    stride, padding, dilation = (_one(arguments[n]) for n in ("stride", "padding", "dilation"))
    weight, kernel = arguments["weight"], arguments["weight"].meta["val"].shape[-1]
    if stride != 1 or None in (padding, dilation) or not isinstance(kernel, int):
        return False
    found = _before(facts, arguments["input"], padding)
    reach = (kernel - 1) * dilation
    if found is None or not 0 < reach <= found.rows or not _is_sequence(facts, found.source, 2):
        return False
    new = [found.source, weight, arguments["bias"], dilation, arguments["groups"], found.what]
    if found.rows == reach:
        return _replace(facts, node, stencil.causal_conv1d, tuple(new), found.source, 2)
    if found.after or padding:
        return False
    write = Writer(node)
    head = _tensor_of(write, found)
    new[-1] = write(aten.slice.Tensor, head, 2, found.rows - reach, found.rows)
    parts = [
        write(aten.conv1d.default, head, *list(arguments.values())[1:]),
        write(stencil.causal_conv1d, *new),
    ]
    for part in parts:  # under autocast its dtype is another one
        part.meta["val"] = part.meta["val"].to(node.meta["val"].dtype)
    node.replace_all_uses_with(write(aten.cat.default, parts, 2))
    return True


def _before(facts: Facts, node: fx.Node, padding: int) -> _Before | None:
    """What a convolution finds before and after the rows of ``[B, C, T]``."""
    if node.meta["val"].ndim != 3:
        return None
    padded = _padding(node)
    if padded is not None and padded[1] == 2 and padded[4] == 0.0:
        source, _, left, right, _ = padded
        after = padding + right
        return _Before(source, padding + left, after, 0.0) if after >= 0 else None
    if node.target is aten.cat.default and padding == 0:
        parts, dim = arguments_of(node)["tensors"], arguments_of(node)["dim"] % 3
        rows = parts[0].meta["val"].shape[2]
        if dim == 2 and len(parts) == 2 and isinstance(rows, int) and _stands(facts, *parts):
            return _Before(parts[1], rows, 0, parts[0])
        return None
    return _Before(node, padding, padding, 0.0) if padding else None


def _stands(facts: Facts, head: fx.Node, source: fx.Node) -> bool:
    """Whether a value is the same for all of the sequence, so that it may stand before it."""
    return (
        head not in facts.stream
        and not facts.sequence_dims(head)
        and head.meta["val"].dtype == source.meta["val"].dtype
    )


def _tensor_of(write: Writer, found: _Before) -> fx.Node:
    """The rows before a value of the stream."""
    if isinstance(found.what, fx.Node):
        return found.what
    held = found.source.meta["val"]
    sizes = [size_of(write, found.source, 0), size_of(write, found.source, 1), found.rows]
    return write(aten.full.default, sizes, found.what, dtype=held.dtype, device=held.device)


def _pad(facts: Facts, node: fx.Node) -> bool:
    padded = _padding(node)
    if padded is None:
        return False
    source, dim, left, right, value = padded
    if left <= 0 or right not in (0, -left) or not _is_sequence(facts, source, dim):
        return False
    return _replace(facts, node, stencil.shift, (source, dim, left, value), source, dim)


def _cat(facts: Facts, node: fx.Node) -> bool:
    """Something put before all but the last rows."""
    arguments = arguments_of(node)
    parts, dim = arguments["tensors"], arguments["dim"] % node.meta["val"].ndim
    if len(parts) != 2 or parts[1].target is not aten.slice.Tensor:
        return False
    head, rest = parts
    source, by, cut = rest.args[0], head.meta["val"].shape[dim], arguments_of(rest)
    if not isinstance(by, int) or by == 0 or not _stands(facts, head, source):
        return False
    same = facts.shape(source)[dim] - facts.shape(rest)[dim] == by
    if cut["dim"] % node.meta["val"].ndim != dim or cut["start"] not in (0, None) or not same:
        return False
    if not _is_sequence(facts, source, dim):
        return False
    filled = head.target is aten.full.default and isinstance(head.args[1], (int, float))
    before = head.args[1] if filled else head
    return _replace(facts, node, stencil.shift, (source, dim, by, before), source, dim)


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
