"""Shifts, causal convolutions and scans: a chunk's rows are those of the whole sequence."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import seqsplit
from compare import Pair
from seqsplit.ops import scan, stencil
from seqsplit.ops.caches import Carry, keys_start
from zoo import batches, probe

WIDTH = 20


@st.composite
def bounds(draw):
    """[0, ..., T]: uneven chunks."""
    length = draw(st.integers(1, 17))
    inner = draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=4))
    return sorted({0, length} | {b for b in inner if b < length})


def random(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def before(kind, shape, dim, rows):
    """What stands before the beginning: a number, or as many rows as are seen."""
    shape = [rows if own == dim else size for own, size in enumerate(shape)]
    return random(*shape) + 3 if kind == "rows" else kind


@given(
    bounds=bounds(),
    dim=st.integers(0, 2),
    by=st.integers(1, 20),
    kind=st.sampled_from([0.0, 2.0, "rows"]),
)
def test_rows_of_a_shift(bounds, dim, by, kind):
    shape = [3, 4, 5]
    shape[dim] = bounds[-1]
    x, head = random(*shape), before(kind, shape, dim, by)
    rows = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        first = keys_start(start, by + 1)
        window = x.narrow(dim, first, end - first)
        rows.append(stencil.shift_rows(window, dim, by, head, start, first, end))
    whole = stencil.shift(x, dim, by, head)
    assert torch.equal(torch.cat(rows, dim), whole)
    if kind == "rows":
        assert torch.equal(whole, torch.cat([head, x], dim).narrow(dim, 0, bounds[-1]))


@given(
    bounds=bounds(),
    kernel=st.integers(1, 6),
    dilation=st.integers(1, 3),
    depthwise=st.booleans(),
    kind=st.sampled_from([0.0, "rows"]),
)
def test_rows_of_a_causal_convolution(bounds, kernel, dilation, depthwise, kind):
    groups, reach = 6 if depthwise else 2, (kernel - 1) * dilation
    x, weight, bias = random(2, 6, bounds[-1]), random(6, 6 // groups, kernel), random(6)
    head = before(kind, x.shape, 2, reach)
    rows = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        first = keys_start(start, reach + 1)
        window = x[..., first:end]
        rows.append(
            stencil.causal_conv1d_rows(window, weight, bias, dilation, groups, head, start, first)
        )
    whole = stencil.causal_conv1d(x, weight, bias, dilation, groups, head)
    torch.testing.assert_close(torch.cat(rows, 2), whole, rtol=1e-12, atol=1e-12)


SCANS = {
    "cumsum": (scan.cumsum_rows, torch.cumsum),
    "cumprod": (scan.cumprod_rows, torch.cumprod),
    "logcumsumexp": (scan.logcumsumexp_rows, torch.logcumsumexp),
}


@given(bounds=bounds(), dim=st.integers(0, 2), name=st.sampled_from(sorted(SCANS)))
def test_rows_and_gradients_of_a_scan(bounds, dim, name):
    rows_of, whole_of = SCANS[name]
    shape = [3, 4, 5]
    shape[dim] = bounds[-1]
    x, cotangent = random(*shape).requires_grad_(), random(*shape).cos()
    expected = whole_of(x, dim)
    (wanted,) = torch.autograd.grad(expected, x, cotangent)
    carry, chunks = Carry(torch.float32), list(zip(bounds, bounds[1:], strict=False))
    for start, end in chunks[:-1]:  # forward, to fill in what each chunk receives
        rows_of(x.detach().narrow(dim, start, end - start), carry, dim, start)
    rows, grads = [], []
    for start, end in reversed(chunks):
        part = x.detach().narrow(dim, start, end - start).requires_grad_()
        rows.append(rows_of(part, carry, dim, start))
        grads += torch.autograd.grad(rows[-1], part, cotangent.narrow(dim, start, end - start))
    torch.testing.assert_close(torch.cat(rows[::-1], dim), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat(grads[::-1], dim), wanted, rtol=1e-9, atol=1e-10)


class Layer(nn.Module):
    """A convolution before the keys and values, a shift before the MLP, a running mean."""

    def __init__(self):
        super().__init__()
        self.inner = probe.build(layers=1).layers[0]
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.blend = nn.Parameter(torch.linspace(0.2, 0.8, WIDTH))

    def forward(self, x):
        mixed = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        x = self.inner(x + F.silu(mixed))
        x = torch.lerp(x, F.pad(x, (0, 0, 1, -1)), self.blend)
        places = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + x.cumsum(1) / places


class Hybrid(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.outer = probe.build(layers=1)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, ids):
        x = self.outer.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.outer.head(self.outer.norm(x))


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 20])
def test_layers_of_every_kind_of_mixing(chunk_size):
    """Chunks shorter and longer than what a row sees."""
    pair = Pair(Hybrid, step=probe.step, chunk_size=chunk_size)
    for length in (13, 3, 2):
        pair.check(*batches.with_labels(3, length), explain=length == 13)


def test_light_mixers_share_the_segment_of_their_layer():
    model = seqsplit.compile(Hybrid(layers=6), chunk_size=4)
    report = seqsplit.explain(model, batches.tokens(3, 13))
    assert report.fully_streamed, report
    assert report.distinct_bodies <= 6, report


@pytest.mark.parametrize("where", ["keys", "values"])
def test_convolved_keys_and_values(where):
    """The stencil's own rows are read as a prefix by the attention that follows."""

    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(24, 24, 3)

        def forward(self, q, k, v):
            B, heads, T, E = k.shape
            x = k if where == "keys" else v
            flat = x.transpose(2, 3).reshape(B, heads * E, T)
            x = self.conv(F.pad(flat, (2, 0))).view(B, heads, E, T).transpose(2, 3)
            k, v = (x, v) if where == "keys" else (k, x)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    pair = Pair(
        lambda: probe.build(lambda index: Convolved(), per_layer=True),
        step=probe.step,
        chunk_size=3,
    )
    pair.check(*batches.with_labels(3, 13), explain=True)


