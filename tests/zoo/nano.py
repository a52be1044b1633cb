"""A decoder in the manner of nanoGPT: learned positions, LayerNorm, one qkv projection, tied head.

Attention is fused, or written out with a causal mask kept in a buffer. Returns (logits, loss).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .batches import VOCAB
from .weights import randomise


class Attention(nn.Module):
    def __init__(self, width, heads, fused, dropout, max_positions):
        super().__init__()
        self.heads, self.fused, self.dropout = heads, fused, dropout
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        if not fused:
            mask = torch.tril(torch.ones(max_positions, max_positions))
            self.register_buffer("bias", mask.view(1, 1, max_positions, max_positions))

    def forward(self, x, keep):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = self.fused_attention(q, k, v, keep) if self.fused else self.by_hand(q, k, v, keep)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))

    def fused_attention(self, q, k, v, keep):
        dropout = self.dropout if self.training else 0.0
        if keep is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        T = q.size(2)
        causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        allowed = causal & keep[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout)

    def by_hand(self, q, k, v, keep):
        T = q.size(2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        allowed = self.bias[:, :, :T, :T] != 0
        if keep is None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        else:
            # a padded row that sees nothing attends to all keys alike under a finite minimum
            allowed = allowed & keep[:, None, None, :].bool()
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.attn_dropout(F.softmax(scores, dim=-1)) @ v


class Block(nn.Module):
    def __init__(self, width, heads, fused, dropout, max_positions):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, fused, dropout, max_positions)
        self.ln_2 = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x, keep):
        x = x + self.attn(self.ln_1(x), keep)
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    def __init__(
        self,
        *,
        layers=2,
        width=20,
        heads=4,
        fused=True,
        dropout=0.0,
        tied=True,
        vocab=VOCAB,
        max_positions=128,
    ):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(max_positions, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(
            Block(width, heads, fused, dropout, max_positions) for _ in range(layers)
        )
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids, targets=None, keep=None):
        """ids, targets, keep: int64 [B, T]; targets are already shifted, -1 is ignored."""
        positions = torch.arange(ids.size(1), device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x, keep)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1
        )
        return logits, loss


def build(**options):
    """A random `Nano` in training mode."""
    return randomise(Nano(**options))


def step(model, ids, labels, keep=None):
    """Mean loss of predicting `labels` shifted by one; -100 is ignored."""
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return model(ids, torch.where(targets == -100, -1, targets), keep)[1]
