"""Low precision: the error does not grow with the number of chunks, and autocast is as in eager.

The yardstick is the float32 (or float64) gradient of the same weights, never a fixed tolerance:
our error may be at most that of one chunk, and at most that of plain eager, times 1.1.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqsplit
from compare import Pair, differences, gradient_differences
from zoo import HANDWRITTEN, batches, float64, hf, probe

LENGTH = 256
# 64 chunks of 16: torch's CPU kernels round rsqrt in bfloat16 twice for the up to 31 elements that
# fill no vector (seen in torch 2.13), so chunks of fewer numbers per row would measure that.
MANY, LONG = 64, 1024
MARGIN = 1.1


def gradients(model, run, *args):
    model.zero_grad()
    run(*args).backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def error(found, truth, part=""):
    """Norm-wise relative error over all gradients whose name contains `part`."""
    names = [name for name in truth if part in name]
    assert names
    distance = sum((found[n].double() - truth[n].double()).square().sum() for n in names)
    scale = sum(truth[n].double().square().sum() for n in names)
    return (distance / scale).sqrt().item()


def compiled_gradients(entry, model, chunk_size, *args, strict=True):
    model = copy.deepcopy(model)

    def loss(*inputs):
        return entry.step(model, *inputs)

    step = seqsplit.compile(loss, chunk_size=chunk_size, head_chunk_size=chunk_size, strict=strict)
    return gradients(model, step, *args)


@pytest.mark.parametrize(
    "name, parts",
    [
        ("rope-fused", ["", "attention.wk", "attention.wv", "tok_embeddings", "output"]),
        ("nano-manual", ["", "attn.c_attn", "bias", "ln_"]),
    ],
)
def test_bfloat16_error_does_not_grow_with_the_number_of_chunks(name, parts):
    entry = HANDWRITTEN[name]
    model = entry.build(max_positions=LONG + 1).to(torch.bfloat16)
    ids, labels = batches.with_labels(2, LONG)
    wide = copy.deepcopy(model).float()
    truth = gradients(wide, lambda *a: entry.step(wide, *a), ids, labels)
    eager = gradients(model, lambda *a: entry.step(model, *a), ids, labels)
    one = compiled_gradients(entry, model, LONG, ids, labels)
    many = compiled_gradients(entry, model, LONG // MANY, ids, labels)
    for part in parts:
        errors = {
            which: error(found, truth, part)
            for which, found in (("eager", eager), ("1 chunk", one), ("64 chunks", many))
        }
        assert errors["64 chunks"] <= MARGIN * errors["1 chunk"], (part, errors)
        assert errors["64 chunks"] <= MARGIN * errors["eager"], (part, errors)


class Counter(nn.Module):
    """Every token adds exactly 1 to each entry of the gradients of both parameters."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))
        self.scale = nn.Parameter(torch.ones(5))
        self.attention = probe.build(layers=1, width=5, heads=1, head_dim=3)

    def forward(self, ids):
        frozen = self.attention.hidden(ids).detach() * 0
        return ((frozen + 1) * self.scale + self.bias).sum()


@pytest.mark.parametrize("chunk_size", [1, 16, 1024])
def test_equal_shares_of_many_chunks_add_up_exactly(chunk_size):
    """A bfloat16 sum of ones stops at 256; 1024 ones need a wider accumulator."""
    model = Counter().to(torch.bfloat16)
    seqsplit.compile(model, chunk_size=chunk_size)
    model(batches.tokens(1, 1024)).backward()
    for parameter in (model.bias, model.scale):
        assert parameter.grad.dtype == torch.bfloat16
        assert parameter.grad.tolist() == [1024.0] * 5


@pytest.mark.parametrize("accumulate_dtype", [torch.float32, torch.float64])
def test_float64_models_are_never_narrowed(accumulate_dtype):
    """`accumulate_dtype` is a lower bound: float64 weights are accumulated in float64."""
    entry = HANDWRITTEN["nano-fused"]
    pair = Pair(entry.build, step=entry.step, chunk_size=1, accumulate_dtype=accumulate_dtype)
    pair.check(*batches.with_labels(3, 13))


def loss_of(model, batch):
    return model(**batch).loss


@pytest.mark.stock
@pytest.mark.parametrize("family, attention", hf.COMBINATIONS)
def test_stock_hf_models_in_float32(family, attention):
    """Untouched library code, with its own loss and its float32 islands.

    Over several batches: the rounding of a single one is a matter of luck.
    """
    model = hf.build(family, attention, honest=False)
    wide = hf.build(family, attention).double()
    wide.load_state_dict(model.state_dict())
    mine = copy.deepcopy(model)
    seqsplit.compile(mine, chunk_size=8)
    errors = {model: 0.0, mine: 0.0}
    for seed in range(6):
        ids, keep, labels = batches.padded("right", length=31, seed=seed)
        batch = {"input_ids": ids, "attention_mask": keep, "labels": labels}
        with float64.honest():
            truth = gradients(wide, loss_of, wide, batch)
        for which in errors:
            errors[which] += error(gradients(which, loss_of, which, batch), truth) ** 2
    assert errors[mine] ** 0.5 <= MARGIN * errors[model] ** 0.5


