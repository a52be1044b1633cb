"""Losses that break chunked heads: shifts, ignored labels, reductions, preferences, policies."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compare import Pair, every_output
from zoo import batches, hf, probe
from zoo.weights import randomise

VOCAB = batches.VOCAB


def flat_loss(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


# ---- Shifted labels (case 1) -------------------------------------------------------------------


def shift_by_slices(model, ids, labels):
    return flat_loss(model(ids)[:, :-1], labels[:, 1:], reduction="sum")


def shift_by_copies(model, ids, labels):
    logits, targets = model(ids)[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), reduction="sum")


def shift_by_padding(model, ids, labels):
    return flat_loss(model(ids), F.pad(labels, (0, 1), value=-100)[:, 1:], reduction="sum")


def shift_by_roll(model, ids, labels):
    targets = labels.roll(-1, dims=1)
    targets[:, -1] = -100
    return flat_loss(model(ids), targets, reduction="sum")


def shift_in_the_input(model, ids, labels):
    return flat_loss(model(ids[:, :-1]), labels[:, 1:], reduction="sum")


def shift_by_gather(model, ids, labels):
    logp = model(ids)[:, :-1].log_softmax(-1)
    return -logp.gather(2, labels[:, 1:, None]).sum()


def shift_by_two(model, ids, labels):
    return flat_loss(model(ids)[:, :-2], labels[:, 2:], reduction="sum")


SHIFTS = {
    shift_by_slices: 1,
    shift_by_copies: 1,
    shift_by_padding: 1,
    shift_by_roll: 1,
    shift_in_the_input: 1,
    shift_by_gather: 1,
    shift_by_two: 2,
}


@pytest.mark.parametrize("step", SHIFTS, ids=lambda step: step.__name__)
def test_each_target_counts_once_wherever_the_chunks_end(step):
    """With a head of zeros all logits are equal, and each counted target adds exactly log(V)."""
    pair = Pair(probe.build, step=step, chunk_size=4)
    for length in (8, 9, 11, 3):
        ids = batches.tokens(3, length)
        pair.check(ids, ids)
    for model in (pair.eager, pair.mine):
        nn.init.zeros_(model.head.weight)
    for length in (8, 9, 11, 3):
        ids = batches.tokens(3, length)
        counted = pair.check(ids, ids).goal.item() / math.log(VOCAB)
        assert counted == pytest.approx(3 * (length - SHIFTS[step]), rel=1e-12)


# ---- Ignored labels (cases 2, 3, 12) -----------------------------------------------------------


def mean_loss(model, ids, labels):
    return probe.step(model, ids, labels)


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_any_pattern_of_ignored_labels(chunk_size):
    """Rows, chunks and batches without a single valid label are among the patterns."""
    pair = Pair(probe.build, step=mean_loss, chunk_size=chunk_size)

    @settings(max_examples=25)
    @given(st.integers(2, 16), st.data())
    def check(length, data):
        ids = batches.tokens(2, length)
        row = st.lists(st.booleans(), min_size=length, max_size=length)
        valid = torch.tensor([data.draw(row), data.draw(row)])
        pair.check(ids, torch.where(valid, ids, -100))

    check()


PATTERNS = {
    "one row starts ignored": lambda t, row: (row == 0) & (t < 9),
    "one label in all": lambda t, row: (row != 1) | (t != 7),
    "one label in a chunk": lambda t, row: (t >= 4) & (t < 8) & ~((row == 0) & (t == 6)),
    "a whole chunk": lambda t, row: (t >= 4) & (t < 8),
    "all but the last": lambda t, row: t < 12,
    "all but the first two": lambda t, row: t > 1,
    "everything": lambda t, row: t >= 0,
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_labels(reduction):
    def step(model, ids, labels):
        return flat_loss(model(ids)[:, :-1], labels[:, 1:], reduction=reduction)

    ids = batches.tokens(2, 13)
    pair = Pair(probe.build, step=step, chunk_size=4)
    for ignored in PATTERNS.values():
        where = ignored(torch.arange(13)[None, :], torch.arange(2)[:, None])
        pair.check(ids, ids.masked_fill(where, -100))


def test_no_nan_gradients_where_eager_has_none():
    """A sum over no labels, and a mean whose count is clamped by hand, have zero gradients."""

    def step(model, ids, labels):
        valid = labels[:, 1:] != -100
        total = flat_loss(model(ids)[:, :-1], labels[:, 1:], reduction="sum")
        return total / valid.sum().clamp(min=1)

    ids = batches.tokens(2, 13)
    found = Pair(probe.build, step=step, chunk_size=4).check(ids, torch.full_like(ids, -100))
    assert found.goal == 0
    assert all(grad.abs().max() == 0 for grad in found.gradients.values())


@pytest.mark.parametrize("chunk_size", [5, 8])
def test_labels_at_the_end_reach_the_first_layer(chunk_size):
    ids = batches.tokens(2, 64)
    labels = ids.clone()
    labels[:, :-5] = -100
    found = Pair(probe.build, step=mean_loss, chunk_size=chunk_size).check(ids, labels)
    for name in ("q", "k", "v"):
        assert found.gradients[f"layers.0.{name}.weight"].norm() > 0
    early = sorted(set(ids[:, :5].flatten().tolist()) - set(ids[:, 5:].flatten().tolist()))
    assert early and found.gradients["embed.weight"][early].norm(dim=1).min() > 0


# ---- Reductions and options of cross entropy (cases 4, 5, 8) ------------------------------------


@pytest.mark.parametrize("layout", ["flat", "classes second"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions(reduction, layout):
    def step(model, ids, labels):
        logits, targets = model(ids)[:, :-1], labels[:, 1:]
        if layout == "flat":
            return flat_loss(logits, targets, reduction=reduction)
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction=reduction)

    pair = Pair(probe.build, step=step, chunk_size=4)
    for length in (13, 9, 5, 4, 3):
        found = pair.check(*batches.with_labels(3, length), objective=every_output)
        targets = length - 1
        shape = (3 * targets,) if layout == "flat" else (3, targets)
        (loss,) = found.outputs.values()
        assert loss.shape == (shape if reduction == "none" else ())


def weighted(options):
    generator = torch.Generator().manual_seed(4)
    weight = torch.rand(VOCAB, generator=generator, dtype=torch.float64) + 0.1
    return options | {"weight": weight}


OPTIONS = {
    "ignore 0": {"ignore_index": 0},
    "ignore -1": {"ignore_index": -1},
    "ignore a real token": {"ignore_index": 7},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing, all ignored but some": {"label_smoothing": 0.3, "ignore_index": 7},
    "weights": weighted({}),
    "weights, ignore": weighted({"ignore_index": 7}),
    "weights, smoothing": weighted({"label_smoothing": 0.2, "ignore_index": -1}),
    "weights, sum": weighted({"ignore_index": 7, "reduction": "sum"}),
    "smoothing, sum": {"label_smoothing": 0.1, "reduction": "sum"},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_cross_entropy(options):
    chosen = OPTIONS[options]
    ignored = chosen.get("ignore_index", -100)

    def step(model, ids, labels):
        return flat_loss(model(ids)[:, :-1], labels[:, 1:], **chosen)

    ids = batches.tokens(3, 13)
    labels = ids.clone()
    labels[:, 3::4] = ignored
    labels[1, 4:8] = ignored
    Pair(probe.build, step=step, chunk_size=4).check(ids, labels)


def test_loss_modules_and_probability_targets():
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    def step(model, ids, target):
        logits = model(ids)
        soft = F.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))
        return criterion(logits.flatten(0, 1), ids.flatten()) + soft

    generator = torch.Generator().manual_seed(2)
    target = torch.randn(3, 13, VOCAB, generator=generator).softmax(-1)
    Pair(probe.build, step=step, chunk_size=4, streamed=False).check(batches.tokens(3, 13), target)


def cap_tanh(logits):
    return 3.0 * torch.tanh(logits / 3.0)


def cap_sigmoid(logits):
    return 6.0 * torch.sigmoid(logits / 1.5)


def cap_clamp(logits):
    return logits.clamp(-1.0, 1.5)


def temperature(logits):
    return logits / 0.7


@pytest.mark.parametrize("cap", [cap_tanh, cap_sigmoid, cap_clamp, temperature])
def test_functions_of_the_final_logits(cap):
    def step(model, ids, labels):
        return flat_loss(cap(model(ids))[:, :-1], labels[:, 1:])

    Pair(probe.build, step=step, chunk_size=4).check(*batches.with_labels(3, 13))


def z_loss(logits):
    return 1e-2 * logits.logsumexp(-1).square().mean()


def entropy(logits):
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1).mean()


def perplexity(logits):
    return logits.log_softmax(-1).square().mean().exp()


@pytest.mark.parametrize("extra", [z_loss, entropy, perplexity])
def test_terms_added_to_the_loss(extra):
    def step(model, ids, labels):
        logits = model(ids)
        return flat_loss(logits[:, :-1], labels[:, 1:]) + extra(logits)

    Pair(probe.build, step=step, chunk_size=4).check(*batches.with_labels(3, 13))


def test_the_mean_per_row_then_over_rows():
    """Not the mean over tokens where rows have unequal numbers of labels."""

    def step(model, ids, labels):
        targets = labels[:, 1:]
        loss = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), targets, reduction="none")
        valid = targets != -100
        return ((loss * valid).sum(1) / valid.sum(1)).mean()

    ids, _, labels = batches.padded("right")
    Pair(probe.build, step=step, chunk_size=4).check(ids, labels)


# ---- The number of items given from outside (case 6) --------------------------------------------


@pytest.mark.parametrize("as_tensor", [True, False])
def test_micro_batches_of_3_and_9_labels_are_one_batch_of_12(as_tensor):
    ids = batches.tokens(2, 13)
    labels = torch.full_like(ids, -100)
    labels[0, 2:5] = ids[0, 2:5]
    labels[1, 3:12] = ids[1, 3:12]
    items = torch.tensor(12) if as_tensor else 12
    pair = Pair(hf.builder("llama"), chunk_size=4)
    joint = pair.eager(input_ids=ids, labels=labels).loss
    joint.backward()
    parts = []
    for row in range(2):
        part = {"input_ids": ids[row : row + 1], "labels": labels[row : row + 1]}
        loss = pair.mine(**part, num_items_in_batch=items).loss
        loss.backward()
        parts.append(loss.item())
    assert sum(parts) == pytest.approx(joint.item(), rel=1e-12)
    for (name, expected), actual in zip(
        pair.eager.named_parameters(), pair.mine.parameters(), strict=True
    ):
        difference = (expected.grad - actual.grad).norm()
        assert difference <= 1e-9 * expected.grad.norm(), name


# ---- Preferences (case 10) ----------------------------------------------------------------------


def sequence_logp(model, ids, mask):
    """Summed log-probability of each row's masked tokens: [B]."""
    logp = model(ids)[:, :-1].log_softmax(-1)
    picked = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (picked * mask[:, 1:]).sum(-1)


