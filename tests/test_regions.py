"""Modules that are token-wise as a whole: mixtures of experts in all their forms."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqsplit
from compare import Pair, assert_streamed
from zoo import batches, probe

WIDTH, HIDDEN, EXPERTS, CHOSEN = 20, 7, 4, 2


class Experts(nn.Module):
    """The experts alone: tokens, their chosen experts and weights -> tokens."""

    def __init__(self, dispatch):
        super().__init__()
        self.dispatch = dispatch
        self.up = nn.Parameter(torch.linspace(-1, 1, EXPERTS * WIDTH * HIDDEN).cos())
        self.down = nn.Parameter(torch.linspace(1, -1, EXPERTS * WIDTH * HIDDEN).sin())

    def forward(self, tokens, weight, chosen):
        up = self.up.view(EXPERTS, WIDTH, HIDDEN)
        return self.dispatch(tokens, weight, chosen, up, self.down.view(EXPERTS, HIDDEN, WIDTH))


class Mixture(nn.Module):
    """A router and experts, on tokens of all rows in one dim."""

    def __init__(self, dispatch):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(dispatch)
        self.load = None

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        probability = self.router(tokens).softmax(-1)
        weight, chosen = probability.topk(CHOSEN, dim=-1)
        share = F.one_hot(chosen, EXPERTS).sum(1).to(x.dtype).mean(0)
        self.load = EXPERTS * (share * probability.mean(0)).sum()
        weight = weight / weight.sum(-1, keepdim=True)
        return self.experts(tokens, weight, chosen).view_as(x)


def sorted_groups(tokens, weight, chosen, up, down):
    """Sort by expert, multiply in groups, put back by index_add."""
    order = chosen.flatten().argsort(stable=True)
    token = order // CHOSEN
    which = chosen.flatten()[order]
    hidden = torch.einsum("nd,ndh->nh", tokens[token], up[which]).relu()
    shares = torch.einsum("nh,nhd->nd", hidden, down[which])
    shares = shares * weight.flatten()[order][:, None]
    return torch.zeros_like(tokens).index_add(0, token, shares)


def counted_groups(tokens, weight, chosen, up, down):
    """The same with groups told by their ends: a sum over experts that is no scan over tokens."""
    ends = F.one_hot(chosen.flatten(), EXPERTS).sum(0).cumsum(0)
    places = torch.arange(chosen.numel(), device=tokens.device)
    order = chosen.flatten().argsort(stable=True)
    which = (places[:, None] >= ends).sum(-1)
    hidden = torch.einsum("nd,ndh->nh", tokens[order // CHOSEN], up[which]).relu()
    shares = torch.einsum("nh,nhd->nd", hidden, down[which])
    shares = shares * weight.flatten()[order][:, None]
    return torch.zeros_like(tokens).index_add(0, order // CHOSEN, shares)


def gathered_weights(tokens, weight, chosen, up, down):
    """Every token's pair of experts as matrices of its own."""
    places = torch.arange(tokens.shape[0], device=tokens.device)
    places = places[:, None].expand(-1, CHOSEN).reshape(-1)
    which = chosen.reshape(-1)
    hidden = torch.bmm(tokens[places].unsqueeze(1), up[which]).relu()
    shares = torch.bmm(hidden, down[which]).squeeze(1) * weight.reshape(-1, 1)
    return shares.view(tokens.shape[0], CHOSEN, WIDTH).sum(1)


def one_hot(tokens, weight, chosen, up, down):
    gates = torch.zeros(*tokens.shape[:1], EXPERTS, dtype=tokens.dtype)
    gates = gates.scatter(-1, chosen, weight)
    hidden = torch.einsum("nd,edh->enh", tokens, up).relu()
    return torch.einsum("enh,ehd,ne->nd", hidden, down, gates)


def loop_over_experts(tokens, weight, chosen, up, down):
    out = torch.zeros_like(tokens)
    for expert in range(EXPERTS):
        share = (weight * (chosen == expert)).sum(-1, keepdim=True)
        out = out + (tokens @ up[expert]).relu() @ down[expert] * share
    return out


def with_capacity(tokens, weight, chosen, up, down):
    """An expert takes its first tokens only: which are dropped depends on the others."""
    taken = F.one_hot(chosen, EXPERTS).sum(1).cumsum(0) <= (tokens.shape[0] + 1) // 2
    kept = taken.gather(1, chosen)
    return loop_over_experts(tokens, weight * kept, chosen, up, down)


SEPARABLE = [sorted_groups, counted_groups, gathered_weights, one_hot, loop_over_experts]


class Sparse(nn.Module):
    def __init__(self, dispatch, layers=2):
        super().__init__()
        self.inner = probe.build(layers=layers)
        self.mixtures = nn.ModuleList(Mixture(dispatch) for _ in range(layers))

    def forward(self, ids):
        x = self.inner.embed(ids)
        for layer, mixture in zip(self.inner.layers, self.mixtures):
            x = layer(x)
            x = x + mixture(x)
        return self.inner.head(self.inner.norm(x))


def step(model, ids, labels):
    return probe.step(model, ids, labels)


def step_with_load(model, ids, labels):
    loss = probe.step(model, ids, labels)
    return loss + 0.1 * sum(mixture.load for mixture in model.mixtures)


@pytest.mark.parametrize("objective", [step, step_with_load])
@pytest.mark.parametrize("dispatch", SEPARABLE)
def test_experts_are_streamed(dispatch, objective):
    pair = Pair(lambda: Sparse(dispatch), step=objective, chunk_size=3)
    for length in (13, 4, 3):
        pair.check(*batches.with_labels(3, length), explain=length == 13)


@pytest.mark.parametrize("dispatch", [sorted_groups, gathered_weights])
def test_one_row_per_batch(dispatch):
    """A batch of one: the tokens' dim is the sequence itself."""
    pair = Pair(lambda: Sparse(dispatch), step=step, chunk_size=3)
    pair.check(*batches.with_labels(1, 13), explain=True)


def test_layers_share_their_region():
    model = Sparse(sorted_groups, layers=6)
    seqsplit.compile(model, chunk_size=4)
    report = seqsplit.explain(model, batches.tokens(2, 13))
    assert_streamed(report)
    assert report.distinct_bodies <= 3


def test_experts_that_drop_tokens_stay_whole_and_are_named():
    pair = Pair(lambda: Sparse(with_capacity), step=step, chunk_size=3, streamed=False)
    pair.check(*batches.with_labels(3, 13))
    report = seqsplit.explain(pair.run_mine, *batches.with_labels(3, 13))
    assert any("experts" in scope for scope, _ in report.whole), report


class Centred(nn.Module):
    """Not token-wise, though it fails in one op only."""

    def forward(self, x):
        return x.flip(1) - x.mean(1, keepdim=True)


class WithCentred(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.centred = probe.build(), Centred()

    def forward(self, ids):
        return self.inner.head(self.centred(self.inner.hidden(ids)))


def test_modules_that_mix_positions_are_not_gathered():
    pair = Pair(WithCentred, step=step, chunk_size=3, streamed=False)
    pair.check(*batches.with_labels(3, 13))
