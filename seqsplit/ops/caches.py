"""The vocabulary of chunk bodies: cached reads, attention of a chunk, replayed random ops.

A chunk body is ordinary ATen code plus the functions below. ``CachedRead`` is where chunks meet.
In the forward it writes the chunk's rows into a buffer and gives back everything up to the
chunk's end. The backward visits chunks from the last to the first, so when a chunk is reached all
later ones have added their share to its rows of the gradient buffer, and handing these rows back
is all there is to do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Cache",
    "Carry",
    "PrefixGradient",
    "cached_parts",
    "cached_read",
    "handed_on",
    "keys_start",
    "received",
    "state_handed_on",
    "state_shared",
]


class Cache:
    """A buffer over the whole sequence, with its gradient.

    Args:
        dim: the sequence's dim.
        length: the sequence's length.
        accumulate_dtype: the least precise dtype of the gradient buffer.
    """

    def __init__(self, dim: int, length: int, accumulate_dtype: torch.dtype) -> None:
        self.dim = dim
        self._length = length
        self._accumulate_dtype = accumulate_dtype
        self._values: Tensor | None = None
        self._complete = False
        self._grad: Tensor | None = None

    @property
    def state(self) -> Tensor | None:
        """What the forward leaves in it for the backward."""
        return self._values

    @state.setter
    def state(self, values: Tensor | None) -> None:
        self._values, self._complete = values, values is not None

    def close(self) -> None:
        """Every chunk has put its rows: what else is written is not looked at."""
        self._complete = True

    def write(self, x: Tensor, start: int, end: int) -> None:
        """Put a chunk's rows where they belong, unless the forward has put all of them there."""
        if self._complete:
            return
        if self._values is None:
            self._values = x.new_empty(self._full_shape(x))
        self.read(start, end).copy_(x)

    def read(self, start: int, end: int) -> Tensor:
        """A view of rows ``[start, end)``."""
        return self._values.narrow(self.dim, start, end - start)

    def add_grad(self, grad: Tensor, start: int) -> None:
        """Add to the gradient of the rows that begin at ``start``."""
        if self._grad is None:
            dtype = torch.promote_types(grad.dtype, self._accumulate_dtype)
            self._grad = torch.zeros(self._full_shape(grad), dtype=dtype, device=grad.device)
        self._grad.narrow(self.dim, start, grad.shape[self.dim]).add_(grad)

    def take_grad(self, start: int, end: int, dtype: torch.dtype) -> Tensor | None:
        """The gradient of rows ``[start, end)``, complete once all later chunks were visited."""
        if self._grad is None:
            return None
        return self._grad.narrow(self.dim, start, end - start).to(dtype, copy=True)

    def _full_shape(self, x: Tensor) -> list[int]:
        shape = list(x.shape)
        shape[self.dim] = self._length
        return shape


class _CachedRead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cache: Cache, first: int, start: int, end: int, parts: bool
    ) -> tuple[Tensor, ...]:
        cache.write(x, start, end)
        ctx.cache, ctx.first, ctx.start, ctx.end = cache, first, start, end
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        if parts:
            return cache.read(first, start), cache.read(start, end)
        return (cache.read(first, end),)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        for grad, begin in zip(grads, (ctx.first, ctx.start)):
            if grad is not None:
                ctx.cache.add_grad(grad, begin)
        own = ctx.cache.take_grad(ctx.start, ctx.end, ctx.dtype)
        return own, None, None, None, None, None


def keys_start(start: int, window: int | None) -> int:
    """The first position that the rows from ``start`` on can see."""
    return 0 if window is None else max(0, start - window + 1)


def cached_read(x: Tensor, cache: Cache, first: int, start: int, end: int) -> Tensor:
    """Write rows ``[start, end)``, read ``[first, end)``: a view of the cache."""
    return _CachedRead.apply(x, cache, first, start, end, False)[0]


