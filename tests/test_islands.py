"""The ordinary ops inside of chunk bodies, compiled: the same gradients, few compilations."""

import copy
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

import seqsplit
from benchmarks import common
from benchmarks.batches import make_batch
from benchmarks.models import DecoderShape
from seqsplit import Schedule
from seqsplit.frontend.handle import handle_of

SHAPE = DecoderShape(d=64, layers=3, heads=4, kv_heads=2, ff=96, vocab=211)


def run(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(*batch)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


def assert_same(found, expected, tolerance):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(forwards=3, keep_attention=True)])
def test_compiled_islands_give_the_same_gradients(schedule):
    torch._dynamo.reset()
    counters.clear()
    model = common.make_model(SHAPE, torch.float64, "cpu")
    options = {"chunk_size": 8, "head_chunk_size": 8, "schedule": schedule}
    mine = seqsplit.compile(copy.deepcopy(model), inner="aot_eager", strict=True, **options)
    assert_same(run(mine, make_batch(SHAPE, 37, 2)), run(model, make_batch(SHAPE, 37, 2)), 1e-9)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 1, "nothing but the capture was compiled"
    # Other chunks, other prefixes, another length, the second and third layer: nothing anew.
    assert_same(run(mine, make_batch(SHAPE, 61, 2)), run(model, make_batch(SHAPE, 61, 2)), 1e-9)
    assert counters["stats"]["unique_graphs"] == compiled
    plan = handle_of(mine).log[0].plan
    islands = sum("island" in name for b in plan.bodies for name, _ in b.module.named_children())
    assert islands < compiled <= 4 * islands


def test_bodies_are_still_shared():
    model = common.make_model(SHAPE, torch.float64, "cpu")
    batch = make_batch(SHAPE, 20, 1)
    plain = seqsplit.explain(seqsplit.compile(copy.deepcopy(model), chunk_size=8), *batch)
    inner = seqsplit.compile(model, inner="aot_eager", chunk_size=8)
    report = seqsplit.explain(inner, *batch)
    assert len(report.segments) == len(plain.segments) > report.distinct_bodies
    assert report.distinct_bodies == plain.distinct_bodies


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="the compiler of the generated code is missing")
def test_inductor():
    torch._dynamo.reset()
    model = common.make_model(SHAPE, torch.float32, "cpu")
    mine = seqsplit.compile(copy.deepcopy(model), inner="inductor", chunk_size=16)
    batch = make_batch(SHAPE, 45, 2)
    assert_same(run(mine, batch), run(model, batch), 1e-5)
