"""Gradients arrive as in eager: once per parameter, scaled, accumulated, frozen, through hooks.

Each scenario is a function of a model; it runs on the eager model and on its compiled twin and
returns named tensors (or None), which have to agree.
"""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compare import Pair, gradient_differences
from seqsplit.errors import DoubleBackwardError
from zoo import batches, hf, nano, probe, rope

CHUNK = 4


def same(build, scenario, **options):
    """Run `scenario` on both twins and compare what it returns."""
    pair = Pair(build, chunk_size=CHUNK, **options)
    expected, actual = scenario(pair.eager), scenario(pair.mine)
    problems = gradient_differences(expected, actual)
    assert not problems, "\n".join(problems)
    return actual


def batch(seed=0, length=13):
    ids, labels = batches.with_labels(3, length, seed=seed)
    return ids, torch.where(labels == -100, -1, labels)


def loss_of(model, seed=0, length=13):
    return model(*batch(seed, length))[1]


def grads(model):
    return {name: _copy(p.grad) for name, p in model.named_parameters()}


def _copy(tensor):
    return None if tensor is None else tensor.detach().clone()


@pytest.mark.parametrize("factor", [0.37, -2.0, 0.0, 1e-6])
def test_a_scaled_loss_scales_gradients(factor):
    def scenario(model):
        (factor * loss_of(model)).backward()
        return grads(model)

    same(nano.build, scenario)


def test_gradient_argument_of_backward():
    def scenario(model):
        loss_of(model).backward(gradient=torch.tensor(0.37, dtype=torch.float64))
        return grads(model)

    same(nano.build, scenario)


def test_grad_scaler():
    def scenario(model):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        found = grads(model)
        scaler.step(optimizer)
        return found | {f"stepped {name}": _copy(p) for name, p in model.named_parameters()}

    same(nano.build, scenario)


def test_two_backwards_accumulate():
    def scenario(model):
        loss_of(model, seed=0).backward()
        loss_of(model, seed=1, length=7).backward()
        return grads(model)

    same(nano.build, scenario)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_two_backwards(order):
    def scenario(model):
        losses = [loss_of(model, seed=0), loss_of(model, seed=1)]
        for index in order:
            losses[index].backward()
        return grads(model)

    same(nano.build, scenario)


def test_one_backward_of_the_sum_of_two_losses():
    def scenario(model):
        (loss_of(model, seed=0) + 3 * loss_of(model, seed=1)).backward()
        return grads(model)

    same(nano.build, scenario)


def test_retain_graph_allows_a_second_backward():
    def scenario(model):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        return grads(model)

    same(nano.build, scenario)


def test_a_second_backward_without_retain_graph_is_refused():
    pair = Pair(nano.build, chunk_size=CHUNK)
    for model in (pair.eager, pair.mine):
        loss = loss_of(model)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_a_filled_grad_is_added_to():
    def scenario(model):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 10.0 + index)
        loss_of(model).backward()
        return grads(model)

    same(nano.build, scenario)


def test_a_filled_grad_keeps_its_storage():
    """Gradients are accumulated in place, so views of flat gradient buffers stay valid."""
    pair = Pair(nano.build, chunk_size=CHUNK)
    loss_of(pair.mine).backward()
    before = {name: p.grad.data_ptr() for name, p in pair.mine.named_parameters()}
    loss_of(pair.mine).backward()
    assert before == {name: p.grad.data_ptr() for name, p in pair.mine.named_parameters()}


def test_autograd_grad_returns_gradients_and_leaves_grad_alone():
    def scenario(model):
        names, parameters = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(loss_of(model), parameters)
        assert all(parameter.grad is None for parameter in parameters)
        return dict(zip(names, found, strict=True))

    same(nano.build, scenario)


@pytest.mark.parametrize("part", ["wte", "h.0", "h.1", "ln_f", "h.0.attn.c_attn.bias"])
def test_autograd_grad_of_a_part(part):
    def scenario(model):
        chosen = {n: p for n, p in model.named_parameters() if n.startswith(part)}
        found = torch.autograd.grad(loss_of(model), chosen.values())
        return dict(zip(chosen, found, strict=True))

    same(nano.build, scenario)


FREEZES = {
    "body": lambda name: name.startswith("lm_head"),
    "head": lambda name: not name.startswith("lm_head"),
    "embedding": lambda name: not name.startswith("wte"),
    "all but one layer": lambda name: name.startswith("h.1."),
    "all but the first layer": lambda name: name.startswith("h.0."),
    "all but norms": lambda name: "ln_" in name,
    "all but biases": lambda name: name.endswith("bias"),
    "all but the embedding": lambda name: name.startswith("wte"),
    "attention": lambda name: "attn" not in name,
    "everything": lambda name: False,
}