def test_bfloat16_scans_are_added_up_wide():
    """A running sum of ones in bfloat16 stops at 256, chunk by chunk it must not stop earlier."""

    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build(layers=1)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, ids):
            ones = (self.inner.hidden(ids) * 0 + 1) * self.scale
            return ones.cumsum(1).float().mean()

    model = seqsplit.compile(Ones().to(torch.bfloat16), chunk_size=16)
    value = model(batches.tokens(1, 200))
    assert value.item() == pytest.approx(100.5, rel=2e-2)


class Preceded(nn.Module):
    """A projection of zeros stands before its input; two convolutions see what was padded for both,
    so that the second one finds the first one's bias there."""

    def __init__(self, dilation):
        super().__init__()
        self.inner = probe.build(layers=1)
        self.delayed = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.second = nn.Conv1d(WIDTH, WIDTH, 4, groups=4, dilation=dilation)
        self.rows = 2 + 3 * dilation

    def mix(self, x):
        head = self.delayed(x.new_zeros(x.shape[0], 1, WIDTH))
        x = x + torch.cat([head, self.delayed(x)[:, :-1]], 1)
        return x + self.second(self.first(F.pad(x.mT, (self.rows, 0)))).mT

    def forward(self, ids):
        return self.inner.head(self.mix(self.inner.hidden(ids)))


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 20])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_state_before_the_sequence(chunk_size, dilation):
    """Its gradient is the first chunk's alone; chunks are shorter and longer than what is seen."""
    pair = Pair(lambda: Preceded(dilation), step=probe.step, chunk_size=chunk_size)
    for length in (13, 3, 2):
        pair.check(*batches.with_labels(3, length), explain=length == 13)


def test_what_stands_before_may_not_come_from_the_sequence():
    class OwnFirst(Preceded):
        def mix(self, x):
            return x + torch.cat([x[:, :1] * 2, self.delayed(x)[:, :-1]], 1)

    pair = Pair(lambda: OwnFirst(1), step=probe.step, chunk_size=4, streamed=False)
    pair.check(*batches.with_labels(3, 13))
