"""Attention to selected keys: the selection mixes all keys, the scores are those of a prefix."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compare import Pair
from zoo import batches, probe


def causal(T, device=None):
    places = torch.arange(T, device=device)
    return places <= places[:, None]


def by_scatter(q, k, v):
    """Each query attends to its best three keys."""
    T = q.shape[2]
    scores = (q @ k.transpose(2, 3)).masked_fill(~causal(T), float("-inf"))
    best = scores.detach().topk(3, dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    allowed = chosen & causal(T)
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v


def fused_by_scatter(q, k, v):
    T = q.shape[2]
    scores = (q.detach() @ k.detach().transpose(2, 3)).masked_fill(~causal(T), float("-inf"))
    best = scores.topk(3, dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=chosen & causal(T))


class GatheredBias(nn.Module):
    """A learned bias for the distance, computed from the query and looked up by gather."""

    def __init__(self):
        super().__init__()
        self.far = nn.Linear(6, 5)

    def forward(self, q, k, v):
        T = q.shape[2]
        places = torch.arange(T, device=q.device)
        distance = (places[:, None] - places).clamp(0, 4).expand(*q.shape[:2], T, T)
        bias = self.far(q).gather(-1, distance)
        bias = bias.masked_fill(~causal(T), float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.parametrize("chunk_size", [1, 4, 20])
@pytest.mark.parametrize("attend", [by_scatter, fused_by_scatter, GatheredBias])
def test_selected_keys(attend, chunk_size):
    def build():
        if attend is GatheredBias:
            return probe.build(lambda index: GatheredBias(), per_layer=True)
        return probe.build(attend)

    pair = Pair(build, step=probe.step, chunk_size=chunk_size)
    for length in (13, 5):
        pair.check(*batches.with_labels(3, length), explain=length == 13)