@pytest.mark.parametrize("frozen", FREEZES)
def test_frozen_parameters_keep_no_grad(frozen):
    def build():
        model = nano.build(layers=3, tied=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(FREEZES[frozen](name))
        return model

    def scenario(model):
        loss = loss_of(model)
        if loss.requires_grad:
            loss.backward()
        found = grads(model)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad or found[name] is None
        return found | {"loss": loss.detach()}

    same(build, scenario)


def test_freezing_between_steps():
    def scenario(model):
        loss_of(model).backward()
        first = grads(model)
        model.zero_grad()
        model.h[0].requires_grad_(False)
        loss_of(model).backward()
        second = grads(model)
        model.zero_grad()
        model.h[0].requires_grad_(True)
        loss_of(model).backward()
        third = grads(model)
        return {
            f"{step} {name}": grad
            for step, found in enumerate((first, second, third))
            for name, grad in found.items()
        }

    same(nano.build, scenario)


TIES = {
    "both": (True, lambda name: True),
    "untied": (False, lambda name: True),
    "embedding alone": (False, lambda name: not name.startswith("lm_head")),
    "head alone": (False, lambda name: not name.startswith("wte")),
}


@pytest.mark.parametrize("tie", TIES)
def test_tied_weights_get_the_gradients_of_both_uses(tie):
    tied, trained = TIES[tie]

    def build():
        model = nano.build(tied=tied)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained(name))
        return model

    def scenario(model):
        loss_of(model).backward()
        return grads(model)

    same(build, scenario)


def test_the_gradients_of_tied_weights_are_the_sum_of_each_side():
    """Against a copy whose sides are untied, so that a side missing from both would show."""
    pair = Pair(nano.build, chunk_size=CHUNK)
    untied = nano.Nano(tied=False).double()
    state = pair.eager.state_dict()
    untied.load_state_dict(state | {"lm_head.weight": state["wte.weight"]})
    loss_of(untied).backward()
    loss_of(pair.mine).backward()
    both = untied.wte.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(pair.mine.wte.weight.grad, both, rtol=1e-9, atol=1e-13)


class Lora(nn.Module):
    """A frozen linear map plus a trained low-rank one."""

    def __init__(self, base, rank=2, scale=1.5):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        generator = torch.Generator().manual_seed(base.in_features)
        make = {"generator": generator, "dtype": base.weight.dtype}
        self.down = nn.Parameter(0.3 * torch.randn(rank, base.in_features, **make))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, rank, **make))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


@pytest.mark.parametrize("targets", [("c_attn",), ("c_attn", "c_proj"), ("lm_head",)])
def test_low_rank_adapters(targets):
    def build():
        model = nano.build(tied=False).requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if name in targets:
                    setattr(module, name, Lora(child))
        return model

    def scenario(model):
        loss_of(model).backward()
        found = grads(model)
        trained = [name for name, grad in found.items() if grad is not None]
        assert trained and all(name.endswith((".down", ".up")) for name in trained)
        return found

    same(build, scenario)


def test_one_post_accumulate_hook_per_parameter_per_backward():
    pair = Pair(nano.build, chunk_size=CHUNK)
    for model in (pair.eager, pair.mine):
        fired = []
        for name, parameter in model.named_parameters():
            note = partial(lambda name, fired, _: fired.append(name), name, fired)
            parameter.register_post_accumulate_grad_hook(note)
        for backwards in (1, 2):
            loss_of(model).backward()
            names = [name for name, _ in model.named_parameters()]
            assert sorted(fired) == sorted(names * backwards)


def test_a_tensor_hook_sees_the_whole_gradient_once():
    def scenario(model):
        seen = {}
        for name, parameter in model.named_parameters():

            def hook(grad, name=name):
                assert name not in seen
                seen[name] = grad.clone()
                return grad.clamp(-1e-3, 1e-3)

            parameter.register_hook(hook)
        loss_of(model).backward()
        return grads(model) | {f"seen {name}": grad for name, grad in seen.items()}

    same(nano.build, scenario)


@pytest.mark.parametrize("tied", [True, False])
def test_an_optimizer_that_steps_inside_the_hook(tied):
    def scenario(model):
        optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for seed in range(3):
            loss_of(model, seed).backward()
        return {name: _copy(p) for name, p in model.named_parameters()}

    same(lambda: nano.build(tied=tied), scenario)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_follows_eager(optimizer):
    def scenario(model):
        steps = optimizer(model.parameters(), lr=0.01)
        losses = []
        for seed in range(4):
            steps.zero_grad()
            loss = loss_of(model, seed)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            steps.step()
            losses.append(loss.detach())
        return {"losses": torch.stack(losses)} | {n: _copy(p) for n, p in model.named_parameters()}

    same(rope_with_loss, scenario)


class WithLoss(nn.Module):
    """A decoder that returns (logits, loss) like the others here, from a step function."""

    def __init__(self, inner, step):
        super().__init__()
        self.inner, self.step = inner, step

    def forward(self, ids, targets):
        return None, self.step(self.inner, ids, targets.clamp(min=0))


