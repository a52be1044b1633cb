"""Ops that make a value from nothing but sizes, and the triangles cut out of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from seqsplit.ir.placement import Chunk, Placement
from seqsplit.passes.rules.registry import Operand, rule

aten = torch.ops.aten

Rows = Iterator[tuple[Placement, ...]]


@rule(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.rand.default,
    aten.randn.default,
    sizes="size",
)
def filled(out: Operand) -> Rows:
    for dim in range(out.ndim):
        yield (Chunk(dim),)


def _shift_diagonal(node: Any, arguments: dict, placement: Placement, chunk: Any) -> dict:
    """The diagonal of a block that does not start at the matrix's corner."""
    rows, columns = (placement.dims.get(node.meta["val"].ndim - k) for k in (2, 1))
    shift = chunk.subtract(chunk.first(rows) if rows else 0, chunk.first(columns) if columns else 0)
    return {**arguments, "diagonal": chunk.add(shift, arguments["diagonal"])}


@rule(aten.tril.default, aten.triu.default, rewrite=_shift_diagonal)
def triangle(self: Operand) -> Rows:
    for dim in range(self.ndim):
        yield Chunk(dim), Chunk(dim)
