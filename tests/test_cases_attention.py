"""Attention that breaks chunked queries: alignment, padding, packing, windows, sinks, biases."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compare import Pair
from zoo import batches, hf, probe, torch_layers

HEADS, HEAD_DIM = 4, 6


def check_probe(attend, *, chunk_sizes=(4,), streamed=True, extras=None, **options):
    """Compare a `Probe` with this attention, on 3 rows of 13 tokens and of other lengths.

    With chunks of 4, 13 leaves a chunk of one token, 4 is one chunk and 3 is less than one.
    `extras` (masks and the like) are made for 13 tokens, so with them there is only that length.
    """
    lengths = (13,) if extras else (13, 4, 3)
    for chunk_size in chunk_sizes:
        pair = Pair(
            lambda: probe.build(attend, **options),
            step=probe.step,
            chunk_size=chunk_size,
            streamed=streamed,
        )
        for length in lengths:
            pair.check(*batches.with_labels(3, length), **(extras or {}))


def positions(scores):
    """Row and column numbers of scores [..., T, T], as [T, 1] and [1, T]."""
    index = torch.arange(scores.shape[-1], device=scores.device)
    return index[:, None], index[None, :]


def scores_of(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


# ---- Alignment (case 13) ------------------------------------------------------------------------


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fused_scaled(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.21)


def fused_with_tril(q, k, v):
    T = q.shape[2]
    mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def fused_with_float_mask(q, k, v):
    T = q.shape[2]
    mask = torch.zeros(T, T, dtype=q.dtype, device=q.device)
    mask = mask.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_comparison(q, k, v):
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    return scores.masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


def by_where(q, k, v):
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    return torch.where(rows - columns >= 0, scores, torch.finfo(scores.dtype).min).softmax(-1) @ v


def by_multiplied_mask(q, k, v):
    """Masked scores become -10000 by arithmetic; causal only because exp underflows."""
    scores = scores_of(q, k)
    keep = torch.ones_like(scores[0, 0]).tril()
    return (scores * keep - 1e4 * (1 - keep)).softmax(-1) @ v


def by_exp_and_sum(q, k, v):
    """The softmax itself written out."""
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    scores = scores.masked_fill(columns > rows, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def keys_by_queries(q, k, v):
    """Scores with the keys as rows, softmax over the second last dim."""
    scores = k @ q.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    rows, columns = positions(scores)
    weights = scores.masked_fill(rows > columns, float("-inf")).softmax(-2)
    return weights.transpose(-1, -2) @ v


def by_einsum_strings(q, k, v):
    scores = torch.einsum("...qd,...kd->...qk", q, k) * HEAD_DIM**-0.5
    rows, columns = positions(scores)
    weights = scores.masked_fill(columns > rows, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def softcapped(q, k, v):
    scores = 2.0 * torch.tanh(scores_of(q, k) / 2.0)
    rows, columns = positions(scores)
    return scores.masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize(
    "attend",
    [
        fused,
        fused_scaled,
        fused_with_tril,
        fused_with_float_mask,
        by_comparison,
        by_where,
        by_exp_and_sum,
        by_einsum_strings,
        softcapped,
    ],
)
def test_causal_attention_in_all_spellings(attend):
    check_probe(attend)


@pytest.mark.parametrize("attend", [by_multiplied_mask, keys_by_queries])
def test_causal_attention_in_rare_spellings(attend):
    check_probe(attend, streamed=False)


def causal_linear(q, k, v):
    """Scores without a softmax: masked products, then the values."""
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    return scores.masked_fill(columns > rows, 0.0) @ v


def test_attention_without_softmax():
    check_probe(causal_linear, streamed=False)


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
    kinds = [window_fused(3), fused, window_by_hand(5), by_comparison]
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


# ---- Sinks and biases (case 18) -----------------------------------------------------------------


class Sinks(nn.Module):
    """A learned logit per head that takes part in the softmax and is then dropped."""

    def __init__(self, index):
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(HEADS))

    def forward(self, q, k, v):
        scores = scores_of(q, k)
        rows, columns = positions(scores)
        scores = scores.masked_fill(columns > rows, float("-inf"))
        sink = self.sink.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1] @ v


class SinksByHand(Sinks):
    """The same, with the sink added to the denominator."""

    def forward(self, q, k, v):
        scores = scores_of(q, k)
        rows, columns = positions(scores)
        weights = scores.masked_fill(columns > rows, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True) + self.sink.exp().view(1, -1, 1, 1)
        return (weights / total) @ v


class RelativeBias(nn.Module):
    """A learned bias per head and clamped distance, looked up in an embedding."""

    def __init__(self, index):
        super().__init__()
        self.table = nn.Embedding(9, HEADS)

    def bias(self, length, device):
        index = torch.arange(length, device=device)
        distance = (index[:, None] - index[None, :]).clamp(-4, 4) + 4
        return self.table(distance).permute(2, 0, 1)[None]

    def forward(self, q, k, v):
        scores = scores_of(q, k) + self.bias(q.shape[2], q.device)
        rows, columns = positions(scores)
        return scores.masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


class RelativeBiasFused(RelativeBias):
    """The same bias given to the fused kernel as its float mask."""

    def forward(self, q, k, v):
        mask = self.bias(q.shape[2], q.device)
        rows, columns = positions(mask)
        mask = mask.masked_fill(columns > rows, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class SquareBias(nn.Module):
    """A learned bias for every pair of positions."""

    def __init__(self, index):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, 32, 32))

    def forward(self, q, k, v):
        T = q.shape[2]
        scores = scores_of(q, k) + self.bias[:, :T, :T]
        rows, columns = positions(scores)
        return scores.masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


class KeyBias(nn.Module):
    """A bias per head from the key's content (forgetting gates), and learned slopes."""

    def __init__(self, index):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(HEADS, HEAD_DIM))
        self.slope = nn.Parameter(torch.ones(HEADS))

    def forward(self, q, k, v):
        scores = scores_of(q, k)
        rows, columns = positions(scores)
        content = F.logsigmoid((k * self.gate[:, None, :]).sum(-1))
        scores = scores + content[:, :, None, :]
        scores = scores - self.slope.view(-1, 1, 1) * (rows - columns)
        return scores.masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


