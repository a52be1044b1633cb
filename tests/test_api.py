"""The public functions: options and their errors, compiling in place, disable, verify."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import seqsplit
from compare import Pair, gradient_differences
from seqsplit import errors
from zoo import batches, hf, nano, probe
from zoo.weights import randomise

CHUNK = 4


def ids_of(batch=3, length=13):
    return batches.tokens(batch, length)


def grads(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in named(model)}


def named(model):
    return list(model.named_parameters())


def graphs_captured():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# ---- Options ------------------------------------------------------------------------------------


def test_the_signature_of_compile():
    parameters = inspect.signature(seqsplit.compile).parameters
    target, *options = parameters.values()
    assert target.name == "target"
    assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in options)
    assert {option.name: option.default for option in options} == {
        "chunk_size": "auto",
        "head_chunk_size": "auto",
        "segment_layers": "auto",
        "schedule": None,
        "inner": None,
        "accumulate_dtype": torch.float32,
        "seq_dim": None,
        "strict": False,
        "validate": True,
    }


BAD_OPTIONS = [
    ("schedule", "fast"),
    ("inner", "a compiler"),
    *[(name, value) for name in ("chunk_size", "head_chunk_size") for value in (0, -1, -8)],
    *[(name, value) for name in ("chunk_size", "head_chunk_size") for value in (2.5, "big", None)],
    ("chunk_size", True),
    ("chunk_size", [4]),
    ("segment_layers", 0),
    ("segment_layers", -2),
    ("segment_layers", "all of them"),
    ("accumulate_dtype", torch.int32),
    ("accumulate_dtype", torch.bool),
    ("accumulate_dtype", "float32"),
    ("accumulate_dtype", None),
    ("seq_dim", "time"),
    ("seq_dim", 1.0),
]


@pytest.mark.parametrize("name, value", BAD_OPTIONS)
def test_meaningless_options_are_refused_by_name(name, value):
    model = probe.build()
    with pytest.raises(errors.InvalidOptionError, match=name) as caught:
        seqsplit.compile(model, **{name: value})
    assert str(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert model._compiled_call_impl is None


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="chunk"):
        seqsplit.compile(probe.build(), chunks=4)


@pytest.mark.parametrize("target", [None, 3, "model", torch.ones(3), [probe.causal]])
def test_targets_that_cannot_be_called_are_refused(target):
    with pytest.raises(errors.SeqsplitError):
        seqsplit.compile(target)


@pytest.mark.parametrize("seq_dim", [2, 7, -3])
def test_a_seq_dim_that_no_input_has(seq_dim):
    model = seqsplit.compile(probe.build(), chunk_size=CHUNK, seq_dim=seq_dim)
    with pytest.raises(errors.InvalidOptionError, match="seq_dim"):
        model(ids_of())


@pytest.mark.parametrize("seq_dim", [None, 1])
def test_a_right_seq_dim_changes_nothing(seq_dim):
    Pair(probe.build, chunk_size=CHUNK, seq_dim=seq_dim).check(ids_of())


def test_every_error_is_a_seqsplit_error():
    names = [
        "SequenceNotFoundError",
        "InvalidOptionError",
        "CaptureError",
        "NoRuleError",
        "NotStreamedError",
        "DoubleBackwardError",
    ]
    for name in names:
        assert issubclass(getattr(errors, name), errors.SeqsplitError)


# ---- Targets that do not fit --------------------------------------------------------------------


class Perceptron(nn.Module):
    """Rows of features: no dimension is a sequence."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 29), nn.ReLU(), nn.Linear(29, 1))

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.mark.parametrize("strict", [False, True])
def test_no_sequence_found(strict):
    model = seqsplit.compile(Perceptron(), chunk_size=CHUNK, strict=strict)
    with pytest.raises(errors.SequenceNotFoundError, match="seq_dim"):
        model(torch.randn(6, 20))


def test_inputs_without_any_tensor():
    model = seqsplit.compile(nn.Linear(3, 3), chunk_size=CHUNK)

    def step(scale):
        return (model.weight * scale).sum()

    with pytest.raises(errors.SequenceNotFoundError):
        seqsplit.compile(step, chunk_size=CHUNK)(2.0)


class Breaking(nn.Module):
    """Its path depends on a value that only running it can tell."""

    def __init__(self):
        super().__init__()
        self.inner = probe.build()

    def forward(self, ids):
        hidden = self.inner.hidden(ids)
        if hidden.sum().item() > 0:
            hidden = hidden * 2
        return self.inner.head(hidden)


