"""Masks from data and from positions: padding, packed documents, windows."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attending import check_probe, positions, scores_of
from compare import Pair
from zoo import batches, hf, probe

# ---- Padding (case 15) --------------------------------------------------------------------------


def minimum(dtype):
    return torch.finfo(dtype).min


def fused_bool(q, k, v, keep):
    T = q.shape[2]
    causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    mask = causal & keep[:, None, None, :].bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def fused_bool_sees_itself(q, k, v, keep):
    T = q.shape[2]
    causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    itself = torch.eye(T, dtype=torch.bool, device=q.device)
    mask = (causal & keep[:, None, None, :].bool()) | itself
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def fused_minimum(q, k, v, keep):
    T = q.shape[2]
    causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    mask = causal & keep[:, None, None, :].bool()
    mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, minimum(q.dtype))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_hand_minimum(q, k, v, keep):
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    allowed = (columns <= rows) & keep[:, None, None, :].bool()
    return scores.masked_fill(~allowed, minimum(scores.dtype)).softmax(-1) @ v


def by_hand_two_minima(q, k, v, keep):
    """Causality and padding are added one after the other: twice the minimum is -inf."""
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    low = minimum(scores.dtype)
    scores = scores + (columns > rows).to(q.dtype) * low
    return (scores + (1 - keep[:, None, None, :].to(q.dtype)) * low).softmax(-1) @ v


def by_hand_large_number(q, k, v, keep):
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    allowed = (columns <= rows) & keep[:, None, None, :].bool()
    return scores.masked_fill(~allowed, -1e9).softmax(-1) @ v


def by_hand_then_zeroed(q, k, v, keep):
    """Rows that see nothing are NaN after the softmax and are then replaced by zero."""
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    allowed = (columns <= rows) & keep[:, None, None, :].bool()
    blind = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | blind), float("-inf"))
    return scores.softmax(-1).masked_fill(blind, 0.0) @ v


PADDED = {
    fused_bool: True,
    fused_bool_sees_itself: True,
    fused_minimum: True,
    by_hand_minimum: True,
    by_hand_two_minima: True,
    by_hand_large_number: True,
    by_hand_then_zeroed: False,
}


@pytest.mark.parametrize("attend", PADDED, ids=lambda attend: attend.__name__)
def test_padding(attend):
    """Left padding has rows that see nothing; their hidden states count in `every row` too."""

    def every_row(model, ids, labels, keep):
        return (
            probe.step(model, ids, labels, keep=keep) + model.hidden(ids, keep=keep).square().mean()
        )

    for step in (probe.step, every_row):
        pair = Pair(
            lambda: probe.build(attend),
            step=step,
            chunk_size=4,
            streamed=PADDED[attend] and step is probe.step,
        )
        for side, length in (("left", 13), ("right", 13), ("none", 13), ("left", 3)):
            ids, keep, labels = batches.padded(side, length=length)
            found = pair.check(ids, labels, keep=keep)
            assert not found.goal.isnan()
            assert not any(grad.isnan().any() for grad in found.gradients.values())


@pytest.mark.parametrize("attend", [fused_bool, by_hand_minimum])
def test_any_pattern_of_padding(attend):
    """Holes in the middle and rows without a single token are among the patterns."""
    pair = Pair(lambda: probe.build(attend), step=probe.step, chunk_size=3)

    @settings(max_examples=25)
    @given(st.integers(2, 12), st.data())
    def check(length, data):
        ids = batches.tokens(2, length)
        row = st.lists(st.integers(0, 1), min_size=length, max_size=length)
        keep = torch.tensor([data.draw(row), data.draw(row)])
        pair.check(ids, ids, keep=keep)

    check()


# ---- Packed documents (case 16) -----------------------------------------------------------------


def documents(*lengths):
    """Document numbers of packed documents of these lengths, int64 [1, T]."""
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]


def restarted(*lengths):
    """Position ids that restart with each document, int64 [1, T]."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


def packed_fused(q, k, v, document):
    T = q.shape[2]
    causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    same = document[:, None, :, None] == document[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal & same)


def packed_by_hand(q, k, v, document):
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    allowed = (columns <= rows) & (document[:, None, :, None] == document[:, None, None, :])
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("attend", [packed_fused, packed_by_hand])
def test_packed_documents(attend):
    document = torch.cat([documents(5, 3, 5), documents(1, 11, 1), documents(13)])
    check_probe(attend, extras={"document": document})