def cached_parts(
    x: Tensor, cache: Cache, first: int, start: int, end: int
) -> tuple[Tensor, Tensor]:
    """The same in two views: what came before the chunk, ``[first, start)``, and the chunk.

    The first one says in ``seqsplit_gradient`` where its gradient may be added in parts.
    """
    before, own = _CachedRead.apply(x, cache, first, start, end, True)
    before.seqsplit_gradient = PrefixGradient(cache, first)
    return before, own


class PrefixGradient:
    """Where the gradient of rows before a chunk is added, without ever being there as a whole."""

    def __init__(self, cache: Cache, first: int) -> None:
        self._cache, self._first = cache, first

    def add(self, grad: Tensor, start: int) -> None:
        """Add to the rows that begin at ``start``, counted from the first that is read."""
        self._cache.add_grad(grad, self._first + start)


class Carry:
    """A state that each chunk hands to the next, and the gradient that comes back for it.

    Args:
        accumulate_dtype: the least precise dtype of states.
    """

    def __init__(self, accumulate_dtype: torch.dtype) -> None:
        self.accumulate_dtype = accumulate_dtype
        self.grad: Tensor | None = None  # of the state handed on, from the chunks after
        self._received: dict[int, Tensor] = {}
        self._last: Tensor | None = None

    @property
    def state(self) -> dict[int, Tensor]:
        """What the forward leaves in it for the backward: what each chunk was handed."""
        return self._received

    @state.setter
    def state(self, received: dict[int, Tensor]) -> None:
        self._received = received

    def close(self) -> None:
        """Every chunk was handed its state."""

    def hand_on(self, state: Tensor) -> None:
        self._last = state.detach().clone()

    def receive(self, start: int, first: Tensor | None) -> Tensor:
        """What the chunk that begins at ``start`` was handed, ``first`` at the beginning."""
        return self._received.setdefault(start, first if self._last is None else self._last)

    def take_grad(self) -> Tensor | None:
        """The gradient of the state handed on, once: the chunk before gets another one."""
        grad, self.grad = self.grad, None
        return grad


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, carry: Carry, start: int, first: Tensor | None) -> Tensor:
        ctx.carry = carry
        return carry.receive(start, first).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.carry.grad = grad
        return None, None, None, None


class _HandedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, carry: Carry, dim: int) -> Tensor:
        ctx.carry, ctx.dim = carry, dim
        if rows.shape[dim] > 0:
            carry.hand_on(rows.narrow(dim, -1, 1))
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if grad.shape[ctx.dim] > 0 and (later := ctx.carry.take_grad()) is not None:
            grad = grad.clone()
            grad.narrow(ctx.dim, -1, 1).add_(later)
        return grad, None, None


class _StateHandedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, state: Tensor, carry: Carry) -> Tensor:
        ctx.carry = carry
        carry.hand_on(state)
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, ctx.carry.take_grad(), None


class _StateShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, carry: Carry, last: bool) -> Tensor:
        ctx.carry, ctx.last = carry, last
        return state.clone() if last else torch.zeros_like(state)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad if ctx.last else ctx.carry.take_grad(), None, None


def received(x: Tensor, carry: Carry, start: int, first: Tensor | None) -> Tensor:
    """The state handed to a chunk, ``first`` if no chunk was before it; ``x`` is any value of the
    chunk that needs a gradient."""
    return _Received.apply(x, carry, start, first)


def handed_on(rows: Tensor, carry: Carry, dim: int) -> Tensor:
    """The same rows, the last of which is handed to the next chunk as its state."""
    return _HandedOn.apply(rows, carry, dim)


def state_handed_on(rows: Tensor, state: Tensor, carry: Carry) -> Tensor:
    """The same rows; the state after them is handed to the next chunk."""
    return _StateHandedOn.apply(rows, state, carry)


def state_shared(state: Tensor, carry: Carry, last: bool) -> Tensor:
    """A chunk's share of the state after the last one: its own, or zero. Whichever of its rows and
    its share is differentiated takes the gradient of the state that it has handed on."""
    return _StateShared.apply(state, carry, last)
