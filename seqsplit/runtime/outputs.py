"""Outputs of a segment, put together from those of its chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqsplit.ir.plan import BodyOutput
from seqsplit.runtime.slicing import part_view

__all__ = ["Outputs"]


class Outputs:
    """Gathers the chunks' outputs: rows side by side, shares added up.

    Args:
        specs: what the outputs are.
        length: of the sequence.
        num_chunks: how many chunks there will be.
        accumulate_dtype: the least precise dtype in which shares are added up.
    """

    def __init__(
        self,
        specs: Sequence[BodyOutput],
        length: int,
        num_chunks: int,
        accumulate_dtype: torch.dtype,
    ) -> None:
        self._specs, self._length, self._num_chunks = specs, length, num_chunks
        self._accumulate_dtype = accumulate_dtype
        self._whole: list[Tensor | None] = [None] * len(specs)
        self._dtypes: list[torch.dtype | None] = [None] * len(specs)

    def add(self, start: int, end: int, outputs: Sequence[Tensor]) -> None:
        """Take the outputs of chunk ``[start, end)``."""
        for slot, (spec, out) in enumerate(zip(self._specs, outputs)):
            if spec.placement.partial:
                self._add_share(slot, out)
            else:
                self._put_rows(slot, spec, start, end, out)

    def _add_share(self, slot: int, share: Tensor) -> None:
        if self._whole[slot] is None:
            self._dtypes[slot] = share.dtype
            wide = share.dtype
            if share.is_floating_point() or share.is_complex():
                wide = torch.promote_types(wide, self._accumulate_dtype)
            self._whole[slot] = share.to(wide, copy=True)
        else:
            self._whole[slot] += share

    def _put_rows(self, slot: int, spec: BodyOutput, start: int, end: int, out: Tensor) -> None:
        if self._num_chunks == 1:
            # A body may hand back what it was given; an autograd function may not.
            self._whole[slot] = out.clone() if out._is_view() else out
            return
        length = self._length + spec.surplus
        if self._whole[slot] is None:
            shape, dim = list(out.shape), spec.placement.rows_dim
            shape[dim] = shape[dim] // max(min(end, length) - start, 1) * length
            self._whole[slot] = out.new_empty(shape)
        part = part_view(self._whole[slot], spec.placement, start, end, length)
        part.copy_(out.view(part.shape))

    def whole(self) -> list[Tensor]:
        """The outputs over the whole sequence."""
        return [
            whole if dtype is None else whole.to(dtype)
            for whole, dtype in zip(self._whole, self._dtypes)
        ]