class Rounded(nn.Module):
    """A loss that is zero exactly where a matrix product was rounded to bfloat16.

    Each product is 1 + 2**-12, which bfloat16 rounds to 1; hence a backward that recomputes the
    product without the forward's autocast state finds another gradient, not a slightly worse one.
    """

    def __init__(self):
        super().__init__()
        self.inner = probe.build()
        self.project = nn.Linear(2, 3, bias=False)
        with torch.no_grad():
            self.project.weight.copy_(torch.tensor([1.0, 2.0**-12]).expand(3, 2))

    def forward(self, ids):
        hidden = self.inner(ids)
        ones = torch.ones_like(hidden[..., :2])
        product = self.project(ones)
        return (product.float() - 1).mul(2.0**12).square().mean() + hidden.float().square().mean()


def test_the_recomputation_runs_under_the_forwards_autocast():
    pair = Pair(Rounded, chunk_size=4, dtype=torch.float32)
    for model in (pair.eager, pair.mine):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batches.tokens(2, 13))
        loss.backward()
        assert model.project.weight.grad.abs().max() == 0
    pair.mine.zero_grad()
    pair.mine(batches.tokens(2, 13)).backward()
    assert pair.mine.project.weight.grad.abs().max() > 0


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nano-fused", "rope-manual"])
def test_autocast_around_the_forward_only(name, parameters):
    entry = HANDWRITTEN[name]
    model = entry.build(max_positions=LENGTH + 1).to(parameters)
    ids, labels = batches.with_labels(2, LENGTH)
    wide = copy.deepcopy(model).double()
    truth = gradients(wide, lambda: entry.step(wide, ids, labels))

    def autocast(step):
        def run():
            with torch.autocast("cpu", torch.bfloat16):
                return step(ids, labels)

        return run

    mine = copy.deepcopy(model)
    step = seqsplit.compile(
        lambda *a: entry.step(mine, *a), chunk_size=16, head_chunk_size=16, strict=True
    )
    eager = gradients(model, autocast(lambda *a: entry.step(model, *a)))
    ours = gradients(mine, autocast(step))
    assert {n: g.dtype for n, g in ours.items()} == {n: g.dtype for n, g in eager.items()}
    assert error(ours, truth) <= MARGIN * error(eager, truth)


def test_autocast_inside_the_model():
    """Regions entered in the model's own forward, a nested one without autocast among them."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()

        def forward(self, ids):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.inner.hidden(ids)
                with torch.autocast("cpu", enabled=False):
                    logits = self.inner.head(hidden.float())
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    pair = Pair(Mixed, chunk_size=16, dtype=torch.float32)
    ids = batches.tokens(2, LENGTH)
    wide = copy.deepcopy(pair.eager).double()
    truth = gradients(wide, lambda: probe.step(wide.inner, ids, ids))
    eager, mine = pair.both(ids)
    assert error(mine.gradients, truth) <= MARGIN * error(eager.gradients, truth)
    assert mine.goal.dtype == eager.goal.dtype == torch.float32


def test_autocast_on_and_off_in_turn():
    """The state of one call is not remembered by the next."""
    pair = Pair(probe.build, step=probe.step, chunk_size=4)
    ids = batches.tokens(2, 13)
    exact = pair.check(ids, ids)
    with torch.autocast("cpu", torch.bfloat16):
        pair.both(ids, ids)
    again = pair.check(ids, ids)
    assert not differences(exact, again)
    assert not gradient_differences(exact.gradients, again.gradients)


@pytest.mark.parametrize("inside", [True, False])
def test_a_scaled_loss_keeps_small_gradients_in_float16(inside):
    """Unscaled, the gradients of the logits are below what float16 can hold."""
    torch.manual_seed(0)
    model = probe.build().float()
    ids, labels = batches.with_labels(2, 61)
    scale = 2.0**16

    def loss_of(logits, labels):
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (each * 1e-6).sum()

    def step(ids, labels):
        with torch.autocast("cpu", torch.float16):
            return loss_of(mine(ids), labels)

    found = {}
    for name in ("eager", "ours"):
        mine = copy.deepcopy(model)
        run = step
        if name == "ours" and inside:
            run = seqsplit.compile(step, chunk_size=8, head_chunk_size=8)
        elif name == "ours":
            mine = seqsplit.compile(mine, chunk_size=8, head_chunk_size=8)
        # The scale comes from outside, as from a gradient scaler.
        found[name] = gradients(mine, lambda *a, run=run: run(*a) * scale, ids, labels)
    truth = gradients(model, lambda *a: loss_of(model(a[0]), a[1]) * scale, ids, labels)
    assert error(found["ours"], truth) <= MARGIN * error(found["eager"], truth)
