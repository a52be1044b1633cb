"""Relative shifts: scores by distance, whose rows are moved until they line up with the keys."""

import math

import pytest
import torch
from torch import nn

from attending import HEAD_DIM, check_probe, positions
from graphs import output_of, trace
from seqsplit.passes.rewrite.normalize import normalize
from seqsplit.passes.rewrite.skews import gather_skews

LENGTH = 9


def by_dropping(scores):
    """[.., T, 2T] or wider, distances from T downwards: one entry of each row is dropped."""
    *lead, length, width = scores.shape
    turned = scores.reshape(*lead, width, length)[..., 1:, :]
    return turned.reshape(*lead, length, width - 1)[..., :length]


def by_looking_up(scores):
    """The same, its columns looked up by their numbers."""
    *lead, length, width = scores.shape
    turned = scores.reshape(*lead, width, length)[..., 1:, :]
    places = torch.arange(length)
    return torch.index_select(turned.reshape(*lead, length, width - 1), len(lead) + 1, places)


def by_padding(scores):
    """[.., T, 2T - 1]: a column of zeros is put before, then as above."""
    zeros = scores.new_zeros(*scores.shape[:-1], 1)
    return by_dropping(torch.cat([zeros, scores], -1))


SKEWS = {by_dropping: 0, by_looking_up: 1, by_padding: -1}  # distances beside twice the length


def by_distance(skew, q, project):
    """Scores of a query for each distance, lined up with the keys."""
    length = q.shape[2]
    distances = length - torch.arange(2 * length + SKEWS[skew], dtype=q.dtype)
    keys = torch.sin(distances[:, None] * (torch.arange(HEAD_DIM) + 1) / 7)
    return skew(torch.einsum("bhid,jd->bhij", q, project(keys)))


class Relative(nn.Module):
    """Keys by distance, sines put through a weight, as many as there are; each shift's own."""

    def __init__(self, skew, causal):
        super().__init__()
        self.skew, self.causal = skew, causal
        self.project = nn.Linear(HEAD_DIM, HEAD_DIM, bias=False)

    def forward(self, q, k, v):
        scores = q @ k.mT + by_distance(self.skew, q, self.project)
        if self.causal:
            rows, columns = positions(scores)
            scores = scores.masked_fill(columns > rows, -math.inf)
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("skew", SKEWS)
def test_attention_by_distance(skew, causal):
    check_probe(lambda _: Relative(skew, causal), per_layer=True)


@pytest.mark.parametrize("skew", SKEWS)
def test_a_shift_becomes_a_lookup(skew):
    q = torch.randn(2, 3, LENGTH, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    lowered = lowered_skew(by_distance, skew, q)
    assert output_of(lowered).target is torch.ops.aten.gather.default
    have, want = lowered.module(q), by_distance(skew, q, torch.exp)
    assert torch.equal(have, want)
    (grad,), (other,) = (torch.autograd.grad(y, q, y.cos()) for y in (have, want))
    torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-12)


def lowered_skew(scores_of, skew, q):
    lowered = trace(lambda q: scores_of(skew, q, torch.exp), q)
    normalize(lowered)
    gather_skews(lowered)
    lowered.module.recompile()
    return lowered


def too_many_columns(scores):
    """Later columns come from the next row."""
    *lead, length, width = scores.shape
    return scores.reshape(*lead, width, length)[..., 1:, :].reshape(*lead, length, width - 1)[
        ..., : length + 1
    ]


def detached_on_the_way(scores):
    with torch.no_grad():
        turned = scores.reshape(*scores.shape[:-2], scores.shape[-1], scores.shape[-2])[..., 1:, :]
    length, width = scores.shape[-2:]
    return turned.reshape(*scores.shape[:-1], width - 1)[..., :length]


def test_what_reaches_other_rows_is_left():
    def scores_of(skew, q, project):
        return skew(torch.cat([q @ q.mT, project(q @ q.mT)], -1))

    q = torch.randn(2, 3, LENGTH, HEAD_DIM, dtype=torch.float64)
    lowered = lowered_skew(scores_of, too_many_columns, q)
    assert output_of(lowered).target is torch.ops.aten.slice.Tensor
    assert torch.equal(lowered.module(q), scores_of(too_many_columns, q, torch.exp))


@pytest.mark.parametrize("skew", [too_many_columns, detached_on_the_way])
def test_other_shifts_are_exact(skew):
    def attend(q, k, v):
        scores = skew(torch.cat([q @ k.mT, (q @ k.mT).sin()], -1))[..., : q.shape[2]]
        return scores.softmax(-1) @ v

    check_probe(attend, streamed=False)