def preference_batch(length=13):
    """Prompts of 3 tokens; chosen and rejected completions of unequal lengths."""
    chosen, rejected = batches.tokens(2, length, seed=1), batches.tokens(2, length, seed=2)
    chosen_mask, rejected_mask = torch.ones(2, length), torch.ones(2, length)
    chosen_mask[:, :3] = rejected_mask[:, :3] = 0
    chosen_mask[0, 9:] = rejected_mask[1, 5:] = 0
    return chosen, chosen_mask, rejected, rejected_mask


def dpo_given_reference(model, chosen, chosen_mask, rejected, rejected_mask, margin):
    policy = sequence_logp(model, chosen, chosen_mask) - sequence_logp(
        model, rejected, rejected_mask
    )
    return -F.logsigmoid(0.3 * (policy - margin)).mean()


def dpo_concatenated(model, chosen, chosen_mask, rejected, rejected_mask, margin):
    logps = sequence_logp(
        model, torch.cat([chosen, rejected]), torch.cat([chosen_mask, rejected_mask])
    )
    first, second = logps.chunk(2)
    return -F.logsigmoid(0.3 * (first - second - margin)).mean()


@pytest.mark.parametrize("step", [dpo_given_reference, dpo_concatenated])
def test_dpo_is_of_whole_sequences(step):
    pair = Pair(probe.build, step=step, chunk_size=4)
    for length in (13, 10, 4):
        pair.check(*preference_batch(length), torch.tensor([0.5, -1.5]))


