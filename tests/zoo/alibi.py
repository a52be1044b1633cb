"""A decoder with attention by einsum and ALiBi from relative positions; no position embedding."""

import torch
import torch.nn.functional as F
from torch import nn

from .batches import VOCAB
from .weights import randomise


class Block(nn.Module):
    def __init__(self, width, heads, head_dim):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Parameter(torch.zeros(width, heads, head_dim))
        self.key = nn.Parameter(torch.zeros(width, heads, head_dim))
        self.value = nn.Parameter(torch.zeros(width, heads, head_dim))
        self.out = nn.Parameter(torch.zeros(heads, head_dim, width))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 29), nn.ReLU(), nn.Linear(29, width)
        )
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes)

    def forward(self, x, keep):
        T = x.shape[1]
        h = self.norm(x)
        q, k, v = (torch.einsum("btd,dhe->bthe", h, w) for w in (self.query, self.key, self.value))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
        position = torch.arange(T, device=x.device)
        distance = position[None, :] - position[:, None]
        scores = scores + self.slopes[:, None, None] * distance
        allowed = distance <= 0
        if keep is not None:
            allowed = allowed & keep[:, None, None, :].bool()
        scores = torch.where(allowed, scores, torch.finfo(scores.dtype).min)
        y = torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v)
        x = x + torch.einsum("bqhe,hed->bqd", y, self.out)
        return x + self.mlp(x)


class Alibi(nn.Module):
    def __init__(self, *, layers=2, width=20, heads=4, head_dim=6, vocab=VOCAB):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, head_dim) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, keep=None):
        """Logits [B, T, V]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, keep)
        return self.head(self.norm(x))


def build(**options):
    """A random `Alibi` in training mode."""
    return randomise(Alibi(**options))


def step(model, ids, labels, keep=None):
    """Mean loss of predicting `labels` shifted by one, the class dim second as in einsum code."""
    logits = model(ids, keep)
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
