"""Ops of the user's own: found by execution, or told by a rule of five lines."""

import pytest
import torch
from torch import nn

import seqsplit
from compare import Pair
from zoo import batches, probe

CHUNK = 4


@torch.library.custom_op("seqsplit_tests::gate", mutates_args=())
def gate(x: torch.Tensor, scale: torch.Tensor, groups: int) -> torch.Tensor:
    return (x.unflatten(-1, (groups, -1)) * scale.unsqueeze(-1)).flatten(-2) * torch.sigmoid(x)


def _gate_backward(ctx, grad):
    x, scale = ctx.saved_tensors
    with torch.enable_grad():
        x, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
        wide = scale.repeat_interleave(x.shape[-1] // ctx.groups, -1)
        value = x * wide * torch.sigmoid(x)
    return *torch.autograd.grad(value, (x, scale), grad), None


def _gate_context(ctx, inputs, output):
    x, scale, ctx.groups = inputs
    ctx.save_for_backward(x, scale)


gate.register_fake(lambda x, scale, groups: torch.empty_like(x))
gate.register_autograd(_gate_backward, setup_context=_gate_context)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = probe.build()
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, ids):
        x = self.inner.embed(ids)
        for layer in self.inner.layers:
            x = x + torch.ops.seqsplit_tests.gate(layer(x), self.scale, 5)
        return self.inner.head(x)


@pytest.fixture
def rules():
    """The registry as it was."""
    from seqsplit.passes.rules import registry

    before = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)


def check(streamed=True):
    pair = Pair(Gated, step=probe.step, chunk_size=CHUNK, streamed=streamed)
    for length in (13, 8):
        pair.check(*batches.with_labels(3, length))
    return pair


def test_found_by_execution():
    check()


def test_a_rule_of_ones_own(rules, monkeypatch):
    from seqsplit.passes.rules import probe as by_execution

    @seqsplit.rule(torch.ops.seqsplit_tests.gate.default)
    def gate_rows(x, scale):
        for dim in range(x.ndim - 1):
            yield seqsplit.Chunk(dim), seqsplit.Chunk(dim), seqsplit.Whole

    def never(*args, **kwargs):
        raise AssertionError("it has a rule")

    monkeypatch.setattr(by_execution, "_holds", never)
    check()


def test_a_wrong_rule_is_caught(rules):
    @seqsplit.rule(torch.ops.seqsplit_tests.gate.default)
    def gate_rows(x, scale):
        yield seqsplit.Chunk(1), seqsplit.Whole, seqsplit.Whole

    pair = check(streamed=False)
    report = seqsplit.explain(pair.run_mine, *batches.with_labels(3, 8))
    assert not report.fully_streamed
    assert any("gate" in reason or "does not equal" in reason for _, reason in report.whole)
