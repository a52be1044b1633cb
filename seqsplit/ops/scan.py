"""Scans of a chunk: the op on the chunk's own rows, and the state before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from seqsplit.ops.caches import Carry, handed_on, received, state_handed_on, state_shared

__all__ = ["cumprod_rows", "cumsum_rows", "logcumsumexp_rows", "recurrent_rows"]


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


def recurrent_rows(
    step: Callable[[Tensor | None], tuple[Tensor, Tensor]],
    operands: Sequence[Tensor],
    carry: Carry,
    start: int,
    last: bool,
    first: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Rows of a function that takes the state before them and gives the one after them; and the
    chunk's share of the final state, which is zero in all chunks but the last.

    Args:
        step: the function on the chunk that begins at ``start``, of a state.
        operands: what it computes with.
        carry: of the states.
        last: whether no chunk comes after it.
        first: the state before the first position, ``None`` for the function's own.
    """
    state = first
    if start > 0:
        differentiable = [operand for operand in operands if operand.requires_grad]
        state = received((differentiable or operands)[0], carry, start, None)
    out, state = step(state)
    return state_handed_on(out, state, carry), state_shared(state, carry, last)


def _begin(x: Tensor, carry: Carry, dim: int, start: int, neutral: float) -> tuple[Tensor, Tensor]:
    """The rows in a dtype in which errors do not grow with the number of chunks, and the state."""
    if x.is_floating_point():
        x = x.to(torch.promote_types(x.dtype, carry.accumulate_dtype))
    shape = list(x.shape)
    shape[dim] = 1
    first = x.new_full(shape, neutral)
    return x, received(x, carry, start, first)
