"""The first-order linear recurrence ``h[t] = gate[t] * h[t - 1] + x[t]``.

Gated linear attention, state-space layers and their relatives come down to it, however they are
written. It exists twice: for the whole sequence, and for the rows of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqsplit.ops.caches import Carry, handed_on, received

__all__ = ["linear_scan", "linear_scan_rows"]


def linear_scan(gate: Tensor, x: Tensor, dim: int) -> Tensor:
    """``h[t] = gate[t] * h[t - 1] + x[t]`` along ``dim``, beginning with ``h[0] = x[0]``.

    Args:
        gate: as long as ``x`` along ``dim``; elsewhere it may have dims of size 1.
        x: of the result's shape.
        dim: the dim of time, counted from the front.

    Returns:
        All states, of the dtype that ``gate`` and ``x`` have together.
    """
    dtype = torch.promote_types(gate.dtype, x.dtype)
    return _Recurrence.apply(gate.to(dtype), x.to(dtype), dim)


def linear_scan_rows(gate: Tensor, x: Tensor, carry: Carry, dim: int, start: int) -> Tensor:
    """Rows of :func:`linear_scan` for the chunk that begins at ``start``."""
    dtype = torch.promote_types(gate.dtype, x.dtype)
    wide = torch.promote_types(dtype, carry.accumulate_dtype)
    gate, x = gate.to(wide), x.to(wide)
    if start > 0 and x.shape[dim] > 0:  # its first row depends on the last one before
        first = x.narrow(dim, 0, 1)
        anchor = x if x.requires_grad else gate
        before = received(anchor, carry, start, torch.zeros_like(first))
        first = first + gate.narrow(dim, 0, 1) * before
        x = torch.cat([first, x.narrow(dim, 1, x.shape[dim] - 1)], dim)
    return handed_on(_Recurrence.apply(gate, x, dim), carry, dim).to(dtype)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor, dim: int) -> Tensor:
        states = _scan(gate, x, dim)
        ctx.save_for_backward(gate, states)
        ctx.dim = dim
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # What a state is worth is the same recurrence from the end: its own share, and what the
        # next state makes of it. The rows are turned around, the gates are those of the next row.
        (gate, states), dim = ctx.saved_tensors, ctx.dim
        length = gate.shape[dim]
        later = gate.narrow(dim, 1, length - 1).conj().flip(dim)
        later = torch.cat([later.narrow(dim, 0, min(1, length - 1)), later], dim)
        worth = _scan(later if length > 1 else gate, grad.flip(dim), dim).flip(dim)
        of_gate = None
        if ctx.needs_input_grad[0]:
            products = worth.narrow(dim, 1, length - 1) * states.narrow(dim, 0, length - 1).conj()
            of_gate = torch.zeros_like(gate)
            summed = products.sum_to_size(gate.narrow(dim, 1, length - 1).shape)
            of_gate.narrow(dim, 1, length - 1).copy_(summed)
        return of_gate, worth if ctx.needs_input_grad[1] else None, None


def _scan(gate: Tensor, x: Tensor, dim: int) -> Tensor:
    """The states: two steps at a time, half as many, and then the states between.

    That is as many products as one step at a time, in as many calls as halving takes.
    """
    length = x.shape[dim]
    if not isinstance(length, int):  # a symbol, of a tensor without data
        return torch.empty_like(x)
    states = x.clone()
    if length < 2:
        return states
    odd_gate, odd_x = _every_second(gate, dim, 1), _every_second(x, dim, 1)
    pairs = odd_x.shape[dim]
    even_gate = _every_second(gate, dim, 0).narrow(dim, 0, pairs)
    even_x = _every_second(x, dim, 0).narrow(dim, 0, pairs)
    odd = _scan(odd_gate * even_gate, odd_x + odd_gate * even_x, dim)
    _every_second(states, dim, 1).copy_(odd)
    between = (length - 1) // 2
    gates = _every_second(gate, dim, 2)
    _every_second(states, dim, 2).add_(gates * odd.narrow(dim, 0, between))
    return states


def _every_second(x: Tensor, dim: int, first: int) -> Tensor:
    return torch.ops.aten.slice.Tensor(x, dim, first, None, 2)
