"""A decoder whose hidden states are [T, B, d], with attention by baddbmm and bmm."""

import torch
import torch.nn.functional as F
from torch import nn

from .batches import VOCAB
from .weights import randomise


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 29)
        self.down = nn.Linear(29, width)

    def attend(self, x, keep):
        T, B, width = x.shape
        head_dim = width // self.heads
        qkv = self.qkv(x).view(T, B, self.heads, 3 * head_dim)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k, v = (t.reshape(T, B * self.heads, head_dim) for t in (q, k, v))
        empty = torch.zeros(B * self.heads, T, T, dtype=x.dtype, device=x.device)
        scores = torch.baddbmm(
            empty, q.transpose(0, 1), k.permute(1, 2, 0), beta=0.0, alpha=head_dim**-0.5
        ).view(B, self.heads, T, T)
        hidden = torch.triu(torch.ones(T, T, dtype=torch.bool, device=x.device), diagonal=1)
        fill = float("-inf")
        if keep is not None:
            hidden = hidden | (keep == 0).t()[:, None, None, :]
            fill = torch.finfo(x.dtype).min
        weights = F.softmax(scores.masked_fill(hidden, fill), dim=-1)
        y = torch.bmm(weights.view(B * self.heads, T, T), v.transpose(0, 1))
        return self.dense(y.transpose(0, 1).reshape(T, B, width))

    def forward(self, x, keep):
        x = x + self.attend(self.norm1(x), keep)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class SequenceFirst(nn.Module):
    def __init__(self, *, layers=2, width=20, heads=4, vocab=VOCAB, max_positions=128):
        super().__init__()
        self.word = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(max_positions, 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids, keep=None):
        """ids and keep: [T, B]; logits [T, B, V] over the tied vocabulary."""
        x = self.word(ids) + self.position[: ids.shape[0]]
        for block in self.blocks:
            x = block(x, keep)
        return F.linear(self.norm(x), self.word.weight)


def build(**options):
    """A random `SequenceFirst` in training mode."""
    return randomise(SequenceFirst(**options))


def step(model, ids, labels, keep=None):
    """Mean loss from batch-first ids, labels and keep [B, T], transposed on the way in."""
    logits = model(ids.t().contiguous(), None if keep is None else keep.t().contiguous())
    return F.cross_entropy(logits[:-1].flatten(0, 1), labels.t()[1:].flatten())
