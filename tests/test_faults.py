"""A fault planted anywhere in the machinery is caught by validation, and gradients stay right."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqsplit
from seqsplit.errors import NotStreamedError
from seqsplit.ir.placement import Chunk, Kind, Span
from seqsplit.ops import caches
from seqsplit.passes.rules import registry
from seqsplit.passes.split import attend, demand
from zoo.blocks import OfBlocks

aten = torch.ops.aten
VOCAB, WIDTH, HEADS, T, BATCH, CHUNK = 23, 12, 2, 19, 2, 5


class Block(nn.Module):
    """Attention with an optional window by mask, and a running sum as an odd extra."""

    def __init__(self, window=None, scan=False):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.window, self.scan = window, scan

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            y.view(batch, length, HEADS, -1).transpose(1, 2)
            for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        places = torch.arange(length)
        mask = places[None, :] <= places[:, None]
        if self.window:
            mask = mask & (places[None, :] > places[:, None] - self.window)
        y = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + 0.1 * torch.cummax(x, 1).values if self.scan else x


def build(**options):
    torch.manual_seed(0)
    return OfBlocks((Block(**options) for _ in range(2)), VOCAB, WIDTH).double()


def gradients(model, ids):
    loss = model(ids)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def assert_caught(**options):
    """Compiled under a planted fault: right results, a reason, an error when strict."""
    ids = torch.randint(0, VOCAB, (BATCH, T), generator=torch.Generator().manual_seed(1))
    want = gradients(build(**options), ids)
    model = seqsplit.compile(build(**options), chunk_size=CHUNK)
    for have, right in zip(gradients(model, ids), want, strict=True):
        assert (have - right).norm() <= 1e-9 * right.norm().clamp_min(1e-6)
    report = seqsplit.explain(model, ids)
    assert not report.fully_streamed
    assert any("does not equal the original" in reason for _, reason in report.whole), report
    with pytest.raises(NotStreamedError, match="does not equal the original"):
        seqsplit.compile(build(**options), chunk_size=CHUNK, strict=True)(ids)


def test_without_a_fault_everything_streams():
    ids = torch.randint(0, VOCAB, (BATCH, T))
    for options in ({}, {"window": 4}):
        report = seqsplit.explain(seqsplit.compile(build(**options), chunk_size=CHUNK), ids)
        assert report.fully_streamed, report


def test_a_wrong_row_is_caught(monkeypatch):
    """A running maximum claimed to treat positions one by one."""

    def wrong(self):
        for dim in range(self.ndim):
            yield Chunk(dim), Chunk(dim)

    entry = registry._Rule(wrong, None, None)
    monkeypatch.setitem(registry._RULES, aten.cummax.default, entry)
    assert_caught(scan=True)


def test_a_wrong_gradient_of_the_cached_read_is_caught(monkeypatch):
    add = caches.Cache.add_grad

    def wrong(self, grad, start):
        add(self, grad * (1 + 1e-6), start)

    monkeypatch.setattr(caches.Cache, "add_grad", wrong)
    assert_caught()


def test_rows_written_to_a_wrong_place_are_caught(monkeypatch):
    write = caches.Cache.write

    def wrong(self, x, start, end):
        write(self, x.roll(1, self.dim), start, end)

    monkeypatch.setattr(caches.Cache, "write", wrong)
    assert_caught()


def test_a_window_that_is_one_too_short_is_caught(monkeypatch):
    right = attend._of_band

    def wrong(band, dim, *, minimum_fill):
        read = right(band, dim, minimum_fill=minimum_fill)
        if read.span is None or read.span.window is None:
            return read
        return attend.Read(Span(Kind.KEYS, read.span.window - 1), read.causal)

    monkeypatch.setattr(attend, "_of_band", wrong)
    assert_caught(window=4)


def test_a_mask_sliced_at_the_wrong_rows_is_caught(monkeypatch):
    right = demand._Pushing._mask_placement

    def wrong(self, mask, read):
        placement = right(self, mask, read)
        rows = self._facts.shape(mask).__len__() - 2
        return placement | type(placement)(((rows, Span(Kind.KEYS)),))

    monkeypatch.setattr(attend, "_of_band", lambda band, dim, *, minimum_fill: attend.ALL)
    monkeypatch.setattr(demand._Pushing, "_mask_placement", wrong)
    assert_caught(window=4)
