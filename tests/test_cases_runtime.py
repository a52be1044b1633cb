"""Calls that differ in kind: sizes, padding, caches, evaluation, deferred logits, several ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import seqsplit
from compare import Pair, every_output, gradient_differences, relative_error
from zoo import HANDWRITTEN, batches, hf, nano, probe

CHUNK = 4


def check(build, step=probe.step, lengths=(13, 8, 5), streamed=True):
    """Compare at several lengths; `step` defaults to the shifted loss of `model(ids)`."""
    pair = Pair(build, step=step, chunk_size=CHUNK, streamed=streamed)
    for length in lengths:
        pair.check(*batches.with_labels(3, length))


# ---- Calls in turn (case 14) --------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padded_and_unpadded_calls_in_turn(family):
    pair = Pair(hf.builder(family), chunk_size=CHUNK)
    ids, labels = batches.with_labels(3, 13)
    left, right = batches.padded("left"), batches.padded("right")
    for batch in (left, (ids, None, labels), right, (ids, None, labels), left):
        batch = dict(zip(("input_ids", "attention_mask", "labels"), batch, strict=True))
        pair.check(**{key: value for key, value in batch.items() if value is not None})


@pytest.mark.parametrize("name", ["nano-manual", "rope-fused", "sequence-first"])
def test_sizes_in_turn(name):
    entry = HANDWRITTEN[name]
    pair = Pair(entry.build, step=entry.step, chunk_size=CHUNK)
    for batch, length in ((3, 13), (2, 5), (3, 40), (7, 13), (2, 3), (1, 13), (3, 13)):
        pair.check(*batches.with_labels(batch, length))


def test_results_of_an_earlier_call_stay_as_they_are():
    """No buffer that a caller can see is used again by a later call or a backward."""
    pair = Pair(probe.build, chunk_size=CHUNK)
    first = pair.mine(batches.tokens(3, 13, seed=1))
    kept = first.detach().clone()
    second = pair.mine(batches.tokens(3, 13, seed=2))
    second.square().mean().backward()
    assert torch.equal(first.detach(), kept)
    first.square().mean().backward()
    assert torch.equal(first.detach(), kept)


def test_inputs_are_not_changed():
    pair = Pair(hf.builder("llama"), chunk_size=CHUNK)
    ids, keep, labels = batches.padded("left")
    copies = [tensor.clone() for tensor in (ids, keep, labels)]
    pair.mine(input_ids=ids, attention_mask=keep, labels=labels).loss.backward()
    assert all(map(torch.equal, (ids, keep, labels), copies))


def test_strided_and_expanded_inputs():
    pair = Pair(probe.build, step=probe.step, chunk_size=CHUNK)
    wide, tall = batches.tokens(3, 26), batches.tokens(13, 3)
    for ids in (wide[:, ::2], wide[:, 13:], tall.t(), wide[:1, :13].expand(3, -1)):
        pair.mine.zero_grad()
        loss = pair.run_mine(ids, ids)  # as it is: `check` would make a copy of its own layout
        loss.backward()
        mine = {name: p.grad for name, p in pair.mine.named_parameters()}
        expected = pair.check(ids, ids)
        assert relative_error(expected.goal, loss.detach()) <= 1e-12
        assert not gradient_differences(expected.gradients, mine)


def memory_of_steps(steps):
    """The largest allocation of each step (a function that returns a loss)."""
    found = []
    for step in steps:
        step().backward()
        with seqsplit.track_memory() as memory:
            step().backward()
        found.append(memory.largest_bytes)
    return found


def test_many_models_of_one_class_all_stay_streamed():
    """Captures are cached per code object, and the number kept there is limited."""
    vocab, length = 2000, 256
    ids, labels = batches.with_labels(1, length, vocab=vocab)

    def step(seed):
        model = nano.build(vocab=vocab, max_positions=length, layers=1)
        seqsplit.compile(model, chunk_size=8, head_chunk_size=8)
        return lambda: model(ids, labels.clamp(min=0))[1]

    found = memory_of_steps(step(seed) for seed in range(12))
    assert max(found) < length * vocab * 4 / 2


def test_many_shapes_all_stay_streamed():
    vocab = 2000
    model = nano.build(vocab=vocab, max_positions=300, layers=1)
    seqsplit.compile(model, chunk_size=8, head_chunk_size=8)

    def step(batch, length):
        ids = batches.tokens(batch, length, vocab=vocab)
        return lambda: model(ids, ids)[1]

    shapes = [(batch, 256 + 3 * batch + extra) for batch in (1, 2, 3) for extra in range(5)]
    found = memory_of_steps(step(*shape) for shape in shapes)
    for (batch, length), largest in zip(shapes, found, strict=True):
        assert largest < batch * length * vocab * 4 / 2


# ---- The cache (case 32) ------------------------------------------------------------------------


def test_the_cache_is_off_while_training_unless_asked_for():
    model = seqsplit.compile(hf.build("llama", use_cache=True).double(), chunk_size=CHUNK)
    ids, labels = batches.with_labels(3, 13)
    out = model(input_ids=ids, labels=labels)
    assert out.past_key_values is None
    out.loss.backward()
    assert model.config.use_cache is True


def test_a_cache_asked_for_is_filled_once():
    pair = Pair(hf.builder("llama"), chunk_size=CHUNK, streamed=False)
    ids, labels = batches.with_labels(3, 13)
    caches = []
    for model in (pair.eager, pair.mine):
        out = model(input_ids=ids, labels=labels, use_cache=True)
        out.loss.backward()
        caches.append(out.past_key_values)
    eager, mine = caches
    assert mine.get_seq_length() == eager.get_seq_length() == 13
    for expected, actual in zip(eager.layers, mine.layers, strict=True):
        assert relative_error(expected.keys, actual.keys) <= 1e-12
        assert relative_error(expected.values, actual.values) <= 1e-12
    expected, actual = (
        {name: p.grad for name, p in model.named_parameters()} for model in (pair.eager, pair.mine)
    )
    assert not gradient_differences(expected, actual)


def test_a_cache_from_before_is_continued():
    """A training call behind an already cached prompt: fewer queries than keys."""
    pair = Pair(hf.builder("llama"), chunk_size=CHUNK, streamed=False)
    ids = batches.tokens(2, 13)
    found = []
    for model in (pair.eager, pair.mine):
        with torch.no_grad():
            cache = model(input_ids=ids[:, :6], use_cache=True).past_key_values
        out = model(input_ids=ids[:, 6:], past_key_values=cache, use_cache=True)
        assert out.past_key_values.get_seq_length() == 13
        out.logits.square().mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert not gradient_differences(*found)


# ---- Evaluation (case 33) -----------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_calls_without_grad_are_the_original(context, training):
    pair = Pair(nano.build, chunk_size=CHUNK)
    ids, _ = batches.with_labels(3, 13)
    pair.mine(ids, ids)[1].backward()
    for model in (pair.eager, pair.mine):
        model.train(training)
    with context():
        expected, actual = pair.eager(ids, ids), pair.mine(ids, ids)
    for a, b in zip(expected, actual, strict=True):
        assert type(b) is torch.Tensor
        assert torch.equal(a, b)
        assert not b.requires_grad and b.grad_fn is None
    pair.check(ids, ids)


def test_a_model_that_needs_no_gradient_is_the_original():
    pair = Pair(lambda: nano.build().requires_grad_(False), chunk_size=CHUNK)
    ids, _ = batches.with_labels(3, 13)
    expected, actual = pair.eager(ids, ids)[1], pair.mine(ids, ids)[1]
    assert torch.equal(expected, actual) and not actual.requires_grad


def test_python_runs_in_every_call_without_grad():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()
            self.calls = []

        def forward(self, ids):
            self.calls.append(ids.shape[1])
            return self.inner(ids)

    model = seqsplit.compile(Counting(), chunk_size=CHUNK)
    with torch.no_grad():
        for length in (13, 7, 13):
            model(batches.tokens(2, length))
    assert model.calls == [13, 7, 13]


def test_evaluation_between_training_steps():
    pair = Pair(lambda: nano.build(dropout=0.2), chunk_size=CHUNK)
    ids, _ = batches.with_labels(3, 13)
    for _ in range(2):
        pair.mine.train()
        pair.mine(ids, ids)[1].backward()
        for model in (pair.eager, pair.mine):
            model.eval()
        with torch.no_grad():
            assert torch.equal(pair.eager(ids, ids)[1], pair.mine(ids, ids)[1])
        pair.check(ids, ids)


# ---- Logits of a model that computed its loss ---------------------------------------------------


def test_logits_beside_the_loss_can_be_used_at_any_time():
    pair = Pair(hf.builder("llama"), chunk_size=CHUNK)
    ids, labels = batches.with_labels(3, 13)
    expected = pair.eager(input_ids=ids).logits.detach()
    for when in ("before", "after"):
        out = pair.mine(input_ids=ids, labels=labels)
        if when == "before":
            assert relative_error(expected, out.logits.detach()) <= 1e-12
        out.loss.backward()
        assert out.logits.shape == expected.shape
        assert out.logits.dtype == expected.dtype
        assert torch.equal(out.logits.argmax(-1), expected.argmax(-1))
        assert relative_error(expected, out.logits.detach()) <= 1e-12
        assert relative_error(expected[:, -1], out["logits"][:, -1].detach()) <= 1e-12


def test_logits_and_loss_both_pass_gradients():
    pair = Pair(hf.builder("llama"), chunk_size=CHUNK, streamed=False)
    ids, labels = batches.with_labels(3, 13)
    for objective in (
        lambda out: out.loss + 0.01 * out.logits.square().mean(),
        lambda out: out.logits.logsumexp(-1).mean(),
        every_output,
    ):
        pair.check(input_ids=ids, labels=labels, objective=objective)


def test_logits_looked_at_after_the_weights_changed_are_never_silently_others():
    pair = Pair(hf.builder("llama"), chunk_size=CHUNK)
    ids, labels = batches.with_labels(3, 13)
    expected = pair.eager(input_ids=ids).logits.detach()
    out = pair.mine(input_ids=ids, labels=labels)
    out.loss.backward()
    torch.optim.SGD(pair.mine.parameters(), lr=0.5).step()
    try:
        actual = out.logits.detach().clone()
    except seqsplit.errors.StaleLogitsError:
        return
    assert relative_error(expected, actual) <= 1e-12


# ---- Errors and side conditions -----------------------------------------------------------------


def test_the_models_own_errors_come_through():
    class Limited(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()

        def forward(self, ids):
            if ids.shape[1] > 20:
                raise ValueError("at most 20 tokens")
            return self.inner(ids)

    model = seqsplit.compile(Limited(), chunk_size=CHUNK)
    model(batches.tokens(2, 13)).sum().backward()
    with pytest.raises(ValueError, match="at most 20 tokens"):
        model(batches.tokens(2, 21))
    model(batches.tokens(2, 13)).sum().backward()


def test_a_branch_on_the_length():
    """The model takes another path beyond a length; both are right."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()

        def forward(self, ids):
            x = self.inner.hidden(ids)
            return self.inner.head(x * 2 if ids.shape[1] > 10 else x - 1)

    check(Branching, lengths=(13, 7, 10, 11))


