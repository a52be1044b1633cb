"""Sums over the sequence: of several segments, fed back, and over shifted lengths."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqsplit

VOCAB, WIDTH = 31, 12


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class Model(nn.Module):
    def __init__(self, loss, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.loss = loss

    def hidden(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids):
        return self.loss(self, ids)


def cross_entropy(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def with_z_loss(model, ids):
    logits = model.head(model.hidden(ids))
    return cross_entropy(logits, ids) + 0.01 * logits.logsumexp(-1).square().mean()


def penalty_of_every_layer(model, ids):
    x, penalty = model.embed(ids), 0.0
    for layer in model.layers:
        x = layer(x)
        penalty = penalty + x.square().mean()
    return cross_entropy(model.head(x), ids) + 0.1 * penalty


def mean_fed_back(model, ids):
    x = model.hidden(ids)
    return cross_entropy(model.head(x - x.mean(1, keepdim=True)), ids)


def all_tokens_but_the_last(model, ids):
    logits = model.head(model.hidden(ids[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def difference_of_sequences(model, ids):
    scores = model.head(model.hidden(ids)).log_softmax(-1)
    each = scores[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)
    return -F.logsigmoid(each[0] - each[1])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    ("loss", "streamed"),
    [
        (with_z_loss, True),
        (penalty_of_every_layer, True),
        (mean_fed_back, False),
        (all_tokens_but_the_last, True),
        (difference_of_sequences, True),
    ],
)
def test_sums_are_exact(loss, streamed, layers):
    torch.manual_seed(0)
    model = Model(loss, layers).double()
    twin = copy.deepcopy(model)
    seqsplit.compile(twin, chunk_size=4, strict=streamed)
    ids = torch.randint(0, VOCAB, (2, 13))
    want, have = model(ids), twin(ids)
    assert abs(have - want) <= 1e-12 * abs(want)
    want.backward()
    have.backward()
    largest = max(p.grad.norm() for p in model.parameters())
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        # a gradient that is zero in exact arithmetic is rounding noise on both sides
        scale = p.grad.norm().clamp_min(1e-6 * largest)
        assert (p.grad - q.grad).norm() <= 1e-9 * scale, name