def rope_with_loss():
    return WithLoss(rope.build(), rope.step)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_inputs_embeds_leaf_gets_its_gradient(family, trained):
    def build():
        return hf.build(family).requires_grad_(trained)

    pair = Pair(build, chunk_size=CHUNK)
    width = pair.eager.get_input_embeddings().weight.shape[1]
    _, labels = batches.with_labels(3, 13)
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(3, 13, width, generator=generator).requires_grad_()
    found = pair.check(inputs_embeds=embeds, labels=labels)
    assert found.gradients["input 1.inputs_embeds"] is not None


def test_an_embeds_input_that_is_not_a_leaf_passes_its_gradient_on():
    """Part of the graph lies outside the compiled function (a projector, a prompt encoder)."""

    class FromEmbeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()

        def forward(self, embeds):
            x = embeds
            for layer in self.inner.layers:
                x = layer(x)
            return self.inner.head(x)

    def scenario(model):
        generator = torch.Generator().manual_seed(1)
        shape = (3, 13, 20)
        soft = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        logits = model(torch.tanh(soft) * 2)
        logits.square().mean().backward()
        return grads(model) | {"soft": _copy(soft.grad)}

    same(FromEmbeds, scenario)


def test_gradients_of_logits_without_a_loss():
    def scenario(model):
        logits = model(batch()[0])
        generator = torch.Generator().manual_seed(1)
        logits.backward(torch.randn(logits.shape, generator=generator, dtype=logits.dtype))
        return grads(model)

    same(probe.build, scenario)


def test_only_one_of_two_losses_is_used():
    """An output without a cotangent costs nothing and changes nothing."""

    def step(model, ids):
        logits = model(ids)
        first = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        second = logits.logsumexp(-1).square().mean()
        return first, second

    ids = batch()[0]
    for objective in (
        lambda out: out[0],
        lambda out: out[1],
        lambda out: out[0] + 0.01 * out[1],
        lambda out: out[0] * out[1],
    ):
        Pair(probe.build, step=step, chunk_size=CHUNK).check(ids, objective=objective)


def test_gradients_are_plain_dense_tensors_of_the_parameters_dtype():
    pair = Pair(nano.build, chunk_size=CHUNK)
    loss = loss_of(pair.mine)
    assert loss.requires_grad and not loss.is_leaf and loss.shape == ()
    loss.backward()
    for parameter in pair.mine.parameters():
        assert type(parameter.grad) is torch.Tensor
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.stride() == parameter.stride()
        assert not parameter.grad.requires_grad


def test_no_two_parameters_share_a_gradient():
    pair = Pair(nano.build, chunk_size=CHUNK)
    loss_of(pair.mine).backward()
    storages = [p.grad.untyped_storage().data_ptr() for p in pair.mine.parameters()]
    sizes = [p.grad.untyped_storage().nbytes() for p in pair.mine.parameters()]
    expected = [p.numel() * p.element_size() for p in pair.mine.parameters()]
    assert len(set(storages)) == len(storages)
    assert sizes == expected


def test_gradients_of_gradients_are_refused_by_name():
    model = Pair(nano.build, chunk_size=CHUNK).mine
    parameter = model.h[0].attn.c_attn.weight
    with pytest.raises(DoubleBackwardError, match="seqsplit"):
        (grad,) = torch.autograd.grad(loss_of(model), parameter, create_graph=True)
        torch.autograd.grad(grad.square().sum(), parameter)


@pytest.mark.parametrize("changed", ["h.0.attn.c_attn.weight", "lm_head.weight", "ln_f.weight"])
def test_weights_changed_between_forward_and_backward_are_noticed(changed):
    """Eager refuses this; a recomputation with the new weights would be silently wrong."""
    pair = Pair(lambda: nano.build(tied=False), chunk_size=CHUNK)
    for model in (pair.eager, pair.mine):
        loss = loss_of(model)
        with torch.no_grad():
            model.get_parameter(changed).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_tokens_changed_between_forward_and_backward_are_noticed():
    pair = Pair(nano.build, chunk_size=CHUNK)
    for model in (pair.eager, pair.mine):
        ids, targets = batch()
        loss = model(ids, targets)[1]
        ids.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_backward_in_another_thread():
    def scenario(model):
        loss = loss_of(model)
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
        return grads(model)

    same(nano.build, scenario)


def test_backward_under_no_grad_is_as_in_eager():
    def scenario(model):
        loss = loss_of(model)
        with torch.no_grad():
            loss.backward()
        return grads(model)

    same(nano.build, scenario)


def test_a_gradient_asked_for_at_an_output_passes_there():
    class WithHidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build(layers=3)

        def forward(self, ids):
            hidden = [self.inner.embed(ids)]
            for layer in self.inner.layers:
                hidden.append(layer(hidden[-1]))
            hidden.append(self.inner.norm(hidden[-1]))
            return hidden, self.inner.head(hidden[-1])

    def scenario(model):
        ids = batch()[0]
        hidden, logits = model(ids)
        for value in hidden:
            value.retain_grad()
        hidden[-1].register_hook(lambda grad: 2 * grad)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        return grads(model) | {f"hidden {i}": _copy(h.grad) for i, h in enumerate(hidden)}

    for segment_layers in (1, 2):
        same(WithHidden, scenario, segment_layers=segment_layers)
