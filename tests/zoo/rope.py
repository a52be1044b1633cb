"""A decoder in the manner of llama2.c: RMSNorm, rotary positions on pairs, grouped heads, SwiGLU.

Attention is fused, or written out with an additive mask of -inf kept in a buffer.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .batches import VOCAB
from .weights import randomise


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def angles(head_dim, length, theta=10000.0):
    """Cosines and sines, each [length, head_dim // 2]."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    table = torch.outer(torch.arange(length).double(), frequencies)
    return table.cos(), table.sin()


def rotate(x, cos, sin):
    """Rotate neighbouring pairs of the last dim of x [B, T, heads, head_dim]."""
    real, imaginary = x.reshape(x.shape[:-1] + (-1, 2)).unbind(-1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return turned.flatten(3)


def repeat_kv(x, times):
    """[B, T, kv_heads, head_dim] with each head repeated `times` in a row."""
    B, T, heads, head_dim = x.shape
    if times == 1:
        return x
    x = x[:, :, :, None, :].expand(B, T, heads, times, head_dim)
    return x.reshape(B, T, heads * times, head_dim)


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads, head_dim, fused, max_positions):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.fused = heads, kv_heads, head_dim, fused
        self.wq = nn.Linear(width, heads * head_dim, bias=False)
        self.wk = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, width, bias=False)
        if not fused:
            mask = torch.full((1, 1, max_positions, max_positions), float("-inf"))
            self.register_buffer("mask", torch.triu(mask, diagonal=1))

    def forward(self, x, cos, sin, keep):
        B, T, _ = x.shape
        q = rotate(self.wq(x).view(B, T, self.heads, self.head_dim), cos, sin)
        k = rotate(self.wk(x).view(B, T, self.kv_heads, self.head_dim), cos, sin)
        v = self.wv(x).view(B, T, self.kv_heads, self.head_dim)
        times = self.heads // self.kv_heads
        q = q.transpose(1, 2)
        k, v = (repeat_kv(t, times).transpose(1, 2) for t in (k, v))
        pads = None
        if keep is not None:
            pads = (1 - keep[:, None, None, :]).to(q.dtype) * torch.finfo(q.dtype).min
        if not self.fused:
            scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
            scores = scores + self.mask[:, :, :T, :T]
            if pads is not None:
                scores = scores + pads
            y = F.softmax(scores, dim=-1) @ v
        elif pads is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            causal = torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal + pads)
        return self.wo(y.transpose(1, 2).contiguous().view(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads, head_dim, hidden, fused, max_positions):
        super().__init__()
        self.attention = Attention(width, heads, kv_heads, head_dim, fused, max_positions)
        self.feed_forward = FeedForward(width, hidden)
        self.attention_norm = RMSNorm(width)
        self.ffn_norm = RMSNorm(width)

    def forward(self, x, cos, sin, keep):
        x = x + self.attention(self.attention_norm(x), cos, sin, keep)
        return x + self.feed_forward(self.ffn_norm(x))


class Rope(nn.Module):
    def __init__(
        self,
        *,
        layers=2,
        width=20,
        heads=4,
        kv_heads=2,
        head_dim=6,
        hidden=29,
        fused=True,
        vocab=VOCAB,
        max_positions=128,
    ):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            Block(width, heads, kv_heads, head_dim, hidden, fused, max_positions)
            for _ in range(layers)
        )
        self.norm = RMSNorm(width)
        self.output = nn.Linear(width, vocab, bias=False)
        cos, sin = angles(head_dim, max_positions)
        self.register_buffer("freqs_cos", cos.float(), persistent=False)
        self.register_buffer("freqs_sin", sin.float(), persistent=False)
        self.last_loss = None

    def forward(self, ids, targets=None, keep=None):
        """Logits [B, T, V]; with targets [B, T] (-100 ignored) the loss is left in `last_loss`."""
        T = ids.shape[1]
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.freqs_cos[:T], self.freqs_sin[:T], keep)
        logits = self.output(self.norm(x))
        if targets is not None:
            self.last_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits


def build(**options):
    """A random `Rope` in training mode."""
    return randomise(Rope(**options))


def step(model, ids, labels, keep=None):
    """Mean loss of predicting `labels` shifted by one; -100 is ignored."""
    logits = model(ids, keep=keep)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
