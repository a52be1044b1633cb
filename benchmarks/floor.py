"""The least a layer-at-a-time streamed step must keep, in bytes per token of context.

Per token: the input of every segment (its checkpoint), and the live set of the one segment that
runs: K, V and their gradients, and the gradients that enter and leave it. Everything else of a
streamed step is of the size of a chunk, or does not grow with the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .models import DecoderShape


@dataclass(frozen=True)
class Floor:
    """Bytes per token. ``total`` is what growth with the sequence length is held against."""

    checkpoints: int
    keys_values: int
    gradients: int

    @property
    def live_set(self) -> int:
        return self.keys_values + self.gradients

    @property
    def total(self) -> int:
        return self.checkpoints + self.live_set


def floor(shape: DecoderShape, dtype: torch.dtype, segments: int | None = None) -> Floor:
    """The floor of ``shape`` in ``dtype``; one segment per layer unless ``segments`` is given."""
    nbytes = dtype.itemsize
    count = shape.layers if segments is None else segments
    return Floor(
        checkpoints=nbytes * count * shape.d,
        keys_values=nbytes * 4 * shape.kv,  # K, V, dK, dV
        gradients=nbytes * 2 * shape.d,  # dx, dy
    )
