"""Attention in all its spellings: causal, grouped, to the future, and in torch's own layers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attending import HEAD_DIM, HEADS, check_probe, positions, scores_of
from compare import Pair
from zoo import batches, hf, probe, torch_layers

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
