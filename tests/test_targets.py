"""Kinds of functions, of their arguments and of their results."""

import functools
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import seqsplit
from compare import Pair, every_output, gradient_differences, relative_error
from zoo import batches, probe

CHUNK = 4


def ids_of(batch=3, length=13):
    return batches.tokens(batch, length)


def grads(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in named(model)}


def named(model):
    return list(model.named_parameters())


def probe_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def graphs_captured():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# ---- Functions, their arguments and their results -----------------------------------------------


class Steps:
    def __init__(self, model):
        self.model = model

    def method(self, ids):
        return probe.step(self.model, ids, ids)

    def __call__(self, ids):
        return self.method(ids)


FUNCTIONS = {
    "lambda": lambda model: lambda ids: probe.step(model, ids, ids),
    "partial": lambda model: functools.partial(probe.step, model),
    "bound method": lambda model: Steps(model).method,
    "callable object": Steps,
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_kinds_of_functions(kind):
    model = probe.build().double()
    function = FUNCTIONS[kind](model)
    inputs = (ids_of(), ids_of()) if kind == "partial" else (ids_of(),)
    function(*inputs).backward()
    expected = grads(model)
    model.zero_grad()
    compiled = seqsplit.compile(function, chunk_size=CHUNK, strict=True)
    assert callable(compiled)
    compiled(*inputs).backward()
    assert not gradient_differences(expected, grads(model))


def test_the_original_function_stays_as_it_is():
    model = probe.build()

    def step(ids):
        return probe.step(model, ids, ids)

    compiled = seqsplit.compile(step, chunk_size=CHUNK)
    before = graphs_captured()
    step(ids_of()).backward()
    assert graphs_captured() == before
    assert compiled is not step


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "batch"


Couple = namedtuple("Couple", "x y")


@pytest.mark.parametrize("kind", ["dict", "dataclass", "namedtuple", "list", "keywords"])
def test_arguments_in_containers(kind):
    def step(model, batch=None, *, x=None, y=None):
        if kind == "dict":
            x, y = batch["x"], batch["deep"]["y"]
        elif kind in ("dataclass", "namedtuple"):
            x, y = batch.x, batch.y
        elif kind == "list":
            x, (y,) = batch
        return probe.step(model, x, y)

    ids, labels = batches.with_labels(3, 13)
    batch = {
        "dict": {"x": ids, "deep": {"y": labels}, "name": "batch"},
        "dataclass": Batch(ids, labels),
        "namedtuple": Couple(ids, labels),
        "list": [ids, [labels]],
        "keywords": None,
    }[kind]
    model = probe.build().double()
    kwargs = {"x": ids, "y": labels} if kind == "keywords" else {}
    compiled = seqsplit.compile(functools.partial(step, model), chunk_size=CHUNK, strict=True)
    step(model, batch, **kwargs).backward()
    expected = grads(model)
    model.zero_grad()
    compiled(batch, **kwargs).backward()
    assert not gradient_differences(expected, grads(model))


def test_results_in_containers():
    def step(model, ids):
        logits = model(ids)
        loss = probe_loss(logits, ids)
        return {
            "loss": loss,
            "parts": [loss * 2, (logits.detach().amax(), ids.shape[1])],
            "nothing": None,
            "name": "result",
            "labels": ids,
        }

    pair = Pair(probe.build, step=step, chunk_size=CHUNK, streamed=False)
    pair.check(ids_of(), objective=lambda out: out["loss"] + out["parts"][0])
    out = pair.run_mine(ids_of())
    assert out["nothing"] is None and out["name"] == "result" and out["parts"][1][1] == 13


@pytest.mark.parametrize("extra", [2, 0.5, True, None, "mean"])
def test_arguments_that_are_no_tensors(extra):
    def step(model, ids, extra):
        loss = probe_loss(model(ids), ids)
        return loss * extra if isinstance(extra, (int, float)) else loss + (extra is None)

    pair = Pair(probe.build, step=step, chunk_size=CHUNK)
    pair.check(ids_of(), extra)


def test_a_number_that_changes_from_call_to_call():
    def step(model, ids, weight, cap):
        logits = model(ids)
        return weight * probe_loss(cap * torch.tanh(logits / cap), ids)

    pair = Pair(probe.build, step=step, chunk_size=CHUNK)
    for index in range(12):
        pair.check(ids_of(), 0.5 + 0.1 * index, 3.0 + index)


def test_several_outputs_that_keep_their_sequence():
    def step(model, ids):
        hidden = model.hidden(ids)
        return hidden, model.head(hidden).log_softmax(-1)[:, ::1], hidden.norm(dim=-1)

    for chunk_size in (1, CHUNK, 20):
        pair = Pair(probe.build, step=step, chunk_size=chunk_size, streamed=False)
        pair.check(ids_of(), objective=every_output)


def test_a_function_without_a_model():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    generator = torch.Generator().manual_seed(0)
    make = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    inputs = [torch.randn(2, 3, 13, 6, **make) for _ in range(3)]
    expected = torch.autograd.grad(attend(*inputs), inputs)
    loss = seqsplit.compile(attend, chunk_size=CHUNK)(*inputs)
    for a, b in zip(expected, torch.autograd.grad(loss, inputs), strict=True):
        assert relative_error(a, b) <= 1e-9
