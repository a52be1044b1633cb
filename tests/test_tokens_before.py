"""Tokens of the model's own before those it is given: the sequence is longer than its inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqsplit
from attending import scores_of
from compare import Pair
from zoo import batches, probe

CHUNK, OWN = 4, 3


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q, k, v):
    scores = scores_of(q, k)
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def to_all(q, k, v):
    """Not causal: every token sees all, its own ones first among them."""
    return scores_of(q, k).softmax(-1) @ v


class WithTokens(nn.Module):
    """Learned vectors before the embeddings; the loss is of the other tokens."""

    def __init__(self, attend, drop_first):
        super().__init__()
        self.inner = probe.build(attend)
        self.tokens = nn.Parameter(torch.randn(OWN, 20))
        self.drop_first = drop_first

    def forward(self, ids, labels):
        x = self.inner.embed(ids)
        x = torch.cat([self.tokens.expand(ids.shape[0], -1, -1), x], 1)
        for layer in self.inner.layers:
            x = layer(x)
        if self.drop_first:
            x = x[:, OWN:]
        else:
            ignored = torch.full_like(labels[:, :1], -100).expand(-1, OWN)
            labels = torch.cat([ignored, labels], 1)
        logits = self.inner.head(self.inner.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def step(model, ids, labels):
    return model(ids, labels)


@pytest.mark.parametrize("drop_first", [True, False])
@pytest.mark.parametrize("attend", [fused, by_hand, to_all], ids=lambda a: a.__name__)
def test_learned_tokens(attend, drop_first):
    pair = Pair(lambda: WithTokens(attend, drop_first), step=step, chunk_size=CHUNK)
    for length in (13, 2):
        batch = batches.with_labels(2, length)
        pair.check(*batch)
    report = seqsplit.explain(pair.run_mine, *batches.with_labels(2, 13))
    assert report.fully_streamed, report
    assert sum(segment.num_caches for segment in report.segments) >= 2 or attend is to_all


def test_what_is_wide_is_not_dropped_from_in_silence():
    """Logits of which the first are dropped would be there whole: the report says so."""

    class DropsLogits(WithTokens):
        def forward(self, ids, labels):
            x = torch.cat([self.tokens.expand(ids.shape[0], -1, -1), self.inner.embed(ids)], 1)
            for layer in self.inner.layers:
                x = layer(x)
            logits = self.inner.head(self.inner.norm(x)).repeat(1, 1, 3)[:, OWN:]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    pair = Pair(lambda: DropsLogits(fused, True), step=step, streamed=False, chunk_size=CHUNK)
    batch = batches.with_labels(2, 13)
    pair.check(*batch)
    assert not seqsplit.explain(pair.run_mine, *batch).fully_streamed
