"""Norms before and after each branch, q/k norm, rotary on part of the head, capped logits."""

import torch
import torch.nn.functional as F
from torch import nn

from .batches import VOCAB
from .rope import RMSNorm, angles
from .weights import randomise


def rotate_part(x, cos, sin, size):
    """Rotate the first `size` features of x [B, heads, T, head_dim], halves against halves."""
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1)


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads, head_dim, rotary_dim):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary_dim = rotary_dim
        self.q = nn.Linear(width, heads * head_dim, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm, self.k_norm = RMSNorm(head_dim), nn.LayerNorm(head_dim)
        self.before, self.after = RMSNorm(width), RMSNorm(width)
        self.before_mlp, self.after_mlp = RMSNorm(width), RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * 29)
        self.down = nn.Linear(29, width)

    def attend(self, x, cos, sin):
        B, T, _ = x.shape
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        kv = self.kv(x).view(B, T, 2, self.kv_heads, self.head_dim)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        q = rotate_part(self.q_norm(q), cos, sin, self.rotary_dim)
        k = rotate_part(self.k_norm(k), cos, sin, self.rotary_dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def mlp(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * up)

    def forward(self, x, cos, sin):
        x = x + self.after(self.attend(self.before(x), cos, sin))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


class Sandwich(nn.Module):
    def __init__(
        self,
        *,
        layers=2,
        width=20,
        heads=6,
        kv_heads=2,
        head_dim=10,
        vocab=VOCAB,
        max_positions=128,
    ):
        super().__init__()
        self.rotary_dim = 4
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, kv_heads, head_dim, self.rotary_dim) for _ in range(layers)
        )
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        cos, sin = angles(self.rotary_dim, max_positions)
        self.register_buffer("cos", cos.float())
        self.register_buffer("sin", sin.float())

    def forward(self, ids):
        """Logits [B, T, V], capped at +-5."""
        T = ids.shape[1]
        x = self.embed(ids) * self.embed.embedding_dim**0.5
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return 5.0 * torch.tanh(self.head(self.norm(x)) / 5.0)


def build(**options):
    """A random `Sandwich` in training mode."""
    return randomise(Sandwich(**options))


def step(model, ids, labels):
    """Mean loss of predicting `labels` shifted by one; -100 is ignored."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
