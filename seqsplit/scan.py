"""Cumulative ops of a chunk: the op on the chunk's own rows, and the state before them."""

from __future__ import annotations

import torch
from torch import Tensor

from .primitives import Carry, handed_on, received

__all__ = ["cumprod_rows", "cumsum_rows", "logcumsumexp_rows"]


def cumsum_rows(x: Tensor, carry: Carry, dim: int, start: int) -> Tensor:
    """Rows of ``cumsum(dim)`` over the whole sequence, for the chunk that begins at ``start``."""
    wide, before = _begin(x, carry, dim, start, 0.0)
    return handed_on(wide.cumsum(dim) + before, carry, dim).to(x.dtype)


def cumprod_rows(x: Tensor, carry: Carry, dim: int, start: int) -> Tensor:
    """Rows of ``cumprod(dim)``."""
    wide, before = _begin(x, carry, dim, start, 1.0)
    return handed_on(wide.cumprod(dim) * before, carry, dim).to(x.dtype)


def logcumsumexp_rows(x: Tensor, carry: Carry, dim: int, start: int) -> Tensor:
    """Rows of ``logcumsumexp(dim)``."""
    wide, before = _begin(x, carry, dim, start, float("-inf"))
    return handed_on(torch.logaddexp(wide.logcumsumexp(dim), before), carry, dim).to(x.dtype)


def _begin(x: Tensor, carry: Carry, dim: int, start: int, neutral: float) -> tuple[Tensor, Tensor]:
    """The rows in a dtype in which errors do not grow with the number of chunks, and the state."""
    if x.is_floating_point():
        x = x.to(torch.promote_types(x.dtype, carry.accumulate_dtype))
    shape = list(x.shape)
    shape[dim] = 1
    first = x.new_full(shape, neutral)
    return x, received(x, carry, start, first)
