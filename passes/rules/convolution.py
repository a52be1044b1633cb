"""Convolutions: along a dim where the kernel has size one, each place is by itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from seqsplit.ir.placement import Chunk, Placement, Sum, Whole
from seqsplit.passes.rules.registry import Operand, rule

aten = torch.ops.aten


@rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def convolution(
    input: Operand,  # noqa: A002 - the schema's name
    weight: Operand,
    bias: Operand | None,
    out: Operand,
) -> Iterator[tuple[Placement, ...]]:
    rest = [Whole] if bias is not None else []
    grouped = input.shape[-weight.ndim + 1] != weight.shape[1]
    if input.ndim == weight.ndim:
        yield Chunk(0), Chunk(0), Whole, *rest
    if not grouped:
        channels = input.ndim - weight.ndim + 1
        yield Chunk(channels), Whole, Chunk(0), *([Chunk(0)] if bias is not None else [])
        if bias is None:
            yield Sum, Chunk(channels), Chunk(1)
    for place in range(2, weight.ndim):
        dim = place + input.ndim - weight.ndim
        # As many places as before, each by itself: it neither steps nor pads.
        if weight.shape[place] == 1 and out.shape[dim] == input.shape[dim]:
            yield Chunk(dim), Chunk(dim), Whole, *rest