class LearnedTemperature(nn.Module):
    """A learned scale per head, and per query position as in length-scaled softmax."""

    def __init__(self, index):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, q, k, v):
        scores = scores_of(q, k)
        rows, columns = positions(scores)
        scores = scores * self.scale * torch.log(rows.to(q.dtype) + 2)
        return scores.masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


LEARNED = {
    Sinks: True,
    SinksByHand: True,
    RelativeBias: True,
    RelativeBiasFused: True,
    SquareBias: True,
    KeyBias: True,
    LearnedTemperature: True,
}


@pytest.mark.parametrize("kind", LEARNED, ids=lambda kind: kind.__name__)
def test_learned_terms_in_the_scores(kind):
    check_probe(kind, streamed=LEARNED[kind], per_layer=True)


# ---- Positions (case 19) ------------------------------------------------------------------------


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotary(size, base=100.0, complex_numbers=False):
    """Rotary positions on the first `size` features, computed inside the layer."""

    def turn(x):
        part, rest = x[..., :size], x[..., size:]
        index = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)
        frequency = base ** (-torch.arange(0, size, 2, device=x.device, dtype=x.dtype) / size)
        angle = index[:, None] * frequency
        if complex_numbers:
            pairs = torch.view_as_complex(part.reshape(*part.shape[:-1], -1, 2).contiguous())
            pairs = pairs * torch.polar(torch.ones_like(angle), angle)
            part = torch.view_as_real(pairs).flatten(-2)
        else:
            angle = torch.cat([angle, angle], dim=-1)
            part = part * angle.cos() + rotate_half(part) * angle.sin()
        return torch.cat([part, rest], dim=-1)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)

    return attend


@pytest.mark.parametrize("size", [2, 4, 6])
def test_rotary_on_part_of_the_head(size):
    check_probe(rotary(size))


def test_rotary_by_complex_numbers():
    check_probe(rotary(6, complex_numbers=True), streamed=False)


def alibi_from_positions(q, k, v):
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=q.device, dtype=q.dtype)
    scores = scores - slopes.view(-1, 1, 1) * (rows - columns).abs()
    return scores.masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


def alibi_from_columns(q, k, v):
    """Equal to the other up to a shift per row, as some libraries write it."""
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=q.device, dtype=q.dtype)
    scores = scores + slopes.view(-1, 1, 1) * columns
    return scores.masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


