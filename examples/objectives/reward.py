"""A reward model: one score per sequence, at its last token."""

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry(scores: Tensor, lengths: Tensor) -> Tensor:
    """Scores [B, T] of [chosen..., rejected...] at the last of `lengths` [B] tokens each."""
    last = scores[torch.arange(len(scores), device=scores.device), lengths - 1]
    chosen, rejected = last.chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()
