"""Ops that look values up: embedding tables, gather, advanced indexing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from seqsplit.ir.placement import Chunk, Placement, Whole
from seqsplit.passes.rules.registry import Operand, rule

aten = torch.ops.aten

Rows = Iterator[tuple[Placement, ...]]


@rule(aten.embedding.default)
def embedding(weight: Operand, indices: Operand) -> Rows:
    for dim in range(indices.ndim):
        yield Chunk(dim), Whole, Chunk(dim)
    yield Chunk(indices.ndim), Chunk(1), Whole


@rule(aten.one_hot.default)
def one_hot(self: Operand, num_classes: int) -> Rows:
    if num_classes >= 0:  # counted from the data otherwise
        for dim in range(self.ndim):
            yield Chunk(dim), Chunk(dim)


@rule(aten.index_select.default)
def index_select(self: Operand, dim: int) -> Rows:
    for own in range(self.ndim):
        if own != dim % self.ndim:
            yield Chunk(own), Chunk(own), Whole
    yield Chunk(dim % self.ndim), Whole, Chunk(0)


@rule(aten.gather.default)
def gather(self: Operand, dim: int, index: Operand) -> Rows:
    for own in range(self.ndim):
        # a shorter index would reach only part of the dim: then chunks do not line up
        if own == dim % self.ndim:
            yield Chunk(own), Whole, Chunk(own)
        elif self.shape[own] == index.shape[own]:
            yield Chunk(own), Chunk(own), Chunk(own)


@rule(aten.scatter.src, aten.scatter_add.default, aten.scatter.value)
def scatter(operands: list[Operand], dim: int) -> Rows:
    x = operands[0]
    for own in range(x.ndim):
        if own != dim % x.ndim and all(o.shape[own] == x.shape[own] for o in operands):
            yield Chunk(own), *(Chunk(own) for _ in operands)


@rule(aten.index.Tensor)
def index(self: Operand, indices: list[Any]) -> Rows:
    """Adjacent index tensors replace their dims by the dims of their broadcast."""
    given = [dim for dim, item in enumerate(indices) if item is not None]
    if not given or any(indices[dim].dtype == torch.bool for dim in given):
        return
    if given != list(range(given[0], given[-1] + 1)):
        return
    tensors = [indices[dim] for dim in given]
    rank = max(item.ndim for item in tensors)
    shape = _broadcast_shape(tensors, rank)
    for dim in range(rank):
        placements = []
        for item in tensors:
            own = dim - (rank - item.ndim)
            splits = own >= 0 and not (item.shape[own] == 1 and shape[dim] != 1)
            placements.append(Chunk(own) if splits else Whole)
        yield Chunk(given[0] + dim), Whole, *placements
    for dim in range(self.ndim):
        if dim not in given:
            out_dim = dim if dim < given[0] else dim - len(given) + rank
            yield Chunk(out_dim), Chunk(dim), *(Whole for _ in tensors)


def _broadcast_shape(tensors: list[Operand], rank: int) -> list[Any]:
    shape: list[Any] = [1] * rank
    for item in tensors:
        for own, size in enumerate(item.shape):
            if size != 1:
                shape[rank - item.ndim + own] = size
    return shape


@rule(aten.masked_select.default)
def data_dependent(self: Operand) -> Rows:
    return
    yield  # pragma: no cover - an empty table: the output's size depends on the data
