"""Gated sums over time: recognised by what they compute, and carried from chunk to chunk."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import seqsplit
import seqsplit.passes.rewrite.linear_scans
from compare import Pair
from seqsplit.ops.caches import Carry
from seqsplit.ops.linear_scan import linear_scan, linear_scan_rows
from zoo import batches, probe

CHUNK = 4
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def stepwise(gate, x, dim=1):
    """The definition."""
    states = [x.select(dim, 0).to(torch.promote_types(gate.dtype, x.dtype))]
    for t in range(1, x.shape[dim]):
        states.append(gate.select(dim, t) * states[-1] + x.select(dim, t))
    return torch.stack(states, dim)


# ---- the op --------------------------------------------------------------------------------------


def drawn(shape, dtype, seed, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator, dtype=dtype)
    return value.requires_grad_(requires_grad)


@given(
    length=st.integers(1, 19),
    dim=st.integers(0, 2),
    broadcast=st.integers(0, 2),
    complex_gate=st.booleans(),
    inner=st.sets(st.integers(1, 18), max_size=4),
    learned=st.sampled_from(["both", "gate", "x"]),
)
def test_rows_and_gradients(length, dim, broadcast, complex_gate, inner, learned):
    """Whole and in uneven chunks it is what the definition says; so are its gradients."""
    shape = [3, 4, 5]
    shape[dim] = length
    gate_shape = [1 if d == broadcast != dim else size for d, size in enumerate(shape)]
    gate = drawn(gate_shape, torch.complex128 if complex_gate else torch.float64, 0)
    x = drawn(shape, torch.float64, 1)
    gate.requires_grad_(learned != "x"), x.requires_grad_(learned != "gate")
    wanted = [v for v in (gate, x) if v.requires_grad]
    expected = stepwise(gate, x, dim)
    cotangent = drawn(expected.shape, expected.dtype, 2, requires_grad=False)
    options = {"allow_unused": True, "materialize_grads": True}
    if not expected.requires_grad:
        return  # the gate of the first row alone, which nothing depends on
    grads = torch.autograd.grad(expected, wanted, cotangent, **options)
    whole = linear_scan(gate, x, dim)
    torch.testing.assert_close(whole, expected, **CLOSE)
    for have, want in zip(torch.autograd.grad(whole, wanted, cotangent, **options), grads):
        torch.testing.assert_close(have, want, **CLOSE)

    bounds = sorted({0, length} | {b for b in inner if b < length})
    carry, chunks = Carry(torch.float32), list(zip(bounds, bounds[1:]))
    rows, pieces = [], []
    with torch.no_grad():
        for start, end in chunks[:-1]:  # forward, to fill in what each chunk receives
            parts = (v.narrow(dim, start, end - start) for v in (gate, x))
            linear_scan_rows(*parts, carry, dim, start)
    for start, end in reversed(chunks):
        parts = [v.detach().narrow(dim, start, end - start) for v in (gate, x)]
        for part, value in zip(parts, (gate, x)):
            part.requires_grad_(value.requires_grad)
        rows.append(linear_scan_rows(*parts, carry, dim, start))
        own = cotangent.narrow(dim, start, end - start)
        asked = [part for part in parts if part.requires_grad]
        pieces.append(torch.autograd.grad(rows[-1], asked, own, **options))
    torch.testing.assert_close(torch.cat(rows[::-1], dim), expected, **CLOSE)
    for have, want in zip(zip(*pieces[::-1]), grads):
        torch.testing.assert_close(torch.cat(have, dim), want, **CLOSE)


def test_float32_rows_add_up_in_no_less():
    """Half precision: the state is handed on in the accumulator's dtype, the rows are not."""
    gate, x = (drawn([2, 9, 3], torch.bfloat16, seed, requires_grad=False) for seed in (0, 1))
    carry = Carry(torch.float32)
    rows = [linear_scan_rows(gate[:, i : i + 3], x[:, i : i + 3], carry, 1, i) for i in (0, 3, 6)]
    assert rows[0].dtype == torch.bfloat16
    assert carry.state[3].dtype == torch.float32


# ---- the ways it is written ----------------------------------------------------------------------


