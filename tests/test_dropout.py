"""Dropout: masks are fresh per call and per chunk, and the backward uses the forward's masks.

Which masks a seed gives is not promised to be eager's. What is checked needs no knowledge of
them: at a fixed seed the compiled loss is an ordinary smooth function of the weights, and its
gradient has to be the derivative of exactly that function.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqsplit
from compare import Pair, gradient_differences
from zoo import batches, nano, probe

RATE = 0.1
STEP = 1e-5
# Central differences: truncation of order STEP**2, rounding of order 1e-16 / STEP.
SLOPE_TOLERANCE = 1e-7


def build(fused=True, rate=RATE, **options):
    return nano.build(fused=fused, dropout=rate, **options).double()


def compiled(model, chunk_size=4, **options):
    return seqsplit.compile(model, chunk_size=chunk_size, strict=True, **options)


def batch(seed=0, length=13):
    ids, labels = batches.with_labels(3, length, seed=seed)
    return ids, torch.where(labels == -100, -1, labels)


def seeded_loss(model, seed=0):
    torch.manual_seed(seed)
    return model(*batch())[1]


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def slope(model, name, direction):
    """Derivative of the seeded loss along a direction in one parameter, by differences."""
    parameter = model.get_parameter(name)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter.add_(direction, alpha=sign * STEP)
        values.append(seeded_loss(model).item())
        with torch.no_grad():
            parameter.add_(direction, alpha=-sign * STEP)
    return (values[0] - values[1]) / (2 * STEP)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 4, 13, 20])
def test_the_gradient_is_the_derivative_of_the_same_masks(fused, chunk_size):
    model = compiled(build(fused, rate=0.3), chunk_size)
    seeded_loss(model).backward()
    found = grads(model)
    for name, grad in found.items():
        direction = grad / grad.norm()
        expected = slope(model, name, direction)
        actual = grad.norm().item()
        assert abs(actual - expected) <= SLOPE_TOLERANCE * max(1.0, abs(expected)), name


@pytest.mark.parametrize("fused", [True, False])
def test_the_same_seed_gives_the_same_step(fused):
    model = compiled(build(fused))
    steps = []
    for _ in range(2):
        model.zero_grad()
        loss = seeded_loss(model)
        loss.backward()
        steps.append(grads(model) | {"loss": loss.detach()})
    assert all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])


def test_another_seed_gives_another_step():
    model = compiled(build())
    assert seeded_loss(model, seed=0).item() != seeded_loss(model, seed=1).item()
    torch.manual_seed(0)
    first, second = model(*batch())[1].item(), model(*batch())[1].item()
    assert first != second


@pytest.mark.parametrize("chunk_size", [1, 4, 20])
def test_the_generator_advances_in_the_forward_and_only_there(chunk_size):
    model = compiled(build(), chunk_size)
    seeded_loss(model).backward()
    torch.manual_seed(0)
    start = torch.get_rng_state()
    loss = model(*batch())[1]
    after_forward = torch.get_rng_state()
    assert not torch.equal(start, after_forward)
    loss.backward()
    assert torch.equal(after_forward, torch.get_rng_state())


def test_numbers_drawn_between_forward_and_backward_disturb_nothing():
    model = compiled(build())
    seeded_loss(model).backward()
    expected = grads(model)
    model.zero_grad()
    loss = seeded_loss(model)
    torch.manual_seed(99)
    drawn = torch.rand(7)
    loss.backward()
    following = torch.rand(7)
    assert not gradient_differences(expected, grads(model))
    torch.manual_seed(99)
    assert torch.equal(torch.rand(14), torch.cat([drawn, following]))


def test_two_calls_before_their_backwards_keep_their_own_masks():
    model = compiled(build())

    def alone(seed):
        model.zero_grad()
        seeded_loss(model, seed).backward()
        return grads(model)

    expected = {name: alone(1)[name] + grad for name, grad in alone(2).items()}
    model.zero_grad()
    losses = [seeded_loss(model, 1), seeded_loss(model, 2)]
    for loss in losses:
        loss.backward()
    assert not gradient_differences(expected, grads(model))


def test_a_retained_graph_replays_the_same_masks():
    model = compiled(build())
    seeded_loss(model).backward()
    once = grads(model)
    model.zero_grad()
    loss = seeded_loss(model)
    loss.backward(retain_graph=True)
    loss.backward()
    assert not gradient_differences({name: 2 * grad for name, grad in once.items()}, grads(model))


class Visible(nn.Module):
    """Its output shows the mask: dropout of ones behind an attention that adds nothing."""

    def __init__(self, rate):
        super().__init__()
        self.inner = probe.build(layers=1)
        self.rate = rate

    def forward(self, ids, ones):
        silent = self.inner.hidden(ids).sum(-1, keepdim=True) * 0
        return F.dropout(ones + silent, self.rate, training=self.training)


@pytest.mark.parametrize("chunk_size", [1, 5, 40])
def test_masks_differ_between_positions_chunks_and_rows(chunk_size):
    model = compiled(Visible(0.5).double(), chunk_size)
    ones = torch.ones(3, 40, 64, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    out = model(batches.tokens(3, 40), ones)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    rows = {tuple(row) for row in (out != 0).flatten(0, 1).tolist()}
    assert len(rows) == 3 * 40
    kept = (out != 0).double().mean().item()
    assert abs(kept - 0.5) < 5 * 0.5 / ones.numel() ** 0.5


@pytest.mark.parametrize("chunk_size", [1, 5, 40])
def test_the_backward_masks_what_the_forward_masked(chunk_size):
    model = compiled(Visible(0.5).double(), chunk_size)
    ones = torch.ones(3, 40, 8, dtype=torch.float64, requires_grad=True)
    out = model(batches.tokens(3, 40), ones)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    assert torch.equal(ones.grad, out.detach() * cotangent)


@pytest.mark.parametrize("fused", [True, False])
def test_evaluation_mode_drops_nothing(fused):
    """With gradients on, in `eval()`, then back in training and in evaluation again."""
    pair = Pair(lambda: build(fused), chunk_size=4)
    for training in (False, True, False):
        pair.eager.train(training)
        pair.mine.train(training)
        if training:
            seeded_loss(pair.mine).backward()
        else:
            pair.check(*batch())


@pytest.mark.parametrize("fused", [True, False])
def test_a_rate_of_zero_is_exact(fused):
    Pair(lambda: build(fused, rate=0.0), chunk_size=4).check(*batch())


def test_the_mean_loss_over_seeds_is_eagers():
    """Same distribution: two means of many seeds agree within five standard errors."""
    eager = build(rate=0.3)
    mine = compiled(copy.deepcopy(eager))
    samples = [
        torch.tensor([seeded_loss(model, seed).item() for seed in range(60)])
        for model in (eager, mine)
    ]
    spread = sum(s.var() / len(s) for s in samples).sqrt()
    assert (samples[0].mean() - samples[1].mean()).abs() < 5 * spread
