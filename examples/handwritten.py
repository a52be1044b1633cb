"""A decoder as one writes it by hand: plain PyTorch that knows nothing of seqsplit."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a `Decoder`; `num_heads` query heads share `num_kv_heads` heads of K and V."""

    vocab_size: int
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_dim: int = 512
    rope_base: float = 10_000.0


def rotary_table(length: int, head_dim: int, base: float, device: torch.device) -> Tensor:
    """Return the angle of every position and pair of channels, float32 [length, head_dim / 2]."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    return torch.outer(torch.arange(length, device=device), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the channel pairs of x [B, heads, T, head_dim] by angles [T, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    """Causal attention with grouped heads and rotary positions."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.head_dim = config.head_dim
        q_dim, kv_dim = (
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
        )
        self.q = nn.Linear(config.dim, q_dim, bias=False)
        self.k = nn.Linear(config.dim, kv_dim, bias=False)
        self.v = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(q_dim, config.dim, bias=False)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, T, heads * head_dim] -> [B, heads, T, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q = rotate(self.split_heads(self.q(x)), angles)
        k = rotate(self.split_heads(self.k(x)), angles)
        v = self.split_heads(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """SwiGLU: one projection opens and closes the other."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.up = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention, then the MLP, each on a normalised copy of the residual stream."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """The whole model; its head shares the embedding's weight.

    Set `checkpointing` to True to recompute every block in the backward, in the usual way.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.checkpointing = False
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [B, T, vocab_size] for tokens [B, T], or with targets the mean loss.

        targets [B, T] hold the token that should follow each position, -100 where none counts.
        """
        logits = self.head(self.hidden(tokens))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the normalised hidden states [B, T, dim] that the head reads."""
        config = self.config
        x = self.embedding(tokens)
        angles = rotary_table(tokens.shape[1], config.head_dim, config.rope_base, tokens.device)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, angles, use_reentrant=False)
            else:
                x = block(x, angles)
        return self.norm(x)