def two_models():
    reference = probe.build()
    policy = randomise(probe.build(), seed=9, scale=0.1)
    return nn.ModuleDict({"policy": policy, "reference": reference})


def dpo_two_models(models, chosen, chosen_mask, rejected, rejected_mask):
    with torch.no_grad():
        margin = sequence_logp(models["reference"], chosen, chosen_mask) - sequence_logp(
            models["reference"], rejected, rejected_mask
        )
    return dpo_given_reference(
        models["policy"], chosen, chosen_mask, rejected, rejected_mask, margin
    )


def test_dpo_with_a_reference_model():
    """The reference's own weights are used, and they get no gradient."""
    pair = Pair(two_models, step=dpo_two_models, chunk_size=5, streamed=False)
    found = pair.check(*preference_batch())
    for name, grad in found.gradients.items():
        assert (grad is None) == name.startswith("reference."), name


class Switched(nn.Module):
    """A policy that is its own reference once its adapter is switched off."""

    def __init__(self):
        super().__init__()
        self.inner = probe.build().requires_grad_(False)
        generator = torch.Generator().manual_seed(3)
        self.adapter = nn.Parameter(0.3 * torch.randn(VOCAB, 20, generator=generator))
        self.enabled = True

    def forward(self, ids):
        hidden = self.inner.hidden(ids)
        logits = self.inner.head(hidden)
        return logits + F.linear(hidden, self.adapter) if self.enabled else logits


