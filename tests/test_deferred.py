"""Deferred logits: what is done to them outside of the compiled model, against eager."""

import copy
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import seqsplit
from compare import gradient_differences, relative_error
from seqsplit.deferred import DeferredTensor, evaluate
from seqsplit.errors import MaterializedWarning, StaleLogitsError
from zoo import batches, probe
from zoo.batches import VOCAB

BATCH, LENGTH, CHUNK = 2, 45, 4


class Twins:
    """An eager model and a compiled one with the same weights."""

    def __init__(self, **options):
        self.eager = probe.build().double()
        self.mine = copy.deepcopy(self.eager)
        seqsplit.compile(self.mine, **{"chunk_size": 16, "head_chunk_size": CHUNK, **options})
        self.ids, self.labels = batches.with_labels(BATCH, LENGTH)

    def both(self, function, *, backward=True):
        """A function of the logits and labels on both sides; compares value and gradients."""
        results, gradients = [], []
        for model in (self.eager, self.mine):
            model.zero_grad(set_to_none=True)
            value = function(model(self.ids), self.labels)
            results.append(value.detach().clone())
            if backward:
                value.backward()
                gradients.append(gradients_of(model))
        assert relative_error(*results) <= 1e-12
        if backward:
            assert not gradient_differences(*gradients)


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture
def twins():
    return Twins()


