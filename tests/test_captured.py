"""What the passes have made of a captured graph equals it, or the model runs as it was captured.

Bodies are tried against the lowered graph, so a fault of the lowering itself would be in both.
"""

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import seqsplit
from compare import Pair
from seqsplit.errors import UnfinishedPlanWarning
from seqsplit.memory import track_memory
from seqsplit.passes import pipeline
from zoo import batches, probe

aten = torch.ops.aten
CHUNK = 4


class Adapted(nn.Module):
    """An adapter beside a frozen map, beginning with zeros, and a counter that forward moves."""

    def __init__(self):
        super().__init__()
        self.inner = probe.build().requires_grad_(False)
        self.down, self.up = nn.Linear(20, 3, bias=False), nn.Linear(3, 20, bias=False)
        nn.init.zeros_(self.up.weight)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        self.calls.add_(1.0)
        hidden = self.inner.hidden(ids)
        hidden = hidden + self.up(self.down(hidden).tanh())
        return self.inner.head(hidden) * 0.5


def lose_a_gradient(graph):
    """Of the adapter's first matrix, where the second is zero: it is zero in the first step."""
    tanh = _only(graph, aten.tanh.default)
    linear = tanh.args[0]
    with graph.inserting_before(linear):
        cut = graph.call_function(aten.detach.default, (linear.args[1],))
    cut.meta = dict(linear.args[1].meta, region=linear.meta["region"])
    linear.args = (linear.args[0], cut)


def change_a_value(graph):
    half = [node for node in graph.nodes if node.args[1:] == (0.5,)][-1]
    half.args = (half.args[0], 0.25)


def lose_a_write(graph):
    (output,) = (node for node in graph.nodes if node.op == "output")
    counted = _only(graph, aten.add.Tensor, lambda node: node.args[1] == 1.0)
    output.replace_input_with(counted, counted.args[0])


def let_through(graph):
    """A gradient, where the model's own code has stopped it."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["region"] = type(node.meta["region"])()


def _only(graph, target, such=lambda node: True):
    (found,) = (node for node in graph.nodes if node.target is target and such(node))
    return found


def plant(monkeypatch, fault):
    lower = pipeline.lower

    def lower_wrongly(captured, examples):
        lowered = lower(captured, examples)
        fault(lowered.graph)
        return lowered

    monkeypatch.setattr(pipeline, "lower", lower_wrongly)


class Stopped(Adapted):
    def forward(self, ids):
        with torch.no_grad():
            side = self.up(self.down(self.inner.hidden(ids)).tanh() + 1)
        return super().forward(ids) + self.inner.head(side)


FAULTS = [
    (Adapted, lose_a_gradient),
    (Adapted, change_a_value),
    (Adapted, lose_a_write),
    (Stopped, let_through),
]


@pytest.mark.parametrize("build, fault", FAULTS)
def test_a_fault_of_the_lowering_is_found(monkeypatch, build, fault):
    plant(monkeypatch, fault)
    with pytest.raises(BackendCompilerFailed, match="is not what was captured"):
        seqsplit.compile(build(), chunk_size=CHUNK, strict=True)(batches.tokens(2, 13))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnfinishedPlanWarning)
        pair = Pair(build, streamed=False, chunk_size=CHUNK)
        pair.check(batches.tokens(2, 13))
        report = seqsplit.explain(pair.mine, batches.tokens(2, 13))
    assert any("is not what was captured" in reason for _, reason in report.whole), report


@pytest.mark.parametrize("build", [Adapted, Stopped])
def test_without_a_fault_nothing_is_found(build):
    pair = Pair(build, chunk_size=CHUNK)
    pair.check(batches.tokens(2, 13))
    assert not seqsplit.explain(pair.mine, batches.tokens(2, 13)).unchecked


def test_nothing_is_left_behind(monkeypatch):
    """Random numbers go on as they were, buffers and weights are what they were."""
    model, ids = Adapted().double(), batches.tokens(2, 13)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = []
    real = pipeline.compare

    def watched(*args):
        torch.manual_seed(3)
        real(*args)
        states.append((torch.rand(()), torch.get_default_dtype(), torch.is_grad_enabled()))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert all(p.grad is None for p in model.parameters())

    monkeypatch.setattr(pipeline, "compare", watched)
    seqsplit.compile(model, chunk_size=CHUNK)(ids)
    torch.manual_seed(3)
    assert states == [(torch.rand(()), torch.float32, True)]


class Deep(nn.Module):
    """Nearly all of it is square weights."""

    def __init__(self, width=256, layers=24):
        super().__init__()
        self.inner, self.rise, self.fall = probe.build(), nn.Linear(20, width), nn.Linear(width, 20)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, ids):
        wide = self.rise(self.inner.hidden(ids))
        for block in self.blocks:
            wide = wide + block(wide).tanh()
        return self.inner.head(self.fall(wide))


def test_weights_are_not_held_twice(monkeypatch):
    """In float64 they would take twice their size again, and so would their gradients."""
    model, peaks = Deep(), []
    real = pipeline.compare

    def watched(*args):
        with track_memory() as memory:
            real(*args)
        peaks.append(memory.peak_bytes)

    monkeypatch.setattr(pipeline, "compare", watched)
    seqsplit.compile(model, chunk_size=CHUNK)(batches.tokens(1, 11))
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert peaks[0] < 0.8 * held, (peaks, held)
