"""Attention and MLP side by side from one norm and one projection; a single key/value head."""

import torch
import torch.nn.functional as F
from torch import nn

from .batches import VOCAB
from .weights import randomise


class Block(nn.Module):
    def __init__(self, width, heads, head_dim, hidden):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.parts = (heads * head_dim, head_dim, head_dim, 2 * hidden)
        self.norm = nn.LayerNorm(width, bias=False)
        self.fused_in = nn.Linear(width, sum(self.parts), bias=False)
        self.attn_out = nn.Linear(heads * head_dim, width, bias=False)
        self.mlp_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v, mlp = self.fused_in(self.norm(x)).split(self.parts, dim=-1)
        q = q.view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k, v = (t.unsqueeze(1).expand(-1, self.heads, -1, -1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gate, up = mlp.chunk(2, dim=-1)
        y = y.permute(0, 2, 1, 3).reshape(B, T, -1)
        return x + self.attn_out(y) + self.mlp_out(F.silu(gate) * up)


class Parallel(nn.Module):
    def __init__(self, *, layers=2, width=20, heads=4, head_dim=6, hidden=29, vocab=VOCAB):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, heads, head_dim, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        """Logits [B, T, V]."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(**options):
    """A random `Parallel` in training mode."""
    return randomise(Parallel(**options))


def step(model, ids, labels):
    """Mean loss over valid shifted labels, written as a masked sum of log-probabilities."""
    targets = labels[:, 1:]
    valid = targets != -100
    logp = torch.log_softmax(model(ids)[:, :-1], dim=-1)
    picked = logp.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * valid).sum() / valid.sum()
