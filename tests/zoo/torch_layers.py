"""Decoders made of torch's own attention and encoder layers under a causal mask."""

import torch
import torch.nn.functional as F
from torch import nn

from .batches import VOCAB
from .weights import randomise


class MultiheadDecoder(nn.Module):
    """Pre-norm blocks around `nn.MultiheadAttention`. Logits are [B, T, V] in both layouts."""

    def __init__(self, *, layers=2, batch_first=True, need_weights=False, average=True):
        super().__init__()
        width, heads = 20, 4
        self.batch_first, self.need_weights, self.average = batch_first, need_weights, average
        self.embed = nn.Embedding(VOCAB, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(width, heads, batch_first=batch_first) for _ in range(layers)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 29), nn.GELU(), nn.Linear(29, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        T = ids.shape[1]
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool, device=ids.device), diagonal=1)
        x = self.embed(ids if self.batch_first else ids.t())
        for norm, attention, mlp in zip(self.norms, self.attentions, self.mlps, strict=True):
            h = norm(x)
            y, _ = attention(
                h,
                h,
                h,
                attn_mask=mask,
                need_weights=self.need_weights,
                average_attn_weights=self.average,
                is_causal=not self.need_weights,
            )
            x = x + y
            x = x + mlp(x)
        logits = self.head(x)
        return logits if self.batch_first else logits.transpose(0, 1)


class EncoderDecoder(nn.Module):
    """`nn.TransformerEncoderLayer`s used as a decoder by means of a causal mask."""

    def __init__(self, *, layers=2, batch_first=True, norm_first=True, stack=False):
        super().__init__()
        width = 20
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCAB, width)

        def layer():
            return nn.TransformerEncoderLayer(
                width, 4, 29, dropout=0.0, batch_first=batch_first, norm_first=norm_first
            )

        if stack:
            self.body = nn.TransformerEncoder(layer(), layers, enable_nested_tensor=False)
        else:
            self.body = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        T = ids.shape[1]
        weight = self.head.weight
        mask = nn.Transformer.generate_square_subsequent_mask(
            T, device=weight.device, dtype=weight.dtype
        )
        x = self.embed(ids if self.batch_first else ids.t())
        if isinstance(self.body, nn.ModuleList):
            for layer in self.body:
                x = layer(x, src_mask=mask, is_causal=True)
        else:
            x = self.body(x, mask=mask, is_causal=True)
        logits = self.head(x)
        return logits if self.batch_first else logits.transpose(0, 1)


def multihead(**options):
    """A random `MultiheadDecoder` in training mode."""
    return randomise(MultiheadDecoder(**options))


def encoder(**options):
    """A random `EncoderDecoder` in training mode."""
    return randomise(EncoderDecoder(**options))


def step(model, ids, labels):
    """Mean loss of predicting `labels` shifted by one; -100 is ignored."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
