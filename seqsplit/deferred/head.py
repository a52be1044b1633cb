"""The beginning of every expression: the part of a plan that gives a wide output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqsplit.deferred.expression import Layout, Operand, Seen, Source, Value
from seqsplit.deferred.rowwise import apply
from seqsplit.deferred.tensor import DeferredTensor
from seqsplit.ir.plan import Body, Segment
from seqsplit.ops.replay import Replay
from seqsplit.runtime.segment_function import run_segment

__all__ = ["defer"]


def defer(
    segment: Segment,
    shape: Sequence[int],
    dtype: torch.dtype,
    length: int,
    sizes: Sequence[int],
    operands: Sequence[Tensor],
    size_dims: Sequence[int] | None,
    is_used: bool,
) -> DeferredTensor:
    """The value of a segment, to be computed as it is needed.

    Args:
        segment: gives one value, ``[*tokens, *features]``.
        shape, dtype: of that value.
        length: of the sequence.
        sizes: the values of the body's sizes.
        operands: the segment's tensors, whole.
        size_dims: for each of ``sizes``, which of the value's dims it is the size of; ``None`` if
            one of them is something else, or the value has other positions than its operands.
        is_used: whether other segments compute something from it, too.
    """
    rows_dim = segment.body.outputs[0].placement.rows_dim
    layout = Layout.leading(shape[: rows_dim + 1])
    features = tuple(shape[rows_dim + 1 :])
    made = None
    if size_dims is not None:
        made = _row_wise(segment, layout, features, dtype, size_dims, operands)
    if made is None:
        node = _Whole(segment, layout, features, dtype, (length, sizes, operands))
        made = DeferredTensor.make(node, layout, segment.options, 0)
    made.is_used = is_used
    return made


def _row_wise(
    segment: Segment,
    layout: Layout,
    features: tuple[int, ...],
    dtype: torch.dtype,
    size_dims: Sequence[int],
    operands: Sequence[Tensor],
) -> DeferredTensor | None:
    body, lead = segment.body, layout.lead
    if body.caches or body.num_random or not layout.num_rows:
        return None
    leaves: list[Any] = []
    for spec in body.inputs:
        operand = operands[spec.operand]
        if not spec.placement.spans:
            leaves.append(operand)
            continue
        spans = spec.placement.spans
        plain = len(spans) == 1 and not spans[0][1].merged and not spec.placement.has_keys
        if not plain or spec.surplus or tuple(operand.shape[: len(lead)]) != lead:
            return None
        if spans[0][0] != len(lead) - 1:
            return None
        leaves.append(Operand(Source(layout.rows_of(operand)), layout))
    rows = [leaf for leaf in leaves if isinstance(leaf, Operand)]
    if not rows:
        return None
    leaves, structure = pytree.tree_flatten((tuple(leaves), {}))
    place = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, Operand))
    found = apply(_Head(body, tuple(size_dims), place, len(lead)), leaves, structure, exact=False)
    if found is None:
        return None
    operation, _ = found
    node = Value(operation, 0)
    if (
        node.features != features
        or node.dtype != dtype
        or not operation.call.results[0].layout.is_leading
    ):
        return None
    width = max(leaf.node.width for leaf in rows)
    return DeferredTensor.make(node, layout, segment.options, width)


@dataclass(frozen=True)
class _Head:
    """A body as a function of its inputs, for any number of rows.

    Attributes:
        body: its code.
        size_dims: which dims of its rows its sizes are the sizes of.
        place: of an input with rows.
        num_lead: how many dims of tokens that has.
    """

    body: Body
    size_dims: tuple[int, ...]
    place: int
    num_lead: int

    def __call__(self, *inputs: Tensor) -> Tensor:
        lead = inputs[self.place].shape[: self.num_lead]
        sizes = [lead[dim] for dim in self.size_dims]
        (value,) = self.body.module(0, lead[-1], lead[-1], *sizes, *inputs, Replay())
        return value


class _Whole(Source):
    """A value that depends on its tokens' places: it is computed as it stands, at its first use."""

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        features: tuple[int, ...],
        dtype: torch.dtype,
        call: tuple[int, Sequence[int], Sequence[Tensor]],
    ) -> None:
        operands = call[2]
        self.index = None
        self.num_rows, self.features = layout.num_rows, features
        self.dtype, self.device = dtype, operands[0].device
        self.leaves = tuple(operand for operand in operands if operand.requires_grad)
        self.requires_grad = bool(self.leaves) and torch.is_grad_enabled()
        self._segment, self._layout, self._call = segment, layout, call
        self._seen = [Seen(operand, sampled=operand.is_leaf) for operand in operands]
        self._base: Tensor | None = None

    @property
    def base(self) -> Tensor:
        if self._base is None:
            length, sizes, operands = self._call
            operands = [seen.again(one) for one, seen in zip(operands, self._seen)]
            with torch.set_grad_enabled(self.requires_grad):
                (value,) = run_segment(self._segment, length, sizes, operands)
                self._base = self._layout.rows_of(value)
            self.seen = Seen(self._base)
        return self._base
