"""The invariants hold after every pass, and each check finds what it is there for."""

import contextlib
import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import seqsplit
from graphs import trace
from seqsplit.ir.placement import Sum
from seqsplit.ops import caches
from seqsplit.passes import pipeline, segments, watching
from seqsplit.passes.checks import plan as check
from seqsplit.passes.split.demand import Compute
from seqsplit.runtime.segment_run import chunk_bounds
from test_regions import Sparse, sorted_groups
from test_stencils import Hybrid
from zoo import HANDWRITTEN, batches, hf


@contextlib.contextmanager
def checked(monkeypatch):
    """Check after each pass. Gives the names of what ran."""
    ran = []

    def after_pass(name, graph, context):
        ran.append(name)
        check.check_graph(graph)

    def after(name, verify, place=segments):
        original = getattr(place, name)

        def run(*args, **kwargs):
            result = original(*args, **kwargs)
            ran.append(name)
            verify(result, *args)
            return result

        monkeypatch.setattr(place, name, run)

    after("demand", lambda demands, facts, *_: check.check_demands(facts, demands))
    after("split", lambda found, *_: check.check_body(found.body, len(found.sizes)))
    after("check_plan", lambda *_: None, place=pipeline)
    with watching(after_pass):
        yield ran


def step_of(entry, model):
    return lambda *args: entry.step(model, *args)


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_after_each_pass_of_handwritten_decoders(name, monkeypatch):
    entry = HANDWRITTEN[name]
    step = seqsplit.compile(step_of(entry, entry.build()), chunk_size=4, strict=True)
    with checked(monkeypatch) as ran:
        seqsplit.explain(step, *batches.with_labels(3, 13))
    passes = [step.name for step in pipeline.PASSES]
    assert [name for name in ran if name in passes] == passes
    assert {"demand", "split", "check_plan"} <= set(ran)


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_after_each_pass_of_library_decoders(family, monkeypatch):
    model = seqsplit.compile(hf.build(family, "eager"), chunk_size=4, strict=True)
    ids, keep, labels = batches.padded("right")
    with checked(monkeypatch) as ran:
        seqsplit.explain(model, input_ids=ids, attention_mask=keep, labels=labels)
    assert "check_plan" in ran


@pytest.mark.parametrize("build", [Hybrid, lambda: Sparse(sorted_groups)])
def test_after_each_pass_of_other_mixers(build, monkeypatch):
    model = seqsplit.compile(build(), chunk_size=4, strict=True)
    with checked(monkeypatch) as ran:
        seqsplit.explain(model, batches.tokens(3, 13))
    assert "check_plan" in ran


# ---- Each check finds its fault -----------------------------------------------------------------


def small_graph():
    return trace(lambda x, w: (x @ w).relu() + x, torch.randn(7, 5), torch.randn(5, 5))


def node_of(lowered, name):
    return next(n for n in lowered.graph.nodes if str(n.target).startswith(f"aten.{name}"))


def test_a_wrong_shape_is_found():
    lowered = small_graph()
    check.check_graph(lowered)
    node = node_of(lowered, "relu")
    with node.meta["val"].fake_mode:
        node.meta["val"] = node.meta["val"].new_empty(3, 5)
    with pytest.raises(AssertionError, match="recorded as"):
        check.check_graph(lowered)


def test_a_wrong_dtype_is_found():
    lowered = small_graph()
    node = node_of(lowered, "relu")
    node.meta["val"] = node.meta["val"].to(torch.float64)
    with pytest.raises(AssertionError, match="recorded as"):
        check.check_graph(lowered)


def test_a_mutation_is_found():
    lowered = small_graph()
    node_of(lowered, "relu").target = torch.ops.aten.relu_.default
    with pytest.raises(AssertionError, match="changes its operand"):
        check.check_graph(lowered)


class Recorded:
    """The results of one pass over a decoder, for spoiling."""

    def __init__(self, monkeypatch, name):
        self.results, original = [], getattr(segments, name)

        def run(*args, **kwargs):
            self.results.append((original(*args, **kwargs), args))
            return self.results[-1][0]

        with monkeypatch.context() as patch:
            patch.setattr(segments, name, run)
            entry = HANDWRITTEN["nano-manual"]
            step = seqsplit.compile(step_of(entry, entry.build()), chunk_size=4)
            seqsplit.explain(step, *batches.with_labels(3, 13))


def test_placements_that_are_no_row_are_found(monkeypatch):
    spoiled = 0
    for demands, (facts, *_) in Recorded(monkeypatch, "demand").results:
        check.check_demands(facts, demands)
        for recipes in demands.recipes.values():
            for placement, recipe in list(recipes.items()):
                if not isinstance(recipe, Compute) or not placement.has_rows or not recipe.operands:
                    continue
                (operand, wanted), *others = recipe.operands
                if not wanted.has_rows:
                    continue
                demands.recipes[operand][Sum] = None
                recipes[placement] = Compute(((operand, Sum), *others))
                with pytest.raises(AssertionError, match="takes"):
                    check.check_demands(facts, demands)
                recipes[placement] = recipe
                del demands.recipes[operand][Sum]
                spoiled += 1
    assert spoiled > 10


def test_a_read_beyond_the_chunk_is_found(monkeypatch):
    found = [result for result, _ in Recorded(monkeypatch, "split").results]
    split = next(s for s in found if s.body.caches)
    body = copy.copy(split.body)
    reads = (caches.cached_read, caches.cached_parts)
    node = next(n for n in body.module.graph.nodes if n.target in reads)
    length = [n for n in body.module.graph.nodes if n.op == "placeholder"][2]
    node.args = (*node.args[:4], length)
    with pytest.raises(AssertionError, match="beyond its chunk"):
        check.check_body(body, len(split.sizes))


def test_a_mutation_in_a_body_is_found(monkeypatch):
    split = Recorded(monkeypatch, "split").results[0][0]
    graph = split.body.module.graph
    target = torch.ops.aten.add.Tensor
    node = next(n for n in graph.nodes if n.target is target)
    node.target = torch.ops.aten.add_.Tensor
    with pytest.raises(AssertionError, match="changes its input"):
        check.check_body(split.body, len(split.sizes))


def test_an_undeclared_input_is_found(monkeypatch):
    split = Recorded(monkeypatch, "split").results[0][0]
    with pytest.raises(AssertionError, match="a body takes"):
        check.check_body(split.body, len(split.sizes) + 1)


@given(length=st.integers(0, 50), rows=st.integers(1, 60))
def test_chunks_cover_the_sequence_once(length, rows):
    bounds = chunk_bounds(length, rows)
    assert bounds[0] == 0 and bounds[-1] == length
    assert all(0 < b - a <= rows for a, b in zip(bounds, bounds[1:], strict=False)) or length == 0


def test_every_parameter_gets_one_gradient_however_often_it_is_used():
    """A module that is called twice in one segment: its weight has one accumulator."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = HANDWRITTEN["nano-fused"].build()
            self.more = nn.Linear(20, 20)

        def forward(self, ids):
            x = self.inner.wte(ids)
            for block in self.inner.h:
                x = block(x, None)
                x = self.more(self.more(x))
            return x.square().mean()

    model = seqsplit.compile(Twice(), chunk_size=4, strict=True)
    events = []
    model.more.weight.register_post_accumulate_grad_hook(lambda p: events.append(p))
    model(batches.tokens(2, 13)).backward()
    assert len(events) == 1