@pytest.fixture
def quiet():
    """Any computation of a whole deferred tensor is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedWarning)
        yield


def flat(logits, labels):
    return logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)


def picked(logits, labels):
    return logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def log_probs_row_by_row(logits, labels):
    """As trainers write it to save memory: one sequence at a time."""
    normalisers = torch.stack([row.logsumexp(-1) for row in logits])
    return picked(logits, labels) - normalisers


def entropies_in_pieces(logits):
    pieces = []
    for piece in logits.reshape(-1, VOCAB).split(7):
        log_probs = F.log_softmax(piece, dim=-1)
        pieces.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(pieces).reshape(logits.shape[:-1])


def softcapped(x):
    return 30 * torch.tanh(x / 30)


STREAMED = {
    "cross entropy of flat logits": lambda x, y: F.cross_entropy(*flat(x, y)),
    "a sum": lambda x, y: F.cross_entropy(*flat(x, y), reduction="sum"),
    "one per token": lambda x, y: F.cross_entropy(*flat(x, y), reduction="none").pow(2).sum(),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "classes second, sliced": lambda x, y: F.cross_entropy(x.mT[..., :-1], y[:, 1:]),
    "as a module": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
    "smoothed": lambda x, y: F.cross_entropy(*flat(x, y), label_smoothing=0.1),
    "class weights": lambda x, y: F.cross_entropy(
        *flat(x, y), weight=torch.linspace(0.5, 2, VOCAB).double(), label_smoothing=0.2
    ),
    "soft targets": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), F.one_hot(y.clamp(min=0).flatten(), VOCAB).double()
    ),
    "negative log-likelihood": lambda x, y: F.nll_loss(
        F.log_softmax(x, -1).view(-1, VOCAB), y.view(-1)
    ),
    "row by row": lambda x, y: (log_probs_row_by_row(x[:, :-1] / 0.7, y[:, 1:]) ** 2).sum(),
    "entropies in pieces": lambda x, y: entropies_in_pieces(x[:, :-1]).pow(2).mean(),
    "tokens that count": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "picked by numbers": lambda x, y: (
        -(x.flatten(0, 1).log_softmax(-1)[torch.arange(y.numel()), y.clamp(min=0).flatten()].mean())
    ),
    "the last token": lambda x, y: x[:, -1].logsumexp(-1).sum(),
    "one token of each": lambda x, y: x[torch.arange(BATCH), torch.tensor([3, 9])].var(-1).sum(),
    "softcapped": lambda x, y: F.cross_entropy(softcapped(x).mT, y),
    "biased": lambda x, y: (x + torch.linspace(0, 1, VOCAB)).logsumexp(-1).pow(2).sum(),
    "scaled per token": lambda x, y: (x * y[..., None].clamp(min=0)).logsumexp(-1).sum(),
    "scaled per position": lambda x, y: (x * torch.arange(LENGTH).view(-1, 1)).logsumexp(-1).sum(),
    "masked": lambda x, y: x.masked_fill(x < 0, -1e9).logsumexp(-1).sum(),
    "chosen by where": lambda x, y: torch.where(x > 1, x, x.abs()).logsumexp(-1).sum(),
    "largest": lambda x, y: x.max(dim=-1).values.sum(),
    "top": lambda x, y: x.topk(3, dim=-1)[0].square().sum(),
    "sorted": lambda x, y: x.sort(dim=2, descending=True)[0][..., :2].sum(),
    "its own choice": lambda x, y: x.gather(-1, x.argmax(-1, keepdim=True)).sum(),
    "mean of everything": lambda x, y: x.square().mean(),
    "sum of everything": lambda x, y: (x.softmax(-1) * x).sum(),
    "given by name": lambda x, y: torch.logsumexp(input=torch.mul(input=x, other=2), dim=-1).sum(),
    "sum of something given by name": lambda x, y: torch.sum(input=torch.square(input=x)),
    "written into": lambda x, y: F.cross_entropy((x.div_(0.5)).mT, y),
    "written into by an operator": lambda x, y: picked(_halved(x), y).square().sum(),
    "norm of each": lambda x, y: torch.linalg.vector_norm(x, dim=-1).sum(),
    "einsum": lambda x, y: torch.einsum("btv,v->bt", x, torch.linspace(0, 1, VOCAB).double()).sum(),
    "transposed and back": lambda x, y: x.transpose(0, 1).logsumexp(-1).mul(y.T).sum(),
    "joined": lambda x, y: torch.cat([x[:, 5:], x[:, :5]], dim=1).logsumexp(-1).mul(y).sum(),
    "under no_grad": lambda x, y: _without_gradients(x) * x.logsumexp(-1).mean(),
}


def _halved(x):
    x /= 2
    return x


def _without_gradients(x):
    with torch.no_grad():
        return entropies_in_pieces(x).mean()


@pytest.mark.parametrize("name", STREAMED)
def test_streamed(twins, quiet, name):
    twins.both(STREAMED[name])


# What mixes tokens is computed as it would be in eager.
MIXING = {
    "softmax over tokens": lambda x, y: x.softmax(1)[:, 3].square().sum(),
    "cumulative": lambda x, y: x.cumsum(1).square().mean(),
    "relative to the largest": lambda x, y: (x - x.max()).logsumexp(-1).sum(),
    "sum over tokens": lambda x, y: x.sum((0, 1)).square().sum(),
    "products of tokens": lambda x, y: (x @ x.mT).square().mean(),
    "set": lambda x, y: _with_a_hole(x).logsumexp(-1).sum(),
    "added into another": lambda x, y: _scattered(x).logsumexp(-1).square().sum(),
    "added to an ordinary one": lambda x, y: torch.ones(x.shape).double().add_(x).exp().mean(),
    "assigned to an ordinary one": lambda x, y: _assigned(x).square().sum(),
    "checkpointed": lambda x, y: checkpoint(_row_sums, x * 2, use_reentrant=True).square().sum(),
    "checkpointed anew": lambda x, y: checkpoint(_row_sums, x, use_reentrant=False).sum(),
    "flat in the wrong way": lambda x, y: x.reshape(VOCAB, -1).logsumexp(-1).sum(),
    "features flipped": lambda x, y: (x.flip(-1) * torch.arange(VOCAB)).sum(-1).square().sum(),
    "tokens flipped": lambda x, y: (x.flip(1).logsumexp(-1) * torch.arange(LENGTH)).sum(),
    "features rolled": lambda x, y: (x.roll(3, -1) * torch.arange(VOCAB)).sum(-1).sum(),
    "tokens rolled": lambda x, y: (x.roll(3, 1).logsumexp(-1) * torch.arange(LENGTH)).sum(),
    # What six rows, or features of size two, do not tell:
    "set from the tenth": lambda x, y: _set(x, slice(10, None)),
    "set up to the fortieth": lambda x, y: _set(x, slice(None, 40)),
    "set the last forty": lambda x, y: _set(x, slice(-40, None)),
    "set in the middle": lambda x, y: _set(x, slice(10, -12), slice(5, 50)),
    "triangles": lambda x, y: _weighted(x.tril(-7)) + _weighted(x.flatten(0, 1).triu(7)),
    "tokens rolled by six": lambda x, y: _weighted(x.roll(6, 1)),
    "rolled flat": lambda x, y: _weighted(x.roll(2)) + _weighted(x.roll(VOCAB)),
    "features rolled by two": lambda x, y: _weighted(x.roll(2, -1)),
    "two features": lambda x, y: _weighted(x.narrow(-1, 0, 2)) + _weighted(x.split(2, -1)[0]),
    "two features chosen": lambda x, y: _weighted(x.index_select(-1, torch.tensor([0, 1]))),
    "one of a set": lambda x, y: (x.logsumexp(-1) * torch.isin(x.argmax(-1), y)).sum(),
    "a mean divided by its weights": lambda x, y: F.mse_loss(
        x, torch.zeros_like(x), weight=torch.linspace(0.5, 2, VOCAB).double().expand(x.shape)
    ),
}


def _weighted(x):
    generator = torch.Generator().manual_seed(1)
    return (x * torch.randn(x.shape, generator=generator).double()).sum()


def _set(x, tokens, features=slice(None)):
    x = x * 1
    x[:, tokens, features] = -1.0
    return x.logsumexp(-1).square().sum()


def _scattered(x):
    """As a mixture of experts collects what its experts give."""
    collected = torch.zeros_like(x.flatten(0, 1))
    for part in (torch.arange(0, 40), torch.arange(20, 90)):
        collected.index_add_(0, part, (x.flatten(0, 1)[part] * 2).to(x.dtype))
    return collected


def _assigned(x):
    ordinary = torch.zeros(x.shape).double()
    ordinary[:, 3:] = x[:, 3:]
    ordinary.copy_(x * 2)
    return ordinary


def _row_sums(x):
    return x.exp().sum(-1).log()


def _with_a_hole(x):
    x = x.clone()
    x[:, 2:4] = 0
    return x


@pytest.mark.parametrize("name", MIXING)
def test_mixing(name):
    twins = _shared()
    twins.ids, twins.labels = batches.with_labels(BATCH, LENGTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedWarning)
        twins.both(MIXING[name])


def test_the_warning_names_call_bytes_and_line(twins):
    logits = twins.mine(twins.ids)
    with pytest.warns(MaterializedWarning, match=r"softmax computes .*\[2, 45, 61\]") as caught:
        logits.softmax(1)
    assert caught[0].filename == __file__


def test_few_tokens_are_computed_without_a_word(twins, quiet):
    logits = twins.mine(twins.ids[:, :2])
    logits.softmax(1).sum().backward()


def test_metadata_costs_nothing(twins):
    logits = twins.mine(twins.ids)
    assert isinstance(logits, DeferredTensor) and isinstance(logits, torch.Tensor)
    assert logits.shape == (BATCH, LENGTH, VOCAB) and len(logits) == BATCH
    assert logits.dtype == torch.float64 and logits.device.type == "cpu"
    assert logits.requires_grad and logits.grad_fn is not None and not logits.is_leaf
    assert logits._result is None


@pytest.fixture
def computed(monkeypatch):
    """The numbers of outputs of every segment that deferred values are computed by."""
    found = []

    def counting(segment, *args):
        found.append(len(segment.body.outputs))
        return original(segment, *args)

    original = evaluate.run_segment
    monkeypatch.setattr(evaluate, "run_segment", counting)
    return found


def test_what_is_recorded_together_is_computed_together(twins, computed, quiet):
    logits = twins.mine(twins.ids)[:, :-1]
    log_probs = log_probs_row_by_row(logits, twins.labels[:, 1:])
    with torch.no_grad():
        entropies = entropies_in_pieces(logits)
    ((log_probs.sum() + 1) ** 2).backward()
    assert len(computed) == 1
    entropies.mean().item()
    assert len(computed) == 1


def test_what_nobody_holds_is_not_computed(twins, computed):
    logits = twins.mine(twins.ids)
    logits.logsumexp(-1)
    gc.collect()
    logits.argmax(-1).sum()
    assert computed == [1]


def test_a_step_leaves_nothing_behind(twins):
    """No computed value is held by its own history: memory is freed without a garbage collector."""

    def step():
        logits = twins.mine(twins.ids)
        log_probs = log_probs_row_by_row(logits, twins.labels)
        normaliser = logits.logsumexp(-1)
        loss = (log_probs.exp() * normaliser).sum() + F.cross_entropy(*flat(logits, twins.labels))
        loss.backward()
        twins.mine.zero_grad()

    step()
    gc.collect()
    gc.disable()
    try:
        with seqsplit.track_memory() as memory:
            for _ in range(3):
                step()
            assert memory.live_bytes <= 0
    finally:
        gc.enable()


def test_a_view_sees_what_is_written(twins):
    def function(x, y):
        head = x[:, :5]
        kept = x * 2  # of what was there before
        x.mul_(3)
        return head.logsumexp(-1).sum() + kept.logsumexp(-1).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedWarning)
        twins.both(function)


def test_a_write_into_a_view_is_seen(twins):
    def function(x, y):
        x[:, 3:7].mul_(2)
        head = x[:, 1:]
        head.add_(1)
        return x.logsumexp(-1).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedWarning)
        twins.both(function)


SHARED = {
    "features": lambda x: x[..., 3:9],
    "one feature": lambda x: x.select(-1, 4),
    "detached": lambda x: x.detach(),
    "itself": lambda x: x.double(),
    "a view of a view": lambda x: x[:, 3:].detach()[..., 2:5],
}


@pytest.mark.parametrize("kind", SHARED)
def test_writes_are_seen_wherever_memory_is_shared(kind):
    def into_the_view(x, y):
        view = SHARED[kind](x)
        view.fill_(3)
        return x.detach().square().sum()

    def into_the_whole(x, y):
        view = SHARED[kind](x)
        x.fill_(3)
        return view.detach().double().square().sum()

    twins = _shared()
    twins.ids, twins.labels = batches.with_labels(BATCH, LENGTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedWarning)
        twins.both(into_the_view, backward=False)
        twins.both(into_the_whole, backward=False)


def test_a_write_is_seen_by_a_view_of_what_is_gone():
    def function(x, y):
        before = x.detach()
        x = x[:, 1:]
        x.div_(2)
        return before.logsumexp(-1).square().sum()

    twins = _shared()
    twins.ids, twins.labels = batches.with_labels(BATCH, LENGTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedWarning)
        twins.both(function, backward=False)


def test_a_write_after_a_view_was_looked_at_is_an_error(twins):
    logits = twins.mine(twins.ids)
    head = logits[:, :3]
    head.materialize()
    with pytest.raises(seqsplit.SeqsplitError, match="view was looked at before"):
        logits.mul_(2)


class Doubled(torch.autograd.Function):
    """A function that bypasses what a tensor subclass may see."""

    @staticmethod
    def forward(ctx, x):
        return x.sum() * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * torch.ones(BATCH, LENGTH, VOCAB, dtype=torch.float64)


def test_an_autograd_function_gets_the_gradient_back(twins):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedWarning)
        twins.both(lambda x, y: Doubled.apply(x))
        twins.both(lambda x, y: Doubled.apply(x.exp()))


def test_a_write_does_not_change_the_history_of_what_was_there_before():
    def recorded(x, y):
        before = Doubled.apply(x)
        x.mul_(3)
        return before + Doubled.apply(x)

    def carried_out(x, y):
        x[:, 2:4] = 0
        return Doubled.apply(x)

    def without_gradients(x, y):
        with torch.no_grad():
            x.mul_(3)
            x[:, 2:4] = 0
        return x.logsumexp(-1).square().sum()

    def looked_at(x, y):
        rest = x[:, 1:]
        x.softmax(1)
        with torch.no_grad():
            rest.softmax(1)
        return rest.logsumexp(-1).square().sum()

    def hooked(x, y):
        x.register_hook(lambda grad: 3 * grad)
        return Doubled.apply(x) + x.logsumexp(-1).sum()

    twins = _shared()
    twins.ids, twins.labels = batches.with_labels(BATCH, LENGTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedWarning)
        for function in (recorded, carried_out, without_gradients, looked_at, hooked):
            twins.both(function)


def test_gradients_that_cannot_be_asked_for_any_more_are_refused():
    class WithLoss(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            logits = self.inner(ids)
            return logits, logits.logsumexp(-1).mean()

    twins = _shared()
    alone = twins.mine(twins.ids)
    alone_loss = alone.logsumexp(-1).mean()
    both = seqsplit.compile(WithLoss(probe.build().double()), chunk_size=16, head_chunk_size=CHUNK)
    for logits, loss in ((alone, alone_loss), both(twins.ids)):
        with pytest.raises(seqsplit.SeqsplitError, match="register_hook of a deferred tensor"):
            logits.register_hook(lambda grad: 2 * grad)
        with pytest.raises(seqsplit.SeqsplitError, match="has been used"):
            logits.retain_grad()
        with pytest.raises(seqsplit.SeqsplitError, match="has been used"):
            torch.autograd.grad(loss, logits, allow_unused=True)


def test_weights_frozen_or_not_as_they_were_when_logits_were_made(twins):
    def frozen_reference(model):
        model.requires_grad_(False)
        reference = model(twins.ids.roll(1, 1))
        model.requires_grad_(True)
        log_probs = model(twins.ids).log_softmax(-1)
        F.kl_div(log_probs, reference.softmax(-1), reduction="batchmean").backward()

    def frozen_head(model):
        model.head.requires_grad_(False)
        logits = model(twins.ids)
        model.head.requires_grad_(True)
        F.cross_entropy(*flat(logits, twins.labels)).backward()

    for scenario in (frozen_reference, frozen_head):
        gradients = []
        for model in (twins.eager, twins.mine):
            model.zero_grad(set_to_none=True)
            scenario(model)
            gradients.append(gradients_of(model))
        assert not gradient_differences(*gradients)
    logits = twins.mine(twins.ids)
    twins.mine.head.requires_grad_(False)
    with pytest.raises(StaleLogitsError, match="frozen"):
        logits.logsumexp(-1).sum()


def test_logits_of_two_steps_are_not_joined_with_the_weights_of_one(twins):
    with torch.no_grad():
        before = twins.mine(ids := batches.tokens(BATCH, 400))
        twins.mine.head.weight.mul_(2)
        after = twins.mine(ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MaterializedWarning)
            with pytest.raises(StaleLogitsError):
                torch.cat([after, before]).logsumexp(-1).sum()


def test_a_leaf_of_ones_own(twins):
    """Gradients with respect to logits, as a loop that chunks by itself takes them."""
    gradients = []
    for model in (twins.eager, twins.mine):
        logits = model(twins.ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MaterializedWarning)
            leaf = logits.detach().requires_grad_()
            F.cross_entropy(*flat(leaf, twins.labels)).backward()
            assert leaf.is_leaf and leaf.grad is not None
            logits.backward(leaf.grad)
        gradients.append(gradients_of(model))
    assert not gradient_differences(*gradients)


def test_a_graph_break_behind_the_logits(quiet):
    """The rest of a compiled function gets them deferred, as a caller would."""
    twins = Twins()

    def step(model, ids, labels):
        logits = model(ids) / 2
        keep = labels != -100  # whose number Dynamo cannot know
        return F.cross_entropy(logits[keep], labels[keep])

    compiled = seqsplit.compile(
        lambda ids, labels: step(twins.mine, ids, labels), chunk_size=16, head_chunk_size=CHUNK
    )
    for length in (45, 52):
        twins.ids, twins.labels = batches.with_labels(BATCH, length)
        gradients = []
        for model, run in ((twins.eager, step), (twins.mine, lambda _, *args: compiled(*args))):
            model.zero_grad(set_to_none=True)
            run(model, twins.ids, twins.labels).backward()
            gradients.append(gradients_of(model))
        assert not gradient_differences(*gradients)


def test_a_slice_under_no_grad_has_no_history(twins):
    with torch.no_grad():
        part = twins.mine(twins.ids)[:, 1:]
    assert not part.requires_grad and not part.exp().requires_grad
    logits = twins.mine(twins.ids)
    with torch.no_grad():
        part = logits[:, 1:]
        joined = torch.cat([logits, logits])
    assert not (part.logsumexp(-1) * 2).requires_grad
    assert not (joined.logsumexp(-1) * 2).requires_grad


def test_the_engine_may_be_called_directly(twins):
    weights = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(0)).double()
    gradients = []
    for model in (twins.eager, twins.mine):
        torch.autograd.backward([model(twins.ids).logsumexp(-1)], [weights])
        gradients.append(gradients_of(model))
    assert not gradient_differences(*gradients)


def test_values_kept_over_a_step_of_the_optimizer(twins):
    expected = twins.eager(twins.ids).detach()
    logits = twins.mine(twins.ids)
    log_probs = logits.log_softmax(-1)[..., 3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedWarning)
        copied = logits.detach().clone()
    late = logits.argmin(-1)
    log_probs.sum().backward()
    torch.optim.SGD(twins.mine.parameters(), lr=1.0).step()
    assert relative_error(expected, copied) <= 1e-12
    assert relative_error(expected.log_softmax(-1)[..., 3], log_probs.detach()) <= 1e-12
    assert torch.equal(late, expected.argmin(-1))  # computed along with what backward needed
    with pytest.raises(StaleLogitsError, match=r"materialize\(\)"):
        logits.logsumexp(-1).sum()


def test_an_optimizer_that_no_version_counts():
    """Fused kernels write to weights behind autograd's back, as ``.data`` does."""
    twins = Twins()
    logits = twins.mine(twins.ids)
    F.cross_entropy(*flat(logits, twins.labels)).backward()
    for parameter in twins.mine.parameters():
        parameter.data.sub_(0.1 * parameter.grad)
    with pytest.raises(StaleLogitsError):
        logits.argmax(-1).sum()