def dpo_switched(model, chosen, chosen_mask, rejected, rejected_mask):
    model.enabled = False
    with torch.no_grad():
        margin = sequence_logp(model, chosen, chosen_mask) - sequence_logp(
            model, rejected, rejected_mask
        )
    model.enabled = True
    return dpo_given_reference(model, chosen, chosen_mask, rejected, rejected_mask, margin)


def test_a_disabled_adapter_is_a_different_model():
    pair = Pair(Switched, step=dpo_switched, chunk_size=5, streamed=False)
    found = pair.check(*preference_batch())
    assert [name for name, grad in found.gradients.items() if grad is not None] == ["adapter"]


# ---- Policies (case 11) -------------------------------------------------------------------------


def token_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def sequence_mean(values, mask):
    return ((values * mask).sum(1) / mask.sum(1)).mean()


def fixed_length(values, mask):
    return (values * mask).sum() / values.numel()


@pytest.mark.parametrize("average", [token_mean, sequence_mean, fixed_length])
def test_clipped_policy_gradients_with_a_penalty(average):
    """Completions of 5 tokens and of 1; some ratios beyond the clip; a k3 penalty."""

    def step(model, ids, mask, old_logp, reference_logp, advantages):
        logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = torch.exp(logp - old_logp)
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        log_ratio = reference_logp - logp
        penalty = log_ratio.exp() - log_ratio - 1
        return average(-(gain - 0.04 * penalty), mask)

    ids = batches.tokens(2, 12)
    mask = torch.zeros(2, 11)
    mask[0, 5:10], mask[1, 7] = 1, 1
    model = probe.build()
    with torch.no_grad():
        logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    generator = torch.Generator().manual_seed(6)
    old = logp + 0.3 * torch.randn(2, 11, generator=generator)
    reference = logp + 0.5 * torch.randn(2, 11, generator=generator)
    pair = Pair(probe.build, step=step, chunk_size=3)
    pair.check(ids, mask, old, reference, torch.tensor([1.3, -0.4]))


def test_a_value_head_beside_the_policy():
    """Two heads on one body, one of them of width 1, with a squared error."""

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()
            self.value = nn.Linear(20, 1)

        def forward(self, ids, returns):
            hidden = self.inner.hidden(ids)
            logp = self.inner.head(hidden)[:, :-1].log_softmax(-1)
            policy = -logp.gather(-1, ids[:, 1:, None]).mean()
            return policy + 0.5 * F.mse_loss(self.value(hidden).squeeze(-1), returns)

    generator = torch.Generator().manual_seed(6)
    returns = torch.randn(3, 13, generator=generator)
    Pair(ActorCritic, chunk_size=4).check(batches.tokens(3, 13), returns)


def test_distillation_from_a_frozen_teacher():
    """Two vocabulary-wide tensors meet in one divergence."""

    def step(models, ids):
        with torch.no_grad():
            teacher = models["reference"](ids).log_softmax(-1)
        student = models["policy"](ids).log_softmax(-1)
        return F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1).mean()

    pair = Pair(two_models, step=step, chunk_size=4, streamed=False)
    pair.check(batches.tokens(3, 13))
