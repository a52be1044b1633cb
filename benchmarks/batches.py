"""Random batches to train on."""

from __future__ import annotations

import torch
from torch import Tensor

from .models import DecoderShape


def make_batch(
    shape: DecoderShape, length: int, batch: int = 1, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Random tokens and labels, int64 ``[batch, length]``, the first labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocab, (batch, length), generator=generator)
    labels = tokens.clone()
    labels[:, : length // 16] = -100
    return tokens.to(device), labels.to(device)