def alibi_fused(q, k, v):
    T = q.shape[2]
    index = torch.arange(T, device=q.device)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=q.device, dtype=q.dtype)
    mask = slopes.view(-1, 1, 1) * (index[None, :] - index[:, None])
    mask = mask + torch.full((T, T), float("-inf"), dtype=q.dtype).triu(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("attend", [alibi_from_positions, alibi_from_columns, alibi_fused])
def test_alibi(attend):
    check_probe(attend)


class Positions(nn.Module):
    """A decoder with learned, sinusoidal or offset position embeddings before its layers."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner = probe.build()
        self.table = nn.Parameter(torch.zeros(32, 20))
        self.lookup = nn.Embedding(32, 20)

    def forward(self, ids):
        T = ids.shape[1]
        index = torch.arange(T, device=ids.device)
        x = self.inner.embed(ids)
        if self.kind == "slice":
            x = x + self.table[:T]
        elif self.kind == "offset":
            x = x + self.table[2 : T + 2]
        elif self.kind == "from the end":
            x = x + self.lookup(T - 1 - index)
        elif self.kind == "counted":
            x = x + self.lookup(torch.cumsum(torch.ones_like(ids), dim=1) - 1)
        elif self.kind == "skips pads":
            x = x + self.lookup((ids != 0).cumsum(1).clamp(max=31))
        else:
            angle = index[:, None] / 100 ** (torch.arange(10, device=ids.device) / 10)
            x = x + torch.cat([angle.sin(), angle.cos()], dim=-1).to(x.dtype)
        for layer in self.inner.layers:
            x = layer(x)
        return self.inner.head(x)


@pytest.mark.parametrize(
    "kind", ["slice", "offset", "from the end", "counted", "skips pads", "sinusoidal"]
)
def test_position_embeddings(kind):
    pair = Pair(lambda: Positions(kind), step=probe.step, chunk_size=4)
    for length in (13, 7, 3):
        ids = batches.tokens(3, length, vocab=3)
        pair.check(ids, ids)


# ---- Masks that look ahead (case 20) ------------------------------------------------------------


def bidirectional(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def look_ahead_two(q, k, v):
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    return scores.masked_fill(columns > rows + 2, float("-inf")).softmax(-1) @ v


def look_ahead_two_fused(q, k, v):
    T = q.shape[2]
    mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril(2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def anti_causal(q, k, v):
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    return scores.masked_fill(columns < rows, float("-inf")).softmax(-1) @ v


def penalised_future(q, k, v):
    """The future is only made less likely, not forbidden."""
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    return (scores - 3.0 * (columns > rows)).softmax(-1) @ v


@pytest.mark.parametrize(
    "attend",
    [bidirectional, look_ahead_two, look_ahead_two_fused, anti_causal, penalised_future],
)
def test_attention_to_the_future(attend):
    check_probe(attend, streamed=False)


def prefix_lm_by_hand(q, k, v, prefix):
    scores = scores_of(q, k)
    rows, columns = positions(scores)
    allowed = (columns <= rows) | (columns < prefix[:, None, None, None])
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v


def prefix_lm_fused(q, k, v, prefix):
    index = torch.arange(q.shape[2], device=q.device)
    allowed = (index[None, :] <= index[:, None]) | (index < prefix[:, None, None, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


@pytest.mark.parametrize("attend", [prefix_lm_by_hand, prefix_lm_fused])
def test_prefix_language_models(attend):
    ids, labels = batches.with_labels(3, 13)
    pair = Pair(lambda: probe.build(attend), step=probe.step, chunk_size=4, streamed=False)
    for prefix in ([0, 5, 13], [1, 2, 3]):
        pair.check(ids, labels, prefix=torch.tensor(prefix))


def given_mask_fused(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def given_mask_by_hand(q, k, v, mask):
    return scores_of(q, k).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def given_masks():
    generator = torch.Generator().manual_seed(8)
    square = torch.rand(13, 13, generator=generator) < 0.4
    square.fill_diagonal_(True)
    causal = square & torch.ones(13, 13, dtype=torch.bool).tril()
    batched = torch.rand(3, 1, 13, 13, generator=generator) < 0.4
    batched |= torch.eye(13, dtype=torch.bool)
    by_head = torch.rand(1, HEADS, 13, 13, generator=generator) < 0.4
    by_head |= torch.eye(13, dtype=torch.bool)
    return {"any": square, "causal": causal, "per row": batched, "per head": by_head}


@pytest.mark.parametrize("attend", [given_mask_fused, given_mask_by_hand])
@pytest.mark.parametrize("mask", given_masks())
def test_masks_given_from_outside(attend, mask):
    """A mask that arrives as data proves nothing about causality, even where it happens to be."""
    check_probe(attend, streamed=False, extras={"mask": given_masks()[mask]})


@pytest.mark.parametrize("attend", [given_mask_fused, given_mask_by_hand])
def test_the_same_capture_takes_a_causal_mask_and_then_another(attend):
    masks = given_masks()
    ids, labels = batches.with_labels(3, 13)
    pair = Pair(lambda: probe.build(attend), step=probe.step, chunk_size=4, streamed=False)
    for name in ("causal", "any", "causal"):
        pair.check(ids, labels, mask=masks[name])


def test_a_float_mask_that_needs_a_gradient():
    generator = torch.Generator().manual_seed(8)
    mask = torch.randn(1, HEADS, 13, 13, generator=generator).requires_grad_()
    ids, labels = batches.with_labels(3, 13)
    pair = Pair(
        lambda: probe.build(given_mask_fused), step=probe.step, chunk_size=4, streamed=False
    )
    pair.check(ids, labels, mask=mask)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hf_takes_a_mask_of_four_dims(attention):
    ids, labels = batches.with_labels(3, 13)
    for mask in given_masks()["any"], given_masks()["causal"]:
        mask = mask.expand(3, 1, 13, 13)
        if attention == "eager":
            mask = torch.zeros(mask.shape).masked_fill(~mask, -1e30)
        pair = Pair(hf.builder("llama", attention), chunk_size=4, streamed=False)
        pair.check(input_ids=ids, labels=labels, attention_mask=mask)


def cross_attention(q, k, v, memory):
    """Keys and values from a second sequence of another length, all of it visible."""
    memory = memory[:, None].expand(-1, HEADS, -1, -1)
    return fused(q, k, v) + F.scaled_dot_product_attention(q, memory, memory)


def test_attention_to_a_second_sequence():
    generator = torch.Generator().manual_seed(8)
    for length in (5, 13, 17):
        memory = torch.randn(3, length, HEAD_DIM, generator=generator).requires_grad_()
        check_probe(cross_attention, streamed=False, extras={"memory": memory})


# ---- Grouped heads ------------------------------------------------------------------------------


class Grouped(nn.Module):
    """Queries of 4 heads on keys and values of fewer, spread out in several ways."""

    def __init__(self, kv_heads, how):
        super().__init__()
        self.kv_heads, self.how = kv_heads, how

    def forward(self, q, k, v):
        k, v = k[:, : self.kv_heads], v[:, : self.kv_heads]
        times = HEADS // self.kv_heads
        if self.how == "enable_gqa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.how == "repeat_interleave":
            k, v = (t.repeat_interleave(times, dim=1) for t in (k, v))
        elif self.how == "repeat":
            k, v = (t.repeat(1, times, 1, 1) for t in (k, v))
        elif self.how == "expand":
            k, v = (t[:, :, None].expand(-1, -1, times, -1, -1).reshape(*q.shape) for t in (k, v))
        else:
            q = q.unflatten(1, (self.kv_heads, times))
            scores = torch.einsum("bgtqd,bgkd->bgtqk", q, k) / math.sqrt(HEAD_DIM)
            rows, columns = positions(scores)
            weights = scores.masked_fill(columns > rows, float("-inf")).softmax(-1)
            return torch.einsum("bgtqk,bgkd->bgtqd", weights, v).flatten(1, 2)
        return fused(q, k, v)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    "how", ["enable_gqa", "repeat_interleave", "repeat", "expand", "grouped einsum"]
)
def test_grouped_heads(how, kv_heads):
    check_probe(Grouped(kv_heads, how))


# ---- torch's own layers (case 21) ---------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights, average", [(True, True), (True, False), (False, True)])
def test_multihead_attention(need_weights, average, batch_first):
    def build():
        return torch_layers.multihead(
            batch_first=batch_first, need_weights=need_weights, average=average
        )

    pair = Pair(build, step=torch_layers.step, chunk_size=4, streamed=False)
    for length in (13, 4, 3):
        pair.check(*batches.with_labels(3, length))


@pytest.mark.parametrize(
    "batch_first, norm_first, stack",
    [(True, True, False), (True, False, True), (False, True, True), (False, False, False)],
)
def test_transformer_encoder_layers(batch_first, norm_first, stack):
    def build():
        return torch_layers.encoder(batch_first=batch_first, norm_first=norm_first, stack=stack)

    pair = Pair(build, step=torch_layers.step, chunk_size=4, streamed=False)
    for length in (13, 4, 3):
        pair.check(*batches.with_labels(3, length))
