"""A small decoder with an exchangeable attention, for tests of one mechanism at a time."""

import torch.nn.functional as F
from torch import nn

from .batches import VOCAB
from .weights import randomise


class Layer(nn.Module):
    def __init__(self, attend, width, heads, head_dim):
        super().__init__()
        self.attend = attend
        self.heads, self.head_dim = heads, head_dim
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, heads * head_dim)
        self.k = nn.Linear(width, heads * head_dim)
        self.v = nn.Linear(width, heads * head_dim)
        self.o = nn.Linear(heads * head_dim, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 29), nn.SiLU(), nn.Linear(29, width)
        )

    def forward(self, x, **extras):
        h = self.norm(x)
        q, k, v = (
            p(h).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        y = self.attend(q, k, v, **extras)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Probe(nn.Module):
    """attend: `attend(q, k, v, **extras)` on [B, heads, T, head_dim], a function or a module.

    A factory (`per_layer=True`) is called with the layer's index to make each layer's own.
    """

    def __init__(self, attend, *, layers=2, width=20, heads=4, head_dim=6, per_layer=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            Layer(attend(index) if per_layer else attend, width, heads, head_dim)
            for index in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def hidden(self, ids, **extras):
        """The last hidden states [B, T, width]."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, **extras)
        return self.norm(x)

    def forward(self, ids, **extras):
        """Logits [B, T, V]."""
        return self.head(self.hidden(ids, **extras))


def build(attend=None, **options):
    """A random `Probe` in training mode; plain causal fused attention by default."""
    return randomise(Probe(attend or causal, **options))


def causal(q, k, v):
    """Fused causal attention without a mask tensor."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def step(model, ids, labels, **extras):
    """Mean loss of predicting `labels` shifted by one; -100 is ignored."""
    logits = model(ids, **extras)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
