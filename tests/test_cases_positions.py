"""Learned terms in the scores, and positions: sinks, biases, rotary, ALiBi, embeddings."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attending import HEAD_DIM, HEADS, check_probe, positions, scores_of
from compare import Pair
from zoo import batches, probe

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


class MemoryKeys(nn.Module):
    """Learned keys and values before those of the tokens, which every row sees."""

    def __init__(self, index):
        super().__init__()
        self.key = nn.Parameter(torch.randn(HEADS, 3, HEAD_DIM))
        self.value = nn.Parameter(torch.randn(HEADS, 3, HEAD_DIM))

    def forward(self, q, k, v):
        rows, columns = positions(scores_of(q, k))
        hidden = F.pad(columns > rows, (3, 0), value=False)
        k, v = (
            torch.cat([learned.expand(q.shape[0], -1, -1, -1), own], dim=2)
            for learned, own in ((self.key, k), (self.value, v))
        )
        return scores_of(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def by_distance(q, k, v):
    """Scores that fall with the distance of query and key."""
    scores = -torch.cdist(q, k)
    rows, columns = positions(scores)
    return scores.masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


LEARNED = {
    MemoryKeys: True,
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


def test_scores_by_distance():
    check_probe(by_distance)


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
