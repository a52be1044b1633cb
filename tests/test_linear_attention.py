"""Linear attention with a decay: recognised by what it computes, its state carried."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compare import Pair
from seqsplit.ops import linear_attention as op
from seqsplit.ops.caches import Carry
from zoo import probe

BLOCK = 4
CHUNK = 3
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def by_definition(q, k, v, log_decay):
    """Every row from all rows up to it."""
    decayed = log_decay.cumsum(1)
    between = decayed[:, :, None] - decayed[:, None]
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    weights = between.masked_fill(later[:, :, None], float("-inf")).exp()
    return torch.einsum("bthn,bshn,btsh,bshp->bthp", q, k, weights, v)


# ---- the op --------------------------------------------------------------------------------------


@given(
    length=st.integers(1, 23),
    inner=st.sets(st.integers(1, 22), max_size=4),
    learned=st.sets(st.integers(0, 3), min_size=1),
    block=st.integers(1, 9),
)
def test_rows_and_gradients(length, inner, learned, block):
    """Whole and in uneven chunks, whatever the blocks inside of it are."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, 3, 4), (2, length, 3, 4), (2, length, 3, 5), (2, length, 3)]
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    values[3] = -values[3].abs()
    values = [value.requires_grad_(i in learned) for i, value in enumerate(values)]
    cotangent = torch.randn(shapes[2], generator=generator, dtype=torch.float64)
    expected = by_definition(*values)
    options = {"allow_unused": True, "materialize_grads": True}
    wanted = [value for value in values if value.requires_grad]
    grads = torch.autograd.grad(expected, wanted, cotangent, **options)
    bounds = sorted({0, length} | {b for b in inner if b < length})
    carry, chunks = Carry(torch.float32), list(zip(bounds, bounds[1:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_BLOCK", block)
        whole = op.linear_attention(*values)
        torch.testing.assert_close(whole, expected, **CLOSE)
        for have, want in zip(torch.autograd.grad(whole, wanted, cotangent, **options), grads):
            torch.testing.assert_close(have, want, **CLOSE)
        with torch.no_grad():
            for start, end in chunks[:-1]:  # forward, to fill in what each chunk receives
                parts = [value[:, start:end] for value in values]
                op.linear_attention_rows(*parts, carry, 1, start)
        rows, pieces = [], []
        for start, end in reversed(chunks):
            parts = [v.detach()[:, start:end].requires_grad_(v.requires_grad) for v in values]
            rows.append(op.linear_attention_rows(*parts, carry, 1, start))
            asked = [part for part in parts if part.requires_grad]
            pieces.append(torch.autograd.grad(rows[-1], asked, cotangent[:, start:end], **options))
    torch.testing.assert_close(torch.cat(rows[::-1], 1), expected, **CLOSE)
    for have, want in zip(zip(*pieces[::-1]), grads):
        torch.testing.assert_close(torch.cat(have, 1), want, **CLOSE)


# ---- the ways it is written ----------------------------------------------------------------------


def in_blocks(x):
    """[B, T, ...] -> [B, blocks, BLOCK, ...], with rows of zeros after the last."""
    return F.pad(x, [0, 0] * (x.ndim - 2) + [0, -x.shape[1] % BLOCK]).unflatten(1, (-1, BLOCK))


def decays(log_decay):
    """[..., n] -> [..., n, n]: what is left of position s at position t."""
    ends = log_decay.cumsum(-1)
    count = log_decay.shape[-1]
    later = torch.ones(count, count, dtype=torch.bool, device=log_decay.device).triu(1)
    return (ends[..., :, None] - ends[..., None, :]).masked_fill(later, float("-inf")).exp()


def states_by_a_matrix(ends, added):
    """The state before each block, from those that all blocks add."""
    matrix = decays(F.pad(ends, (0, 1)).roll(1, -1))  # [B, H, blocks + 1, blocks + 1]
    added = torch.cat([torch.zeros_like(added[:, :1]), added], 1)
    return torch.einsum("bhcz,bzhnp->bchnp", matrix, added)[:, :-1]


class InBlocks(nn.Module):
    """Blocks of positions, compared with each other, and a state from block to block.

    Args:
        skip: whether values are added to the result, padded as all else.
        too_early: whether a block's own positions see what the block adds to the state.
    """

    def __init__(self, skip=False, too_early=False):
        super().__init__()
        self.decay = nn.Linear(6, 1)
        self.skip = nn.Parameter(torch.randn(4)) if skip else None
        self.too_early = too_early

    def forward(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, T, H, E]
        length = q.shape[1]
        log_decay = F.logsigmoid(self.decay(k)).squeeze(-1)
        values, (q, k, v, log_decay) = v, map(in_blocks, (q, k, v, log_decay))
        own = decays(log_decay.movedim(-1, 1))  # [B, H, blocks, BLOCK, BLOCK]
        y = torch.einsum("bcthn,bcshn,bhcts,bcshp->bcthp", q, k, own, v)
        passed = log_decay.cumsum(2)
        left = (passed[:, :, -1:] - passed).exp()
        added = torch.einsum("bcshn,bcsh,bcshp->bchnp", k, left, v)
        before = states_by_a_matrix(passed[:, :, -1].transpose(1, 2), added)
        if self.too_early:
            before = before + added
        y = y + torch.einsum("bcthn,bcth,bchnp->bcthp", q, passed.exp(), before)
        y = y.flatten(1, 2)
        if self.skip is not None:
            padded = F.pad(values, (0, 0, 0, 0, 0, -length % BLOCK))
            y = y + self.skip[:, None] * padded
        return y[:, :length].transpose(1, 2)


def segment_sums(x):
    """[..., n] -> [..., n, n]: sums of what lies between two positions."""
    count = x.shape[-1]
    ones = torch.ones(count, count, dtype=torch.bool, device=x.device)
    sums = x[..., None].expand(*x.shape, count).masked_fill(~ones.tril(-1), 0).cumsum(-2)
    return sums.masked_fill(~ones.tril(), float("-inf"))


class InWholeBlocks(InBlocks):
    """The same for sequences of whole blocks; others are refused, or padded if it `pads`."""

    def __init__(self, pads):
        super().__init__()
        self.pads = pads

    def forward(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        length, missing = q.shape[1], -q.shape[1] % BLOCK
        given = (q, k, v, F.logsigmoid(self.decay(k)).squeeze(-1))
        if not self.pads:
            assert missing == 0
        elif missing > 0:
            given = [F.pad(x, [0, 0] * (x.ndim - 2) + [0, missing]) for x in given]
        q, k, v, decay = (x.unflatten(1, (x.shape[1] // BLOCK, BLOCK)) for x in given)
        decay = decay.permute(0, 3, 1, 2)
        passed = decay.cumsum(-1)
        y = torch.einsum("bcthn,bcshn,bhcts,bcshp->bcthp", q, k, segment_sums(decay).exp(), v)
        left = (passed[..., -1:] - passed).exp()
        states = torch.einsum("bcshn,bhcs,bcshp->bchpn", k, left, v)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        matrix = segment_sums(F.pad(passed[..., -1], (1, 0))).exp()
        states = torch.einsum("bhzc,bchpn->bzhpn", matrix, states)[:, :-1]
        y = y + torch.einsum("bcthn,bchpn,bhct->bcthp", q, states, passed.exp())
        y = y.flatten(1, 2)
        return (y if missing == 0 else y[:, :length]).transpose(1, 2)


def check(attend, lengths=(13, 21), streamed=True):
    """Against eager; returns the report."""
    pair = Pair(lambda: probe.build(attend()), step=probe.step, streamed=streamed, chunk_size=CHUNK)
    return pair.check_lengths(lengths)


@pytest.mark.parametrize("skip", [False, True])
def test_blocks_and_a_state(skip):
    report = check(lambda: InBlocks(skip))
    assert sum(segment.num_caches for segment in report.segments) > 0


def test_a_multiple_of_the_block():
    check(InBlocks, lengths=(20,))


@pytest.mark.parametrize("pads, lengths", [(False, (20, 12)), (True, (12, 13, 20))])
def test_code_that_asks_for_whole_blocks(pads, lengths):
    """Its sizes are multiples of the number of blocks: that they are the length, a guard says."""
    check(lambda: InWholeBlocks(pads), lengths=lengths)


def test_another_sum_is_left_alone():
    check(lambda: InBlocks(too_early=True), lengths=(13,), streamed=False)
