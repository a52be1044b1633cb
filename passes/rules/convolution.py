"""Convolutions with a kernel of one: a linear map at each place by itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...placement import Chunk, Placement, Whole
from .registry import Operand, rule

aten = torch.ops.aten


@rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def convolution(
    input: Operand,  # noqa: A002 - the schema's name
    weight: Operand,
    bias: Operand | None,
    out: Operand,
) -> Iterator[tuple[Placement, ...]]:
    rest = [Whole] * (1 if bias is None else 2)
    places = range(input.ndim - weight.ndim + 2, input.ndim)
    if input.ndim == weight.ndim:
        yield Chunk(0), Chunk(0), *rest
    # As many places as before: it neither steps nor pads.
    if all(size == 1 for size in weight.shape[2:]):
        for dim in places:
            if out.shape[dim] == input.shape[dim]:
                yield Chunk(dim), Chunk(dim), *rest
