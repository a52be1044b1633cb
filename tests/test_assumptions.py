"""What a plan assumes of its inputs holds at every call, or the plan is not used."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqsplit
from compare import Pair
from seqsplit.ir.assumptions import BandedTable, band_of
from zoo import HANDWRITTEN, batches, nano


@given(
    size=st.integers(2, 9),
    ends=st.tuples(st.integers(-9, 9), st.integers(-9, 9)),
    outside=st.sampled_from([0.0, -math.inf, -1e38]),
    kind=st.sampled_from([torch.float64, torch.bool, torch.int64]),
    spoil=st.one_of(st.none(), st.integers(0, 80)),
)
def test_a_recognised_band_has_exactly_these_values(size, ends, outside, kind, spoil):
    places = torch.arange(size)
    distance = places - places[:, None]
    inside = (distance >= min(ends)) & (distance <= max(ends))
    if outside == 0.0:
        table = inside.to(kind)
    else:
        table = torch.zeros(size, size, dtype=torch.float64).masked_fill(~inside, outside)
    if spoil is not None:
        flat = table.view(-1)
        at = spoil % flat.numel()
        flat[at] = 1 - flat[at].int() if outside == 0.0 else 3.0
    found = band_of(table.view(1, 1, size, size))
    if found is None:
        return
    low, high, beyond = found
    again = (distance >= low) & (distance <= high)
    if beyond == 0.0:
        assert torch.equal(table.bool(), again) and bool(((table == 0) | (table == 1)).all())
    else:
        expected = torch.zeros_like(table).masked_fill(~again, beyond)
        assert torch.equal(table, expected)


def test_bands_are_recognised():
    ones = torch.ones(7, 7)
    assert band_of(ones.tril()) == (-math.inf, 0.0, 0.0)
    assert band_of(ones.bool().tril()) == (-math.inf, 0.0, 0.0)
    assert band_of(ones.tril().triu(-2)) == (-2.0, 0.0, 0.0)
    assert band_of(torch.full((7, 7), -math.inf).triu(1)) == (-math.inf, 0.0, -math.inf)
    assert band_of(ones) is None
    assert band_of(torch.randn(7, 7)) is None
    assert band_of(2 * ones.tril()) is None
    assert band_of(torch.ones(2, 7, 7).tril()) is None


def test_a_table_is_looked_at_again_when_it_was_written_to():
    table = torch.ones(5, 5).tril()
    assumption = BandedTable(0, table, band_of(table))
    assert assumption.holds([table])
    table[0, 3] = 1
    assert not assumption.holds([table])
    assert assumption.holds([torch.ones(5, 5).tril()])


@pytest.mark.parametrize("name", ["nano-manual", "rope-manual"])
def test_a_mask_buffer_that_changes_between_calls(name):
    """From causal to one that lets every token see the next: exact each time."""
    entry = HANDWRITTEN[name]
    pair = Pair(entry.build, step=entry.step, chunk_size=4, streamed=False)
    batch = batches.with_labels(3, 13)
    pair.check(*batch, explain=True)
    for model in (pair.eager, pair.mine):
        for module in model.modules():
            for buffer in module.buffers(recurse=False):
                if buffer.dim() == 4:
                    shifted = buffer.roll(-1, -1)
                    shifted[..., -1] = shifted[..., -2]
                    buffer.copy_(shifted)
    pair.check(*batch)


@pytest.mark.parametrize("how", ["written to", "given other memory"])
def test_a_mask_buffer_that_is_changed_behind_autograds_back(how):
    """What is done to ``.data`` is counted by no version."""
    pair = Pair(lambda: nano.build(fused=False), chunk_size=4, streamed=False)
    batch = batches.with_labels(3, 13)
    batch = batch[0], batch[1].clamp(min=0)
    pair.check(*batch)
    for model in (pair.eager, pair.mine):
        for buffer in (b for b in model.buffers() if b.dim() == 4):
            if how == "written to":
                buffer.data.fill_(1)
            else:
                buffer.data = torch.ones_like(buffer)
    pair.check(*batch)


def test_mask_buffers_are_read_as_prefixes():
    """Half of the keys are read on average, in one segment per layer."""
    model = seqsplit.compile(nano.build(fused=False, layers=3), chunk_size=4)
    ids = batches.tokens(3, 13)
    report = seqsplit.explain(model, ids, ids)
    assert report.fully_streamed
    assert sum(segment.num_caches for segment in report.segments) == 6
