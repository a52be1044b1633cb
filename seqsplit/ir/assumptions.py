"""What a plan assumes of the inputs of a call, checked at each call before the plan is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Assumption", "BandedTable", "SameSize", "SameValues", "band_of"]


class Assumption(Protocol):
    """Something that has to be true of a call's inputs."""

    def holds(self, inputs: Sequence[object]) -> bool: ...


class SameSize:
    """Two dims, ``(input, dim)`` each, have the same size."""

    def __init__(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        self.one, self.other = one, other

    def holds(self, inputs: Sequence[object]) -> bool:
        (one, dim), (other, other_dim) = self.one, self.other
        return inputs[one].shape[dim] == inputs[other].shape[other_dim]


class SameValues:
    """Two small inputs hold the same values."""

    def __init__(self, one: int, other: int) -> None:
        self.one, self.other = one, other

    def holds(self, inputs: Sequence[object]) -> bool:
        one, other = inputs[self.one], inputs[self.other]
        return one is other or (one.shape == other.shape and torch.equal(one, other))


class BandedTable:
    """An input is a stored mask whose values are those of a band.

    The values are looked at in every call (no version counts ``mask.data.copy_(...)``): a band is
    the same along each diagonal, so that its first row and column tell it.

    Args:
        index: of the input.
        value: its tensor when the plan was made.
        band: what :func:`band_of` says of it.
    """

    def __init__(self, index: int, value: Tensor, band: tuple[float, float, float]) -> None:
        self.index, self.band = index, band
        self._edges = _edges(value).clone()

    def holds(self, inputs: Sequence[object]) -> bool:
        value = inputs[self.index]
        edges = _edges(value)
        if edges.dtype != self._edges.dtype or edges.device != self._edges.device:
            return band_of(value) == self.band
        if not torch.equal(edges, self._edges):  # of another size, perhaps
            return band_of(value) == self.band
        return torch.equal(value[..., 1:, 1:], value[..., :-1, :-1])


def _edges(table: Tensor) -> Tensor:
    """The first row and the first column."""
    table = table.detach()
    return torch.cat([table[..., 0, :], table[..., :, 0]], -1)


def band_of(table: Tensor) -> tuple[float, float, float] | None:
    """Recognise a stored mask: 1 inside a band of ``key - query`` and 0 outside, or 0 inside and a
    large negative number outside.

    Args:
        table: ``[..., N, N]``, queries by keys; leading dims of size 1.

    Returns:
        ``(low, high, outside)``: the band's ends, infinite where they lie beyond the table, and
        the value outside the band; ``None`` for any other table.
    """
    if table.dim() < 2 or table.shape[-1] != table.shape[-2] or table.shape[-1] < 2:
        return None
    size = table.shape[-1]
    if table.numel() != size * size:
        return None
    table = table.detach().reshape(size, size)
    outside = table.min().item() if table.dtype != torch.bool else 0.0
    inside = table != outside
    places = torch.arange(size, device=table.device)
    distance = places - places[:, None]
    if not inside.any() or inside.all():
        return None
    low, high = distance[inside].min().item(), distance[inside].max().item()
    if not torch.equal(inside, (distance >= low) & (distance <= high)):
        return None
    value = 1.0 if outside == 0.0 else 0.0
    if outside > 0.0 or not (table[inside] == value).all():
        return None
    return (
        -math.inf if low == 1 - size else float(low),
        math.inf if high == size - 1 else float(high),
        float(outside),
    )