def combine(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def by_halves(gate, x):
    """Pairs first, then the states of the pairs, then those between."""

    def scan(items):
        length = items[0].shape[1]
        if length < 2:
            return items
        pairs = combine([i[:, : length - 1 : 2] for i in items], [i[:, 1::2] for i in items])
        odd = scan(pairs)
        before = [i[:, : (length - 1) // 2] for i in odd]
        even = combine(before, [i[:, 2::2] for i in items])
        even = [torch.cat([i[:, :1], e], 1) for i, e in zip(items, even)]
        missing = even[0].shape[1] - odd[0].shape[1]
        odd = [F.pad(o, (0, 0) * (o.ndim - 2) + (0, missing)) for o in odd]
        return [torch.stack(both, 2).flatten(1, 2)[:, :length] for both in zip(even, odd)]

    return scan([gate, x])[1]


def from_zero(gate, x):
    """A loop over positions from a state of zeros."""
    state, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = gate[:, t] * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1)


def unbound(gate, x):
    states = []
    for g, part in zip(gate.unbind(1), x.unbind(1)):
        states.append(part if not states else torch.addcmul(part, g, states[-1]))
    return torch.stack(states, 1)


def as_higher_order_op(gate, x):
    from torch._higher_order_ops.associative_scan import associative_scan

    if not torch.compiler.is_compiling():
        return stepwise(gate, x)
    return associative_scan(combine, (gate, x), dim=1, combine_mode="generic")[1]


class _OwnBackward(torch.autograd.Function):
    """With a backward written by hand."""

    @staticmethod
    def forward(ctx, gate, x):
        states = stepwise(gate, x)
        ctx.save_for_backward(gate, states)
        return states

    @staticmethod
    def backward(ctx, grad):
        gate, states = ctx.saved_tensors
        later = torch.cat([gate[:, :1], gate[:, 1:].flip(1)], 1)
        worth = stepwise(later, grad.flip(1)).flip(1)
        before = F.pad(states[:, :-1], (0, 0, 1, 0))
        return worth * before, worth


class _AnotherGradient(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, gate, x):
        states = stepwise(gate, x)
        ctx.save_for_backward(gate)
        return states

    @staticmethod
    def backward(ctx, grad):
        (gate,) = ctx.saved_tensors
        return torch.zeros_like(gate), grad


def with_own_backward(gate, x):
    return _OwnBackward.apply(gate, x)


class Gated(nn.Module):
    """A small decoder with a gated sum over time in each layer.

    Args:
        scan: ``scan(gate, x)`` on [B, T, width].
        mix: makes the gate and the summed values, of the hidden states.
    """

    def __init__(self, scan, mix=None):
        super().__init__()
        self.inner = probe.build()
        self.gate = nn.Linear(20, 20)
        self.scan, self.mix = scan, mix

    def forward(self, ids):
        x = self.inner.embed(ids)
        for layer in self.inner.layers:
            x = layer(x)
            gate = torch.sigmoid(self.gate(x))
            pair = (gate, x) if self.mix is None else self.mix(gate, x)
            states = self.scan(*pair)
            x = x + (states.real if states.is_complex() else states).reshape(x.shape)
        return self.inner.head(x)


def step(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def check(scan, mix=None, streamed=True, lengths=(13, 12)):
    """Against eager, and strictly in chunks or, if not ``streamed``, whole. Returns the report."""
    pair = Pair(lambda: Gated(scan, mix), step=step, streamed=streamed, chunk_size=CHUNK)
    return pair.check_lengths(lengths)


WAYS = [by_halves, stepwise, from_zero, unbound, as_higher_order_op, with_own_backward]


@pytest.mark.parametrize("scan", WAYS, ids=lambda way: way.__name__)
def test_ways_to_write_it(scan):
    report = check(scan)
    assert sum(s.num_caches for s in report.segments) > 0


@pytest.mark.parametrize("scan", [by_halves, from_zero], ids=lambda way: way.__name__)
def test_complex_states_of_a_matrix(scan):
    """A complex gate per position and head, states that are matrices."""

    def mix(gate, x):
        phase = torch.polar(gate[..., :1], x[..., :1])[..., None]
        return phase, (x[..., :4, None] * x[..., None, 4:9]) + 0.0j

    check(scan, mix)


def time_last(gate, x):
    """Time is another dim of what comes out."""
    states = [x[..., 0]]
    for t in range(1, x.shape[-1]):
        states.append(states[-1] * gate[..., t] + x[..., t])
    return torch.stack(states, 1)


def test_time_in_another_dim():
    check(time_last, lambda gate, x: (gate.transpose(1, 2), x.transpose(1, 2)))


@pytest.mark.parametrize("scan", [by_halves, as_higher_order_op], ids=lambda way: way.__name__)
def test_fewer_channels_are_tried_where_there_are_many(scan, monkeypatch):
    """Enough where all channels are treated alike."""
    monkeypatch.setattr(seqsplit.passes.rewrite.linear_scans, "_MOST_ELEMENTS", 2 * 2 * 13 * 2)
    check(scan, lengths=(13,))


def turned_by_halves(gate, x):
    """With so few channels that the last ones are missing it would look like the recurrence."""

    def turned(value):
        return torch.cat([value[..., 5:], value[..., :5]], -1)

    return turned(by_halves(gate, x))


def halves_of_channels_apart(gate, x):
    first, length = gate[:, ::2], x.shape[1]
    rows = torch.stack([first, F.pad(gate[:, 1::2], (0, 0, 0, length % 2))], 2)
    mixed = torch.cat([rows[..., 5:], rows[..., :5]], -1).flatten(1, 2)[:, :length]
    return by_halves(mixed, x)


@pytest.mark.parametrize("scan", [turned_by_halves, halves_of_channels_apart])
def test_channels_that_are_not_alike(scan, monkeypatch):
    """Exact, with as few elements as may be."""
    monkeypatch.setattr(seqsplit.passes.rewrite.linear_scans, "_MOST_ELEMENTS", 2 * 2 * 13 * 2)
    pair = Pair(lambda: Gated(scan), step=step, streamed=False, chunk_size=CHUNK)
    pair.check(*batches.with_labels(2, 13))


# ---- what is not one -----------------------------------------------------------------------------


def gated_by_the_row_before(gate, x):
    states = [x[:, 0]]
    for t in range(1, x.shape[1]):
        states.append(gate[:, t - 1] * states[-1] + x[:, t])
    return torch.stack(states, 1)


def clipped(gate, x):
    states = [x[:, 0]]
    for t in range(1, x.shape[1]):
        states.append((gate[:, t] * states[-1] + x[:, t]).clamp(-3, 3))
    return torch.stack(states, 1)


def sees_a_later_one(gate, x):
    states = stepwise(gate, x)
    return torch.stack([states[:, min(t + 1, x.shape[1] - 1)] for t in range(x.shape[1])], 1)


def with_another_gradient(gate, x):
    return _AnotherGradient.apply(gate, x)


OTHERS = [clipped, gated_by_the_row_before, sees_a_later_one, with_another_gradient]


@pytest.mark.parametrize("scan", OTHERS, ids=lambda way: way.__name__)
def test_others_are_left_alone(scan):
    check(scan, streamed=False, lengths=(13,))