def test_a_target_that_is_no_single_graph_is_refused_when_strict():
    model = seqsplit.compile(Breaking(), chunk_size=CHUNK, strict=True)
    with pytest.raises(errors.SeqsplitError) as caught:
        model(ids_of())
    assert isinstance(caught.value, (errors.CaptureError, errors.NotStreamedError))


def test_a_target_that_is_no_single_graph_is_exact_or_refused():
    pair = Pair(Breaking, chunk_size=CHUNK, streamed=False)
    try:
        pair.check(ids_of())
    except errors.CaptureError as error:
        assert str(error)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = probe.build()

    def forward(self, ids):
        hidden = torch.fft.fft(self.inner.hidden(ids), dim=1, norm="ortho").real
        return self.inner.head(hidden)


def test_strict_refuses_what_stays_whole_and_says_what_and_why():
    model = seqsplit.compile(Spectral(), chunk_size=CHUNK, strict=True)
    with pytest.raises(errors.NotStreamedError, match="fft"):
        model(ids_of())


def test_without_strict_the_same_model_is_exact():
    Pair(Spectral, chunk_size=CHUNK, streamed=False).check(ids_of())


def test_strict_is_silent_where_all_is_streamed():
    Pair(probe.build, chunk_size=CHUNK, strict=True).check(ids_of(), explain=True)


@pytest.mark.parametrize("validate", [True, False])
def test_validation_changes_no_value(validate):
    Pair(probe.build, chunk_size=CHUNK, validate=validate).check(ids_of())


# ---- In place -----------------------------------------------------------------------------------


def test_a_module_is_compiled_in_place():
    model = nano.build()
    kind, keys = type(model), list(model.state_dict())
    parameters = [id(p) for p in model.parameters()]
    modules = [name for name, _ in model.named_modules()]
    text = repr(model)
    assert seqsplit.compile(model, chunk_size=CHUNK) is model
    model(ids_of(), ids_of())[1].backward()
    assert type(model) is kind and isinstance(model, nano.Nano)
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == parameters
    assert [name for name, _ in model.named_modules()] == modules
    assert repr(model) == text


def trained(model):
    model.zero_grad()
    model(ids_of(), ids_of())[1].backward()
    return grads(model)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(_saved(model), weights_only=False),
}


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_independent_and_train_alike(how, used):
    model = seqsplit.compile(nano.build().double(), chunk_size=CHUNK)
    if used:
        trained(model)
    twin = COPIES[how](model)
    twin.zero_grad()
    expected = trained(model)
    assert all(p.grad is None for p in twin.parameters())
    assert not gradient_differences(expected, trained(twin))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert gradient_differences(expected, trained(twin))
    assert not gradient_differences(expected, trained(model))


def test_weights_can_be_loaded_replaced_and_converted_afterwards():
    pair = Pair(nano.build, chunk_size=CHUNK)
    ids = ids_of()
    pair.check(ids, ids)
    other = randomise(nano.build(), seed=5).double().state_dict()
    for model in (pair.eager, pair.mine):
        model.load_state_dict(other)
    pair.check(ids, ids)
    for model in (pair.eager, pair.mine):
        model.ln_f.weight = nn.Parameter(model.ln_f.weight.detach() * 2)
    pair.check(ids, ids)
    for model in (pair.eager, pair.mine):
        model.h = model.h[:1]
    pair.check(ids, ids)
    pair.mine.float()
    loss = pair.mine(ids, ids)[1]
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in pair.mine.h.parameters())


