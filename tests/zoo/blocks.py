"""A decoder of given blocks that returns its loss."""

from collections.abc import Iterable

import torch.nn.functional as F
from torch import nn


class OfBlocks(nn.Module):
    """An embedding, blocks `[B, T, width] -> [B, T, width]`, a head and the shifted loss."""

    def __init__(self, blocks: Iterable[nn.Module], vocab: int, width: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
