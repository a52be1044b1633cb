"""A cache of as many rows as a window and a chunk need, instead of the whole sequence's."""

from __future__ import annotations

import torch
from torch import Tensor

from seqsplit.ops.caches import keys_start

__all__ = ["SlidingCache"]


class SlidingCache:
    """Rows by chunk, with their gradients: those that nobody reads any more are forgotten.

    Takes the place of a :class:`~seqsplit.caches.Cache` where every chunk's rows can be made
    by themselves. The forward, going up, forgets what lies before the window of the next chunk.
    The backward, going down, has the rows of a window made as it comes to them, and forgets a
    chunk's rows once it has handed back their gradient.

    Args:
        dim: the sequence's dim.
        window: how many rows up to its own a row reads.
        accumulate_dtype: the least precise dtype of the gradient.
    """

    def __init__(self, dim: int, window: int, accumulate_dtype: torch.dtype) -> None:
        self._dim, self._window = dim, window
        self._accumulate_dtype = accumulate_dtype
        self.state: dict[int, Tensor] = {}  # rows by their first position, in no order
        self._grads: dict[int, Tensor] = {}
        self._top = 0  # the last position that was written

    def holds(self, start: int) -> bool:
        """Whether the rows of the chunk that begins at ``start`` are there."""
        return start in self.state

    def write(self, x: Tensor, start: int, end: int) -> None:
        """Take a chunk's rows, unless they are there."""
        if start in self.state:
            return
        self.state[start] = x.detach().clone()  # it may be a part of something wider
        if end > self._top:
            self._top = end
            self._forget_before(keys_start(start, self._window))

    def read(self, start: int, end: int) -> Tensor:
        """A copy of rows ``[start, end)``."""
        return torch.cat(
            [
                self.state[begin].narrow(self._dim, first, last - first)
                for begin, first, last in self._parts(start, end)
            ],
            self._dim,
        )

    def add_grad(self, grad: Tensor, start: int) -> None:
        """Add to the gradient of the rows that begin at ``start``."""
        end = start + grad.shape[self._dim]
        for begin, first, last in self._parts(start, end):
            if begin not in self._grads:
                dtype = torch.promote_types(grad.dtype, self._accumulate_dtype)
                self._grads[begin] = torch.zeros_like(self.state[begin], dtype=dtype)
            own = self._grads[begin].narrow(self._dim, first, last - first)
            own.add_(grad.narrow(self._dim, begin + first - start, last - first))

    def take_grad(self, start: int, end: int, dtype: torch.dtype) -> Tensor | None:
        """The gradient of a chunk's rows, all later chunks having been visited; and forget both."""
        del self.state[start]
        grad = self._grads.pop(start, None)
        return None if grad is None else grad.to(dtype)

    def close(self) -> None:
        """Every chunk finds its rows there."""

    def _parts(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Which rows of which chunk make up ``[start, end)``: ``(begin, first, last)``."""
        parts = []
        for begin in sorted(self.state):
            size = self.state[begin].shape[self._dim]
            first, last = max(start - begin, 0), min(end - begin, size)
            if first < last:
                parts.append((begin, first, last))
        return parts

    def _forget_before(self, first: int) -> None:
        for begin in list(self.state):
            if begin + self.state[begin].shape[self._dim] <= first:
                del self.state[begin]
