"""Pieces that work in blocks of positions: their chunks run the same code on a window."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compare import Pair
from seqsplit.passes.rewrite.stencils import WindowedPiece
from zoo import probe

BLOCK = 4
CHUNK = 3


def in_blocks(x, length):
    """[B, H, T, E] -> [B, H, blocks, BLOCK, E], with rows of zeros after the last."""
    return F.pad(x, (0, 0, 0, -length % BLOCK)).unflatten(2, (-1, BLOCK))


def with_the_blocks_before(x, before, value=0.0):
    """[..., blocks, BLOCK, E] -> [..., blocks, (before + 1) * BLOCK, E]."""
    blocks = x.shape[2]
    padded = F.pad(x, (0, 0, 0, 0, before, 0), value=value)
    return torch.cat([padded[:, :, i : i + blocks] for i in range(before + 1)], 3)


def places(x, length):
    """Where each row of a block is in the sequence."""
    count = length + -length % BLOCK
    return torch.arange(count, dtype=x.dtype, device=x.device).view(1, 1, -1, BLOCK, 1)


class InBlocks(nn.Module):
    """Attention of a block to itself and to some blocks before it, with a learned bias.

    Args:
        before: how many blocks.
        sees_all: whether a row sees the later ones of its block, too.
        slope: how much of a row's own place in the sequence is added to its scores.
    """

    def __init__(self, before=1, sees_all=False, slope=0.0):
        super().__init__()
        self.before, self.sees_all, self.slope = before, sees_all, slope
        self.bias = nn.Parameter(torch.randn(BLOCK, (before + 1) * BLOCK))

    def forward(self, q, k, v):
        length = q.shape[2]
        q, k, v = (in_blocks(x, length) for x in (q, k, v))
        rows = places(q, length)
        columns = with_the_blocks_before(rows, self.before, -1.0).transpose(-1, -2)
        k, v = (with_the_blocks_before(x, self.before) for x in (k, v))
        scores = q @ k.transpose(-1, -2) + self.bias + (self.slope * rows * columns).sin()
        hidden = columns < 0
        if not self.sees_all:
            hidden = hidden | (columns > rows)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ v).flatten(2, 3)[:, :, :length]


def check(attend, lengths=(21, 13), streamed=True):
    """Against eager; returns the report."""
    pair = Pair(lambda: probe.build(attend()), step=probe.step, streamed=streamed, chunk_size=CHUNK)
    return pair.check_lengths(lengths)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_blocks_that_see_those_before(before):
    report = check(lambda: InBlocks(before))
    assert sum(segment.num_caches for segment in report.segments) > 0


def test_a_multiple_of_the_block():
    """Nothing is padded; chunks end inside of blocks all the same."""
    check(InBlocks, lengths=(20,))


def without_padding(x, length):
    return x.unflatten(2, (-1, BLOCK))


def test_code_for_multiples_only(monkeypatch):
    monkeypatch.setitem(InBlocks.forward.__globals__, "in_blocks", without_padding)
    check(InBlocks, lengths=(20, 24))


def by_places(q, k, v):
    """Whole blocks only; who sees whom is told by places in the sequence, made of its length."""
    length = q.shape[2]
    assert length % BLOCK == 0

    def before_too(x, dim, value):
        first = torch.full_like(x.narrow(dim, 0, 1), value)
        shifted = torch.cat([first, x.narrow(dim, 0, x.shape[dim] - 1)], dim)
        return torch.cat([shifted, x], dim + 1)

    q, k, v = (x.unflatten(2, (length // BLOCK, BLOCK)) for x in (q, k, v))
    rows = torch.arange(length).view(length // BLOCK, BLOCK)
    columns = before_too(rows, 0, -1)
    k, v = (before_too(x, 2, 0.0) for x in (k, v))
    seen = (columns[:, None, :] <= rows[:, :, None]) & (columns[:, None, :] >= 0)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).flatten(2, 3)


def test_places_in_the_sequence():
    check(lambda: by_places, lengths=(20, 12))


class Deep(nn.Module):
    """More ops before the blocks than Python calls functions in each other."""

    def __init__(self):
        super().__init__()
        self.inner = probe.build(by_places, layers=1)

    def forward(self, ids):
        x = self.inner.embed(ids)
        for _ in range(1100):
            x = x.neg()
        return self.inner.head(self.inner.norm(self.inner.layers[0](x)))


def test_a_deep_model():
    pair = Pair(Deep, step=probe.step, chunk_size=CHUNK)
    pair.check_lengths((20,))


@pytest.mark.parametrize("options", [{"sees_all": True}, {"slope": 0.3}], ids=str)
def test_what_is_not_local_or_not_the_same_everywhere(options):
    check(lambda: InBlocks(**options), streamed=False)


def block_means(x, width):
    """Of the block before; a toy that is easily told from its chunks."""
    length = x.shape[1]
    padded = F.pad(x, (0, -length % width)).unflatten(1, (-1, width))
    before = F.pad(padded.sum(-1), (1, 0))[:, :-1]
    return (padded.cumsum(-1) + before[..., None]).flatten(1)[:, :length]


@given(
    length=st.integers(1, 23),
    width=st.integers(1, 6),
    inner=st.sets(st.integers(1, 22), max_size=4),
)
def test_rows_of_a_windowed_piece(length, width, inner):
    """For any chunk, from a window that begins where the chunk's read does."""
    x = torch.randn(2, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    piece = WindowedPiece(width, width, (1,), 1, 0, None)
    bounds = sorted({0, length} | {b for b in inner if b < length})
    rows = []
    for start, end in zip(bounds, bounds[1:]):
        first = max(0, start - piece.window + 1)
        window = x[:, first:end]
        rows.append(piece.rows(lambda x: block_means(x, width), start, first, end, [window]))
    torch.testing.assert_close(torch.cat(rows, 1), block_means(x, width), rtol=0, atol=1e-12)