def test_without_dropout_no_random_number_is_drawn():
    pair = Pair(nano.build, chunk_size=CHUNK)
    ids, _ = batches.with_labels(3, 13)
    pair.check(ids, ids)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    pair.mine(ids, ids)[1].backward()
    assert torch.equal(before, torch.get_rng_state())


def test_capture_and_validation_draw_no_random_numbers_either():
    model = seqsplit.compile(nano.build(), chunk_size=CHUNK)
    ids, _ = batches.with_labels(3, 13)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model(ids, ids)[1].backward()
    assert torch.equal(before, torch.get_rng_state())


def test_global_flags_are_left_as_they_were():
    model = seqsplit.compile(nano.build(), chunk_size=CHUNK)
    ids, _ = batches.with_labels(3, 13)

    def flags():
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch._dynamo.config.specialize_float,
            torch._dynamo.config.recompile_limit,
        )

    before = flags()
    model(ids, ids)[1].backward()
    assert flags() == before


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
def test_distributed_data_parallel(one_rank, tied):
    """The reducer raises if a parameter is marked ready twice, or never."""
    eager = nano.build(tied=tied).double()
    mine = seqsplit.compile(copy.deepcopy(eager), chunk_size=CHUNK)
    ids, _ = batches.with_labels(3, 13)
    found = []
    for model in (eager, mine):
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            parallel(ids, ids)[1].backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert not gradient_differences(*found)