@pytest.mark.parametrize("family, attention", [("llama", "sdpa"), ("mistral", "eager")])
def test_hf_recognises_packing_from_position_ids(family, attention):
    pair = Pair(hf.builder(family, attention), chunk_size=5)
    for lengths in ((6, 7), (1, 9, 3), (13,)):
        ids, labels = batches.with_labels(1, 13)
        pair.check(input_ids=ids, labels=labels, position_ids=restarted(*lengths))


def test_position_ids_may_run_backwards_or_repeat():
    """Positions are values, not places: rotary angles follow them wherever the chunk is."""
    ids, labels = batches.with_labels(2, 13)
    position_ids = torch.stack([torch.arange(13).flip(0), torch.arange(13) // 2])
    causal = torch.ones(13, 13, dtype=torch.bool).tril().expand(2, 1, 13, 13)
    pair = Pair(hf.builder("llama"), chunk_size=4)
    pair.check(input_ids=ids, labels=labels, position_ids=position_ids, attention_mask=causal)


# ---- Windows (case 17) --------------------------------------------------------------------------


def window_fused(width):
    def attend(q, k, v):
        index = torch.arange(q.shape[2], device=q.device)
        distance = index[:, None] - index[None, :]
        mask = (distance >= 0) & (distance < width)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def window_by_hand(width):
    def attend(q, k, v):
        scores = scores_of(q, k)
        rows, columns = positions(scores)
        outside = (columns > rows) | (columns <= rows - width)
        return scores.masked_fill(outside, float("-inf")).softmax(-1) @ v

    return attend


def window_by_band(width):
    def attend(q, k, v):
        T = q.shape[2]
        band = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - width)
        return scores_of(q, k).masked_fill(~band, float("-inf")).softmax(-1) @ v

    return attend


def window_or_sinks(width):
    """A window plus the first two tokens, which every later one may see."""

    def attend(q, k, v):
        scores = scores_of(q, k)
        rows, columns = positions(scores)
        allowed = (columns <= rows) & ((rows - columns < width) | (columns < 2))
        return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v

    return attend


@pytest.mark.parametrize("kind", [window_fused, window_by_hand, window_by_band, window_or_sinks])
@pytest.mark.parametrize("width, chunk_sizes", [(1, (5,)), (3, (2, 5)), (7, (2,)), (50, (5,))])
def test_windows_with_shorter_and_longer_chunks(kind, width, chunk_sizes):
    check_probe(kind(width), chunk_sizes=chunk_sizes)


def test_layers_with_and_without_a_window():
    kinds = [window_fused(3), probe.causal, window_by_hand(5), window_by_hand(99)]
    check_probe(lambda index: kinds[index], layers=4, per_layer=True)


def block_local(q, k, v):
    """Each block of four tokens sees itself (causally) and the whole block before it."""
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    near = (rows // 4 - columns // 4 <= 1) & (columns <= rows)
    return scores.masked_fill(~near, float("-inf")).softmax(-1) @ v


def dilated(q, k, v):
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    allowed = (columns <= rows) & ((rows - columns) % 3 == 0)
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("attend", [block_local, dilated])
def test_sparse_patterns(attend):
    check_probe(attend, chunk_sizes=(3,))


@pytest.mark.parametrize("chunk_size", [2, 5])
@pytest.mark.parametrize(
    "family, attention", [("mistral", "sdpa"), ("mistral", "eager"), ("gemma2", "eager")]
)
def test_hf_windows_of_three(family, attention, chunk_size):
    pair = Pair(hf.builder(family, attention, sliding_window=3), chunk_size=chunk_size)
    for side in ("none", "left"):
        ids, keep, labels = batches.padded(side)
        pair.check(input_ids=ids, attention_mask=keep, labels=labels)


def test_mask_kept_for_the_longest_call():
    """A table that is made anew when a call is longer, and is as large as the longest so far."""
    kept = {}

    def attend(q, k, v):
        length = q.shape[2]
        if "mask" not in kept or kept["mask"].shape[0] < length:
            kept["mask"] = torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=kept["mask"][:length, :length])

    pair = Pair(lambda: probe.build(attend), step=probe.step, chunk_size=4)
    for length in (13, 9):
        pair.check(*batches.with_labels(3, length))