def test_labels_that_change_after_they_were_used(twins):
    logits, labels = twins.mine(twins.ids), twins.labels.clone()
    chosen = picked(logits, labels)
    before = picked(twins.eager(twins.ids), twins.labels)
    labels.zero_()
    assert relative_error(before.detach(), chosen.detach()) <= 1e-12


def test_as_many_tokens_as_classes():
    """Which tensor has a row per token is never told from its size alone."""
    twins = Twins()
    twins.ids, twins.labels = batches.with_labels(1, VOCAB)
    weight = torch.linspace(0.5, 2, VOCAB).double()
    twins.both(lambda x, y: F.cross_entropy(x[0], y[0], weight=weight))
    twins.both(lambda x, y: (x[0] * weight).logsumexp(-1).square().sum())
    twins.both(lambda x, y: (x[0] * weight[:, None]).logsumexp(-1).square().sum())


def test_prompts_without_labels_first(twins):
    """What is tried out is tried on tokens that count."""
    twins.labels[:] = -100
    twins.labels[1, -4:] = torch.tensor([1, 5, 2, 60])
    twins.both(lambda x, y: F.cross_entropy(*flat(x, y)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_do_not_overflow(dtype):
    torch.manual_seed(0)
    model = probe.build().to(dtype)
    ids, _ = batches.with_labels(8, 800)
    eager = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).detach()
    seqsplit.compile(model, chunk_size=64, head_chunk_size=4096)
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    assert loss.dtype == dtype and loss.isfinite()
    assert relative_error(eager, loss.detach()) <= 2e-2


@pytest.mark.parametrize("where", ["around the model", "around both"])
def test_autocast(where):
    eager = probe.build()
    mine = seqsplit.compile(copy.deepcopy(eager), chunk_size=16, head_chunk_size=CHUNK)
    ids, labels = batches.with_labels(BATCH, LENGTH)
    losses = []
    for model in (eager, mine):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
            assert logits.dtype == torch.bfloat16
            loss = F.cross_entropy(*flat(logits, labels))
        if where == "around the model":
            loss = F.cross_entropy(*flat(logits, labels))
        loss.backward()
        losses.append(loss.detach())
    assert losses[0].dtype == losses[1].dtype
    assert relative_error(*losses) <= 2e-2
    for name, expected in gradients_of(eager).items():
        if "k.bias" not in name:  # zero but for rounding
            assert relative_error(expected, gradients_of(mine)[name]) <= 0.1, name


def test_distillation_from_a_compiled_teacher(quiet):
    twins = Twins()
    ids, _ = batches.with_labels(BATCH, 400)
    teacher = probe.build(layers=1).double().requires_grad_(False)
    compiled = seqsplit.compile(copy.deepcopy(teacher), head_chunk_size=CHUNK)
    results = []
    for model, other in ((twins.eager, teacher), (twins.mine, compiled)):
        with torch.no_grad():
            target = other(ids)
        assert isinstance(target, DeferredTensor) == (other is compiled)
        loss = F.kl_div(
            F.log_softmax(model(ids) / 2, -1).flatten(0, 1),
            F.log_softmax(target / 2, -1).flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        loss.backward()
        results.append(gradients_of(model) | {"loss": loss.detach()})
    assert not gradient_differences(*results)


# ---- Without gradients --------------------------------------------------------------------------


def test_evaluation_never_holds_the_logits(quiet):
    model = probe.build()
    expected = F.cross_entropy(*flat(model(ids := batches.tokens(BATCH, 700)), ids)).detach()
    seqsplit.compile(model, head_chunk_size=CHUNK)
    with torch.no_grad(), seqsplit.track_memory() as memory:
        loss = F.cross_entropy(*flat(model(ids), ids))
    assert relative_error(expected, loss) <= 1e-5
    assert memory.largest_bytes < BATCH * 700 * VOCAB * 4


def test_short_calls_without_gradients_run_the_original(twins):
    with torch.no_grad():
        assert type(twins.mine(twins.ids[:, :1])) is torch.Tensor
    with torch.inference_mode():
        assert type(twins.mine(twins.ids)) is torch.Tensor


# ---- Programs drawn at random -------------------------------------------------------------------

UNARY = {
    "exp": lambda x: (x / 4).exp(),
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: x.softmax(dim=x.ndim - 1),
    "scale": lambda x: x / 1.7,
    "tanh": torch.tanh,
    "cast": lambda x: x.to(torch.float64),
    "shift": lambda x: x - x.mean(-1, keepdim=True),
    "clamp": lambda x: x.clamp(-2, 2),
    "detached": lambda x: x - x.detach() + x.square(),
    "twice": lambda x: x * x.sigmoid(),
    "over tokens": lambda x: x - x.mean(0, keepdim=True),  # which is not token by token
}
ROWS = {
    "slice": lambda x: x[:, 1:] if x.ndim == 3 else x[2:],
    "steps": lambda x: x[..., ::2, :],
    "flat": lambda x: x.reshape(-1, x.shape[-1]),
    "flatten": lambda x: x.flatten(0, -2),
    "new dim": lambda x: x.unsqueeze(0) if x.ndim == 2 else x,
    "swap": lambda x: x.transpose(0, 1) if x.ndim == 3 else x,
    "mask": lambda x: (
        x[torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) % 3 != 0]
        if x.ndim == 3
        else x[torch.arange(len(x)) % 2 == 0]
    ),
    "select": lambda x: x[-1] if x.ndim == 3 else x,
    "split": lambda x: torch.cat([part * 2 for part in x.split(5, dim=x.ndim - 2)], x.ndim - 2),
    "loop": lambda x: torch.stack([part.sin() for part in x]) if x.ndim == 3 else x,
    "narrow": lambda x: x.narrow(-2, 1, x.shape[-2] - 1),
    "flip": lambda x: x.flip(-2),
}
ENDS = {
    "logsumexp": lambda x: x.logsumexp(-1),
    "first": lambda x: x[..., 0],
    "some": lambda x: x[..., 2:5],
    "norm": lambda x: x.norm(dim=-1),
    "max": lambda x: x.amax(-1),
    "all": lambda x: x,
}
programs = st.lists(st.sampled_from([*UNARY, *ROWS]), min_size=1, max_size=6)


@given(steps=programs, end=st.sampled_from(list(ENDS)), length=st.integers(9, 20))
def test_drawn(steps, end, length):
    twins = _shared()
    twins.ids, twins.labels = batches.with_labels(BATCH, length)

    def function(x, y):
        for step in steps:
            if x.shape[0] < 3 and x.ndim == 2:
                break
            x = (UNARY | ROWS)[step](x)
        x = ENDS[end](x)
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
        return (x * weights).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedWarning)
        twins.both(function)


def _shared(kept=[]):  # noqa: B006 - one capture for all examples
    if not kept:
        kept.append(Twins())
    return kept[0]