def test_save_pretrained_and_from_pretrained(tmp_path):
    model = seqsplit.compile(hf.build("llama"), chunk_size=CHUNK)
    model(input_ids=ids_of(), labels=ids_of()).loss.backward()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    for (name, value), (other_name, other) in zip(
        model.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert name == other_name and torch.equal(value, other)


@pytest.mark.parametrize("training", [False, True])
def test_generate_is_the_original(training):
    eager = hf.build("llama", use_cache=True)
    mine = seqsplit.compile(copy.deepcopy(eager), chunk_size=CHUNK)
    for model in (eager, mine):
        model.train(training)
    prompt = ids_of(2, 5)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    before = graphs_captured()
    expected = eager.generate(prompt, **options)
    assert torch.equal(expected, mine.generate(prompt, **options))
    assert graphs_captured() == before
    mine(input_ids=prompt, labels=prompt).loss.backward()
    assert torch.equal(expected, mine.generate(prompt, **options))


def test_compiling_again_replaces_the_options():
    model = probe.build()
    seqsplit.compile(model, chunk_size=4)
    assert seqsplit.explain(model, ids_of()).num_chunks == 4
    seqsplit.compile(model, chunk_size=7)
    assert seqsplit.explain(model, ids_of()).num_chunks == 2


def test_a_part_of_a_model():
    """Only the layers are compiled; the embedding before and the head after run in eager."""

    class Body(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()
            self.body = Body(self.inner.layers)

        def forward(self, ids):
            x = self.body(self.inner.embed(ids))
            return probe_loss(self.inner.head(self.inner.norm(x)), ids)

    eager = Whole().double()
    mine = copy.deepcopy(eager)
    seqsplit.compile(mine.body, chunk_size=CHUNK, strict=True)
    for model in (eager, mine):
        model(ids_of()).backward()
    assert not gradient_differences(grads(eager), grads(mine))


def probe_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_nothing_is_printed(capfd):
    model = seqsplit.compile(nano.build(), chunk_size=CHUNK)
    model(ids_of(), ids_of())[1].backward()
    seqsplit.explain(model, ids_of(), ids_of())
    seqsplit.verify(model, ids_of(), ids_of())
    assert capfd.readouterr() == ("", "")


# ---- disable ------------------------------------------------------------------------------------


def test_disable_runs_everything_eager():
    pair = Pair(nano.build, chunk_size=CHUNK)
    ids = ids_of()
    before = graphs_captured()
    with seqsplit.disable():
        loss = pair.mine(ids, ids)[1]
        assert torch.equal(loss, pair.eager(ids, ids)[1])
        with seqsplit.disable():
            pass
        pair.mine(ids, ids)[1].backward()
    assert graphs_captured() == before
    loss.backward()
    pair.check(ids, ids)
    assert graphs_captured() > before


def test_disable_ends_with_an_error_too():
    pair = Pair(nano.build, chunk_size=CHUNK)
    with pytest.raises(KeyError), seqsplit.disable():
        raise KeyError
    before = graphs_captured()
    pair.check(ids_of(), ids_of())
    assert graphs_captured() > before


def test_disable_holds_for_functions():
    pair = Pair(probe.build, step=probe.step, chunk_size=CHUNK)
    before = graphs_captured()
    with seqsplit.disable():
        pair.check(ids_of(), ids_of())
    assert graphs_captured() == before


def test_the_backward_of_a_streamed_forward_works_while_disabled():
    pair = Pair(nano.build, chunk_size=CHUNK)
    expected = pair.check(ids_of(), ids_of()).gradients
    pair.mine.zero_grad()
    loss = pair.mine(ids_of(), ids_of())[1]
    with seqsplit.disable():
        loss.backward()
    assert not gradient_differences(expected, grads(pair.mine))


# ---- verify -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_verify_compares_with_eager(compiled):
    model = nano.build().double()
    if compiled:
        seqsplit.compile(model, chunk_size=CHUNK)
    report = seqsplit.verify(model, ids_of(), ids_of())
    assert report.ok
    assert 0 <= report.max_rel_error <= 1e-9
    table = str(report)
    for name, _ in named(model):
        assert name in table


def test_verify_of_a_function():
    model = probe.build().double()
    step = seqsplit.compile(lambda ids, labels: probe.step(model, ids, labels), chunk_size=CHUNK)
    report = seqsplit.verify(step, ids_of(), ids_of())
    assert report.ok and report.max_rel_error <= 1e-9


def test_verify_in_float32_allows_rounding_only():
    model = seqsplit.compile(nano.build(), chunk_size=CHUNK)
    report = seqsplit.verify(model, ids_of(), ids_of())
    assert report.ok and 0 < report.max_rel_error < 1e-3


def test_verify_leaves_no_trace():
    model = seqsplit.compile(nano.build(), chunk_size=CHUNK)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    weights = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    seqsplit.verify(model, ids_of(), ids_of())
    assert torch.equal(torch.get_rng_state(), before)
    assert all((p.grad == 3).all() for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.training


def test_verify_with_dropout_compares_what_can_be_compared():
    model = seqsplit.compile(nano.build(dropout=0.1).double(), chunk_size=CHUNK)
    seqsplit.verify(model, ids_of(), ids_of())
    assert model.training
