"""Caches of windows: exact, and no longer than a window and two chunks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqsplit
from compare import compare
from seqsplit import Schedule
from seqsplit.memory import track_memory
from seqsplit.ops.sliding import SlidingCache
from seqsplit.runtime import segment_run

VOCAB, WIDTH, HEADS, BATCH = 23, 16, 4, 2


def window_mask(length, window):
    places = torch.arange(length)
    distance = places[:, None] - places[None, :]
    return (distance >= 0) & (distance < window)


class Attention(nn.Module):
    """Heads in groups, each position seeing the last few."""

    def __init__(self, window):
        super().__init__()
        self.window = window
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, HEADS // 2, -1)).permute(2, 0, 3, 1, 4)
        mask = window_mask(x.shape[1], self.window)
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Shift(nn.Module):
    """Each position and the one some places before it."""

    def __init__(self, by):
        super().__init__()
        self.by, self.mix = by, nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.mix(torch.cat([x, F.pad(x, (0, 0, self.by, 0))[:, : -self.by]], -1))


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


LAYERS = {
    "attention": lambda window: [Attention(window), Attention(window)],
    "shift": lambda window: [Shift(window), Shift(1)],
    "two windows": lambda window: [Attention(window), Attention(2 * window), Shift(1)],
}


@pytest.fixture
def caches(monkeypatch):
    """Every sliding cache that is made, with the most rows that it ever held."""
    made = []

    class Watched(SlidingCache):
        def __init__(self, *args):
            super().__init__(*args)
            self.most = 0
            made.append(self)

        def write(self, x, start, end):
            super().write(x, start, end)
            held = sum(rows.shape[self._dim] for rows in self.state.values())
            self.most = max(self.most, held)

    monkeypatch.setattr(segment_run, "SlidingCache", Watched)
    return made


def make_ids(length):
    return torch.randint(0, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(1))


def build(layers, window):
    torch.manual_seed(0)
    return Model(*LAYERS[layers](window)).double()


def check(layers, window, length, **options):
    """Fail unless a compiled model of these layers is streamed and has eager's gradients."""
    compare(lambda: build(layers, window), make_ids(length), **options)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(
    ("window", "chunk", "length"), [(1, 4, 19), (3, 4, 37), (9, 4, 41), (7, 16, 53)]
)
def test_windows_are_exact(layers, window, chunk, length, caches):
    check(layers, window, length, chunk_size=chunk)
    assert caches
    widest = 2 * window if layers == "two windows" else window + 1
    assert all(cache.most <= widest + 2 * chunk for cache in caches)


@pytest.mark.parametrize("schedule", [Schedule(forwards=3), Schedule(keep_attention=True)])
def test_under_other_schedules(schedule, caches):
    check("attention", 5, 41, chunk_size=4, schedule=schedule)
    assert caches


def test_a_second_backward(caches):
    model = seqsplit.compile(build("attention", 5), chunk_size=4, strict=True)
    loss = model(make_ids(41))
    first, second = (
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_where_nothing_would_be_saved_a_cache_is_whole(caches):
    """A sequence of a few chunks; keys that are kept; layers that see everything."""
    check("attention", 9, 40, chunk_size=16)
    check("attention", 5, 41, chunk_size=4, schedule=Schedule(keep_keys=True))
    assert not caches


def test_keys_that_come_of_other_keys_are_not_forgotten(caches):
    """Two layers in a segment: the second one's keys cannot be made from a chunk alone."""
    check("attention", 5, 41, chunk_size=4, segment_layers=2)
    assert not caches


def test_memory_does_not_grow_with_keys():
    """From the second length on, only the layers' inputs and gradients grow."""
    peaks = []
    model = seqsplit.compile(build("attention", 8), chunk_size=32, head_chunk_size=32, strict=True)
    for length in (512, 1024, 2048):
        model(make_ids(length)).backward()
        with track_memory() as memory:
            model(make_ids(length)).backward()
        peaks.append(memory.peak_bytes)
    rows = BATCH * WIDTH * 8  # bytes of one value of the residual stream at one position
    grown = (peaks[2] - peaks[1]) / 1024
    # The inputs of two layers and the head, the gradients of two of them; ids, positions, labels.
    assert grown <= 5.6 * rows
    assert grown == pytest.approx((peaks[1] - peaks[0]) / 512, rel=0.05)
