"""Models whose own Python fixes the length of the sequence: it is found again in the graph."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqsplit
from attending import positions, scores_of
from compare import Pair
from zoo import batches, probe

CHUNK = 4
NUMBERS = {number: number for number in range(200)}


def solved(size):
    """A size as libraries have it that solve for shapes: a plain number."""
    return NUMBERS[size]


def check(build, lengths=(13,), batch=3, step=probe.step):
    """Strict, against eager; the report names the fixed length. Returns the last report."""
    pair = Pair(build, step=step, chunk_size=CHUNK)
    report = pair.check_lengths(lengths, batch)
    assert report.fixed_length
    return report


def causal_by_hand(q, k, v):
    """Every size a number."""
    batch, heads, length, width = (solved(size) for size in q.shape)
    scores = (q @ k.transpose(-1, -2)).reshape(batch, heads, length, length)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights.reshape(batch * heads, length, length) @ v.flatten(0, 1)).reshape(q.shape)


def test_sizes_as_numbers():
    report = check(lambda: probe.build(causal_by_hand), lengths=(13, 8))
    assert sum(segment.num_caches for segment in report.segments) == 4
    assert "captured anew" in str(report)


@pytest.mark.parametrize(
    "batch, length, width",
    [
        (3, 20, 20),  # as long as the hidden states are wide
        (3, 6, 20),  # ... as a head
        (3, batches.VOCAB, 20),
        (13, 13, 20),  # as many sequences as positions
    ],
)
def test_other_sizes_as_long(batch, length, width):
    check(lambda: probe.build(causal_by_hand, width=width), lengths=(length,), batch=batch)


def windowed(q, k, v):
    """A window of 13 positions, in a model that looks at the length."""
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    assert solved(q.shape[2]) > 1
    hidden = (columns > rows) | (columns <= rows - 13)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("length", [13, 17])
def test_window_as_long(length):
    check(lambda: probe.build(windowed), lengths=(length,))


class Rows(nn.Module):
    """Its output is put together from slices that a loop over the length takes."""

    def __init__(self):
        super().__init__()
        self.inner = probe.build()
        self.scale = nn.Parameter(torch.rand(20) + 0.5)

    def forward(self, ids):
        x = self.inner.hidden(ids)
        length = solved(ids.shape[1])
        parts = [x[:, start : start + 5] * self.scale for start in range(0, length, 5)]
        return self.inner.head(torch.cat(parts, dim=1)[:, :length])


def test_loop_over_slices():
    pair = Pair(Rows, step=probe.step, chunk_size=CHUNK, streamed=False)
    batch = batches.with_labels(3, 13)
    pair.check(*batch)
    report = seqsplit.explain(pair.run_mine, *batch)
    assert sum(segment.num_caches for segment in report.segments) >= 4, report  # the layers stream


# ---- Tables that are exactly as long ------------------------------------------------------------

BLOCK = 13


class BlockAttention(nn.Module):
    """Attention as in small GPTs: a mask of the longest length in a buffer."""

    def __init__(self, index):
        super().__init__()
        mask = torch.tril(torch.ones(BLOCK, BLOCK))
        self.register_buffer("bias", mask.view(1, 1, BLOCK, BLOCK))

    def forward(self, q, k, v):
        length = q.shape[2]
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        hidden = self.bias[:, :, :length, :length] == 0
        return F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v


class SmallGPT(nn.Module):
    """Learned positions and stored masks for at most `BLOCK` positions."""

    def __init__(self):
        super().__init__()
        self.inner = probe.build(BlockAttention, per_layer=True)
        self.positions = nn.Embedding(BLOCK, 20)

    def forward(self, ids):
        inner = self.inner
        x = inner.embed(ids) + self.positions(torch.arange(0, ids.size(1)))
        for layer in inner.layers:
            x = layer(x)
        return inner.head(inner.norm(x))


@pytest.mark.parametrize("length", [BLOCK, BLOCK - 1])
def test_block_size(length):
    pair = Pair(SmallGPT, step=probe.step, chunk_size=CHUNK)
    batch = batches.with_labels(3, length)
    pair.check(*batch)
    report = seqsplit.explain(pair.run_mine, *batch)
    # The mask is known to be causal, so that keys are read from caches.
    assert sum(segment.num_caches for segment in report.segments) == 4, report


class TablesWithoutSlices(SmallGPT):
    """Positions and masks added as they are: only one length fits."""

    def __init__(self):
        super().__init__()
        self.inner = probe.build(self.attend)
        self.table = nn.Parameter(torch.rand(1, BLOCK, 20))
        self.register_buffer("hidden", torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1))

    def attend(self, q, k, v):
        return scores_of(q, k).masked_fill(self.hidden, float("-inf")).softmax(-1) @ v

    def forward(self, ids):
        x = self.inner.embed(ids) + self.table
        for layer in self.inner.layers:
            x = layer(x)
        return self.inner.head(self.inner.norm(x))


def test_tables_without_slices():
    report = check(TablesWithoutSlices)
    assert sum(segment.num_caches for segment in report.segments) == 4, report


class StoredDistances(nn.Module):
    """A bias kept for the longest length, of which the last rows and columns are taken."""

    def __init__(self, index):
        super().__init__()
        places = torch.arange(BLOCK, dtype=torch.float64)
        self.register_buffer("bias", -(places[:, None] - places).abs())
        self.slopes = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, q, k, v):
        length = solved(q.shape[2])
        scores = scores_of(q, k) + self.slopes * self.bias[-length:, -length:]
        rows, columns = positions(scores)
        return scores.masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


def test_last_entries():
    check(lambda: probe.build(StoredDistances, per_layer=True), lengths=(BLOCK,))


def written_row_by_row(q, k, v):
    """A window whose mask a loop over the positions writes."""
    length = solved(q.shape[2])
    mask = torch.full((length, length), float("-inf"), dtype=q.dtype)
    for row in range(length):
        mask[row, max(0, row - 2) : row + 1] = 0.0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


def test_mask_written_row_by_row():
    report = check(lambda: probe.build(written_row_by_row))
    assert sum(segment.num_caches for segment in report.segments) == 4, report
