"""Functions that expose their state: one node, called on chunks with the state carried."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables import PolyfilledFunctionVariable
from torch.utils.checkpoint import checkpoint

import recurrences
import seqsplit
from compare import Pair, every_output
from seqsplit.passes.stateful import stand_in
from zoo import batches, probe
from zoo.weights import randomise

CHUNKS = (1, 4, 5, 20)


def check(function, chunk_size=4, lengths=(13, 8, 37), **options):
    model = {k: options.pop(k) for k in ("layers", "own_state") if k in options}
    pair = Pair(
        lambda: recurrences.build(function, **model),
        step=probe.step,
        chunk_size=chunk_size,
        **options,
    )
    for length in lengths:
        pair.check(*batches.with_labels(3, length), explain=pair.streamed)
    return pair


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_blocks_in_a_loop(chunk_size):
    check(recurrences.gated_delta_rule, chunk_size)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_loop_over_positions_under_other_names(chunk_size):
    check(recurrences.step_by_step, chunk_size)


@pytest.mark.parametrize("chunk_size", (4, 5))
def test_opaque(chunk_size):
    """Neither the decorator nor the function inside breaks the graph (strict=True)."""
    pair = check(recurrences.kernel, chunk_size)
    recurrences.CALLS.clear()
    pair.run_mine(*batches.with_labels(3, 13)).backward()
    assert set(recurrences.CALLS) == {chunk_size, 13 % chunk_size}


@pytest.mark.parametrize("chunk_size", (4, 5))
def test_the_model_gives_the_first_state(chunk_size):
    check(recurrences.gated_delta_rule, chunk_size, own_state=True)


@pytest.mark.parametrize("function", recurrences.LIARS, ids=lambda f: f.__name__)
def test_what_is_not_so_is_not_believed(function, monkeypatch):
    """Without the node, the code is traced through, as it would be under other names."""
    asked = spy(monkeypatch)
    check(function, 4, lengths=(13,), streamed=False, layers=1)
    assert asked == {function.__name__: False}


def test_what_is_so_is_believed(monkeypatch):
    asked = spy(monkeypatch)
    check(recurrences.gated_delta_rule, 4, lengths=(13,))
    assert asked == {"gated_delta_rule": True}


def spy(monkeypatch):
    """Which functions were asked for while they were traced, and whether they were proved."""
    asked, proves = {}, stand_in.recurrence_of_call

    def noted(function, *call):
        found = proves(function, *call)
        asked[function.__name__] = found is not None
        return found

    monkeypatch.setattr(stand_in, "recurrence_of_call", noted)
    return asked


# -- how it is called ------------------------------------------------------------------------------


def documented(name):
    """A function of the documentation's example."""
    text = (Path(__file__).parent.parent / "docs" / "op-rules.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if name in block)
    names = {}
    exec(code, names)
    return names[name]


class Decaying(nn.Module):
    """Weights that all positions use alike."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.embed, self.head = nn.Embedding(batches.VOCAB, 20), nn.Linear(20, batches.VOCAB)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.decay = nn.Parameter(torch.zeros(20))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.function(layer(x), self.decay.sigmoid())[0].tanh()
        return self.head(x)


@pytest.mark.parametrize("chunk_size", (1, 4, 5))
def test_registered_under_other_names(chunk_size, monkeypatch):
    function = documented("decayed_sum")
    asked = spy(monkeypatch)
    pair = Pair(lambda: randomise(Decaying(function)), step=probe.step, chunk_size=chunk_size)
    for length in (13, 8):
        pair.check(*batches.with_labels(3, length), explain=True)
    assert asked == {"decayed_sum": True}


class FixesLength(recurrences.Decoder):
    """Looks at the length in Python."""

    def __init__(self, function):
        super().__init__(function)
        self.register_buffer("places", torch.randn(13, 20))

    def forward(self, ids):
        x = self.embed(ids)
        if x.shape[1] == len(self.places):
            x = x + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("function", (recurrences.gated_delta_rule, recurrences.kernel))
def test_the_model_fixes_the_length(function):
    pair = Pair(lambda: randomise(FixesLength(function)), step=probe.step, chunk_size=4)
    pair.check(*batches.with_labels(3, 13), explain=True)


def test_what_is_planned_is_what_runs():
    """The planner has no values to try a function on."""
    model = recurrences.build(recurrences.gated_delta_rule, width=64, sizes=(4, 16, 16))

    def step(model, ids):
        return probe.step(model, ids, ids)

    options = {"chunk_size": 32, "head_chunk_size": 32}
    plan = seqsplit.plan(
        copy.deepcopy(model),
        seq_len=512,
        dtype=torch.float32,
        step=step,
        schedules={"checkpoints": seqsplit.Schedule()},
        **options,
    )
    compiled, ids = seqsplit.compile(model, **options), batches.tokens(1, 512)
    step(compiled, ids).backward()
    compiled.zero_grad()
    with seqsplit.track_memory() as memory:
        step(compiled, ids).backward()
    assert plan.choices[0].parts.total == pytest.approx(memory.peak_bytes, rel=0.05)


def test_registering_what_has_no_such_parameter():
    with pytest.raises(seqsplit.SeqsplitError, match="no parameter h0"):
        seqsplit.recurrent(recurrences.gated_delta_rule, initial_state="h0")


def test_functions_are_only_stood_in_for_during_a_capture():
    function = recurrences.gated_delta_rule
    handlers = PolyfilledFunctionVariable._get_polyfill_handlers()
    before = dict(handlers)
    with stand_in.standing_in([function]), stand_in.standing_in([function]):
        assert function in handlers
    with pytest.raises(ZeroDivisionError), stand_in.standing_in([function]):
        raise ZeroDivisionError
    assert handlers == before
    assert function not in get_torch_obj_rule_map()


def test_other_compilers_do_not_see_stand_ins(monkeypatch):
    """A part of the model may be compiled by another one meanwhile."""
    asked = spy(monkeypatch)
    model = recurrences.build(recurrences.gated_delta_rule, layers=1).double()
    batch = batches.with_labels(3, 13)
    with stand_in.standing_in([recurrences.gated_delta_rule]):
        compiled = torch.compile(copy.deepcopy(model), backend="eager", dynamic=True)
        loss = probe.step(compiled, *batch)
    torch.testing.assert_close(loss, probe.step(model, *batch))
    assert not asked


@pytest.mark.parametrize("options", ({"keep_keys": True}, {"forwards": 3}, {"offload": "cpu"}))
def test_schedules(options):
    schedule = seqsplit.Schedule(**options)
    check(recurrences.gated_delta_rule, 4, lengths=(13,), layers=3, schedule=schedule)


class Wrapped(nn.Module):
    """A decoder with something around each of its layers."""

    def __init__(self, call, **options):
        super().__init__()
        self.inner, self.call = recurrences.Decoder(recurrences.gated_delta_rule, **options), call

    def forward(self, ids):
        x = self.inner.embed(ids)
        for layer in self.inner.layers:
            x = self.call(layer, x)
        return self.inner.head(self.inner.norm(x))


def checkpointed(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def without_gradients(layer, x):
    with torch.no_grad():
        y = layer(x)
    return x + y


@pytest.mark.parametrize("call", (checkpointed, without_gradients))
def test_inside_of(call):
    pair = Pair(lambda: randomise(Wrapped(call)), step=probe.step, chunk_size=4)
    for length in (13, 8):
        pair.check(*batches.with_labels(3, length), explain=True)


@pytest.mark.parametrize("frozen", ("embed|layers.0", "gates|qkv", "layers", "^((?!state).)*$"))
def test_frozen_parts(frozen):
    def build():
        model = recurrences.build(recurrences.gated_delta_rule, own_state=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not re.search(frozen, name))
        return model

    Pair(build, step=probe.step, chunk_size=4).check(*batches.with_labels(3, 13))


def with_extras(q, k, v, g, beta, initial_state=None, output_final_state=False, **kwargs):
    if kwargs.get("documents") is not None:
        g = g.masked_fill(kwargs["documents"][..., None] == 0, -5.0)
    return recurrences.gated_delta_rule(q, k, v, g, beta, initial_state, output_final_state)


@pytest.mark.parametrize("name", ("positions", "documents"))
def test_arguments_of_unknown_meaning(name, monkeypatch):
    """They do not matter if nothing looks at them; else the function is none of the kind."""
    asked = spy(monkeypatch)

    def call(*args):
        places = torch.arange(args[0].shape[1])[None] % 5
        return with_extras(*args, **{name: places, "tables": (args[0], places)})

    check(call, 4, lengths=(13,), layers=1, streamed=name == "positions")
    assert asked == {"with_extras": name == "positions"}


def test_a_weight_that_it_closes_over(monkeypatch):
    weight = nn.Parameter(torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64))

    def closing(q, k, v, g, beta, initial_state=None, output_final_state=False):
        return recurrences.gated_delta_rule(
            q, k, v, g - weight**2, beta, initial_state, output_final_state
        )

    asked = spy(monkeypatch)
    model = recurrences.build(closing, layers=1).double()
    grads = []
    for run in (model, seqsplit.compile(copy.deepcopy(model), chunk_size=4)):
        weight.grad = None
        probe.step(run, *batches.with_labels(3, 13)).backward()
        grads.append(weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-9, atol=0)
    assert asked == {"closing": False}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_other_dtypes(dtype, monkeypatch):
    """Tried in float64, since it takes it."""
    asked = spy(monkeypatch)
    model = recurrences.build(recurrences.step_by_step).to(dtype)
    mine = seqsplit.compile(copy.deepcopy(model), chunk_size=4, strict=True)
    for run in (model, mine):
        probe.step(run, *batches.with_labels(3, 13)).backward()
    for (name, want), have in zip(model.named_parameters(), mine.parameters()):
        bound = 1e-4 if dtype == torch.float32 else 0.1
        assert (have.grad - want.grad).norm() <= bound * want.grad.norm(), name
    assert asked == {"step_by_step": True}


def rounding(q, k, v, g, beta, initial_state=None, output_final_state=False):
    """Computes in float32 whatever it is given."""
    args = [x.float() for x in (q, k, v, g, beta)]
    out, state = recurrences.gated_delta_rule(*args, initial_state, output_final_state)
    return out.to(q.dtype), state


def test_what_computes_in_float32(monkeypatch):
    """Tried in its own dtypes; the body around it is still compared in float64."""
    asked = spy(monkeypatch)
    model = recurrences.build(rounding)
    mine = seqsplit.compile(copy.deepcopy(model), chunk_size=4, strict=True)
    for run in (model, mine):
        probe.step(run, *batches.with_labels(3, 13)).backward()
    for (name, want), have in zip(model.named_parameters(), mine.parameters()):
        assert (have.grad - want.grad).norm() <= 1e-4 * want.grad.norm(), name
    assert asked == {"rounding": True}
    report = seqsplit.explain(mine, batches.tokens(3, 13))
    assert not report.whole


def rounding_with_rates(q, k, v, g, beta, rate, initial_state=None, output_final_state=False):
    """The same, with something that is no sequence among its operands."""
    return rounding(q, k, v, g.float() * rate.float(), beta, initial_state, output_final_state)


class WithRates(recurrences.Decoder):
    def __init__(self):
        super().__init__(rounding_with_rates)
        self.rate = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            y, _ = rounding_with_rates(*layer.arguments(x), self.rate, output_final_state=False)
            x = x + layer.out(y.flatten(2))
            x = x + layer.mlp(x)
        return self.head(self.norm(x))


def test_gradients_of_what_is_given_whole_are_rounded_chunk_by_chunk():
    """Each chunk casts it anew, so its shares are added in float64 where a body is tried."""
    torch.manual_seed(0)
    model = WithRates()
    mine = seqsplit.compile(copy.deepcopy(model), chunk_size=4, strict=True)
    for run in (model, mine):
        probe.step(run, *batches.with_labels(3, 130)).backward()
    for (name, want), have in zip(model.named_parameters(), mine.parameters()):
        assert (have.grad - want.grad).norm() <= 1e-4 * want.grad.norm(), name
    report = seqsplit.explain(mine, batches.tokens(3, 130))
    assert not report.whole and not report.unchecked


# -- the state after the last position -------------------------------------------------------------


class UsesStates(recurrences.Decoder):
    """Gives the last state of its layers, or lets the next layer begin with it."""

    def __init__(self, function, how):
        super().__init__(function, layers=3, sizes=(3, 4, 5))
        self.function, self.how = function, how

    def forward(self, ids):
        x, states = self.embed(ids), []
        for layer in self.layers:
            begins = {"initial_state": states[-1]} if self.how == "next layer" and states else {}
            args = layer.arguments(x)
            out, state = self.function(*args, output_final_state=True, **begins)
            states.append(state)
            if self.how != "alone":
                x = x + layer.out(out.flatten(2))
            x = x + layer.mlp(x)
        logits = self.head(self.norm(x))
        return (logits, states[-1]) if self.how == "last" else (logits, *states)


@pytest.mark.parametrize("function", (recurrences.gated_delta_rule, recurrences.kernel))
@pytest.mark.parametrize("how", ("each", "last", "alone", "next layer"))
def test_the_model_uses_the_last_state(how, function, monkeypatch):
    """It is a sum over chunks, to which only the last one adds."""
    pair = Pair(lambda: randomise(UsesStates(function, how)), chunk_size=4)
    for length in (13, 8):
        pair.check(batches.tokens(3, length), objective=every_output, explain=True)
    recurrences.CALLS.clear()
    every_output(pair.run_mine(batches.tokens(3, 13))).backward()
    if how != "next layer":  # there it is an op on sums, which the outer graph runs
        assert 13 not in recurrences.CALLS


def test_only_the_last_state_has_a_gradient():
    pair = Pair(lambda: randomise(UsesStates(recurrences.gated_delta_rule, "last")), chunk_size=4)
    pair.check(batches.tokens(3, 13), objective=lambda outputs: outputs[1].square().sum())


def test_the_last_state_has_no_gradient():
    pair = Pair(lambda: randomise(UsesStates(recurrences.gated_delta_rule, "each")), chunk_size=4)
    pair.check(batches.tokens(3, 13), objective=lambda outputs: outputs[0].square().sum())
