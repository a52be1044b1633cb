"""A plain decoder to measure with: grouped attention, rotary positions, gated MLP, loss inside.

By its shape every other layer attends within a window only, or the MLP is a mixture of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .experts import Mixture


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder.

    Attributes:
        d: width of the residual stream.
        layers: number of layers.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        ff: width of the gated MLP.
        vocab: size of the vocabulary.
        norm: ``"rms"`` or ``"layer"``.
        tied: whether the head shares its weight with the embedding.
        window: positions, its own included, that a query of layers 0, 2, ... sees; ``None``: all.
        experts: gated MLPs of width ``ff`` per layer, two of which each token goes through; 0: one
            MLP for all tokens.
    """

    d: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    ff: int = 1408
    vocab: int = 32_000
    norm: str = "rms"
    tied: bool = False
    window: int | None = None
    experts: int = 0

    def __post_init__(self) -> None:
        if self.d % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"heads must divide d and kv_heads must divide heads: {self}")
        if self.norm not in ("rms", "layer"):
            raise ValueError(f'norm must be "rms" or "layer", not {self.norm!r}')

    @property
    def head_dim(self) -> int:
        return self.d // self.heads

    @property
    def kv(self) -> int:
        """Width of K, and of V, at one position."""
        return self.kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer that a token meets: its FLOPs in one forward are
        twice as many."""
        mlps = 2 if self.experts else 1
        return self.d * (2 * self.d + 2 * self.kv + self.experts) + mlps * 3 * self.d * self.ff


SHAPES = {
    "small": DecoderShape(),
    "tiny": DecoderShape(d=128, layers=4, heads=8, kv_heads=2, ff=352, vocab=1000),
    "1b": DecoderShape(d=2048, layers=16, heads=32, kv_heads=8, ff=8192, vocab=128_256, tied=True),
    # Four of one size, to see what their differences do.
    "mha": DecoderShape(d=256, layers=4, heads=4, kv_heads=4, ff=704, vocab=8000),
    "tied": DecoderShape(d=256, layers=4, heads=4, kv_heads=2, ff=704, vocab=8000, tied=True),
    "window": DecoderShape(d=256, layers=4, heads=4, kv_heads=2, ff=704, vocab=8000, window=256),
    "moe": DecoderShape(d=256, layers=4, heads=4, kv_heads=2, ff=352, vocab=8000, experts=8),
}

# What every layer reads: cosines and sines [T, head_dim / 2] of the rotary angles, and the band
# [T, T] of the windowed layers, where there are any.
Tables = tuple[Tensor, Tensor, Tensor | None]


class Attention(nn.Module):
    def __init__(self, shape: DecoderShape, windowed: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.windowed = shape.heads, shape.kv_heads, windowed
        self.q = nn.Linear(shape.d, shape.d, bias=False)
        self.k = nn.Linear(shape.d, shape.kv, bias=False)
        self.v = nn.Linear(shape.d, shape.kv, bias=False)
        self.out = nn.Linear(shape.d, shape.d, bias=False)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        cos, sin, band = tables
        rotary = cos, sin
        q = rotate(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2), rotary)
        k = rotate(self.k(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2), rotary)
        v = self.v(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=band if self.windowed else None,
            is_causal=not self.windowed,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.d, shape.ff, bias=False)
        self.up = nn.Linear(shape.d, shape.ff, bias=False)
        self.down = nn.Linear(shape.ff, shape.d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, shape: DecoderShape, windowed: bool = False) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = make_norm(shape), make_norm(shape)
        self.attention = Attention(shape, windowed)
        self.mlp = Mixture(shape.d, shape.ff, shape.experts) if shape.experts else MLP(shape)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """``forward(tokens)`` gives logits; ``forward(tokens, labels)`` the mean loss alone.

    Tokens and labels are int64 ``[batch, T]``. Labels are shifted inside: position t is asked for
    ``labels[:, t + 1]``, and -100 is ignored. Causal attention gets no mask; a window is a mask of
    booleans that all windowed layers share.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.d)
        self.layers = nn.ModuleList(
            Layer(shape, windowed=shape.window is not None and index % 2 == 0)
            for index in range(shape.layers)
        )
        self.norm = make_norm(shape)
        self.head = nn.Linear(shape.d, shape.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def begin(self, tokens: Tensor) -> tuple[Tensor, Tables]:
        """Embedded tokens ``[batch, T, d]`` and the tables that every layer reads."""
        x, length = self.embedding(tokens), tokens.shape[1]
        cos, sin = rotary_tables(length, self.shape.head_dim, x.dtype, x.device)
        window = self.shape.window
        return x, (cos, sin, None if window is None else band(length, window, x.device))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x, tables = self.begin(tokens)
        for layer in self.layers:
            x = layer(x, tables)
        logits = self.head(self.norm(x))
        return logits if labels is None else shifted_loss(logits, labels)


def make_norm(shape: DecoderShape) -> nn.Module:
    return nn.RMSNorm(shape.d, eps=1e-6) if shape.norm == "rms" else nn.LayerNorm(shape.d)


def rotary_tables(
    length: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, head_dim / 2]`` of the rotary angles, base 10000."""
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, 10_000.0**-steps)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def band(length: int, window: int, device: torch.device) -> Tensor:
    """Which keys a query sees, bool ``[T, T]``: itself and the ``window - 1`` positions before."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance < window)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of each head of ``x`` ``[batch, heads, T, head_dim]``."""
    cos, sin = rotary
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of ``logits[:, t]`` against ``labels[:, t + 1]``, in float32 or wider."""
    logits = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
