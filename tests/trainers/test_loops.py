"""Training loops of one's own, with what people put into them."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from common import (
    LEARNING_RATE,
    STEPS,
    Outcome,
    add_seqsplit,
    batches,
    check_all_split,
    check_both,
    check_layers_split,
    check_moved,
    sgd,
    tiny_model,
    trained,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def step_in_backward(model):
    """An optimizer for each parameter, which steps as soon as its gradient is complete."""
    optimizers = {p: torch.optim.SGD([p], lr=LEARNING_RATE) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def labelled_loss(model, batch):
    """The loss that the model computes."""
    return model(**batch).loss


def cross_entropy(logits, labels):
    """The mean over tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_of_logits(model, batch, function=cross_entropy):
    """The same loss from the logits."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return function(logits, batch["labels"])


@pytest.mark.parametrize("tied, loss_of", [(False, labelled_loss), (True, loss_of_logits)])
def test_optimizer_in_backward(tied, loss_of, plans):
    def train(add_line):
        model = tiny_model(tie_word_embeddings=tied)
        add_line(model)
        before, numbers = trained(model), []
        step_in_backward(model)
        for batch in batches():
            loss = loss_of(model, batch)
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
            numbers.append({"loss": loss.item()})
        return Outcome(trained(model), numbers, before)

    check_both(train)
    check_all_split(plans)


def test_moving_average(plans):
    """The average is a copy, which evaluates without seqsplit, and has the same values."""

    def train(add_line):
        model = tiny_model()
        add_line(model)
        before, numbers = trained(model), []
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = sgd(model)
        for batch in batches():
            loss = labelled_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            with torch.no_grad():
                averaged = labelled_loss(average, batch)
            numbers.append({"loss": loss.item(), "averaged": averaged.item()})
        assert average.module._compiled_call_impl is None
        check_moved(Outcome(trained(model), before=before))
        return Outcome(trained(model) | trained(average), numbers)

    check_both(train)
    check_all_split(plans)


def accuracy(logits, labels):
    """The share of right predictions, and the entropy of the predictions, as people log them."""
    counted = labels[:, 1:] != -100
    right = (logits[:, :-1].argmax(dim=-1) == labels[:, 1:]) & counted
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    return {
        "accuracy": (right.sum() / counted.sum()).item(),
        "entropy": entropy[counted].mean().item(),
    }


def test_scaler_with_metrics(plans):
    """A gradient scaler, clipping, accumulation, and metrics of the logits in each step."""

    def train(add_line):
        model = tiny_model("qwen3")
        add_line(model)
        before, numbers, optimizer = trained(model), [], sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        for index, batch in enumerate(batches(2 * STEPS)):
            output = model(**batch)
            scaler.scale(output.loss / 2).backward()
            numbers.append({"loss": output.loss.item(), "scale": scaler.get_scale()})
            numbers[-1] |= accuracy(output.logits.detach(), batch["labels"])
            if index % 2:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                numbers[-1]["norm"] = norm.item()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return Outcome(trained(model), numbers, before)

    expected, _ = check_both(train)
    assert expected.numbers[-1]["scale"] > expected.numbers[0]["scale"]
    check_all_split(plans)


def fit(model, loss_of, context=None):
    """A loop, with a context around each forward."""
    before, numbers, optimizer = trained(model), [], sgd(model)
    for batch in batches():
        with context or contextlib.nullcontext():
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers.append({"loss": loss.item()})
    return Outcome(trained(model), numbers, before)


class ToArrays(torch.autograd.graph.saved_tensors_hooks):
    """What is saved for the backward leaves PyTorch, as if it went to a disk."""

    def __init__(self):
        self.count = 0
        super().__init__(self.pack, torch.from_numpy)

    def pack(self, tensor):
        self.count += 1
        return tensor.detach().numpy().copy()


def test_save_on_cpu(plans):
    def train(add_line):
        model = tiny_model()
        add_line(model)
        return fit(model, labelled_loss, torch.autograd.graph.save_on_cpu())

    check_both(train)
    check_all_split(plans)


@pytest.mark.parametrize("loss_of", [labelled_loss, loss_of_logits])
def test_saved_as_arrays(loss_of, plans):
    """Hooks that need the values of what they are given."""

    def train(add_line):
        model, hooks = tiny_model(), ToArrays()
        add_line(model)
        outcome = fit(model, loss_of, hooks)
        assert hooks.count > 0
        return outcome

    check_both(train)
    check_all_split(plans)


def saves_at(model, length):
    """How many tensors the forward saves."""
    hooks = ToArrays()
    with hooks:
        loss = labelled_loss(model, batches(1, low=length, high=length)[0])
    loss.backward()
    return hooks.count


def test_saves_do_not_grow_with_the_chunks():
    """What a chunk saves for itself is gone when it has run: it is not to be sent away."""
    model = add_seqsplit(tiny_model())
    labelled_loss(model, batches(1)[0]).backward()
    assert saves_at(model, 40) == saves_at(model, 80)


def offloading(model, monkeypatch):
    """TRL's context, which refuses to be made without an accelerator: the CPU stands in for one."""
    manager = pytest.importorskip("trl.models.activation_offloading")
    options = {"use_pin_memory": False, "use_streams": False, "min_offload_size": 0}
    # It empties the accelerator's cache now and then; the CPU has none.
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
        return manager.get_act_offloading_ctx_manager(model, **options)


def test_activation_offloading(monkeypatch, plans):
    """TRL counts what it has stored: all of it is to be fetched in the backward."""

    def train(add_line):
        model = tiny_model()
        add_line(model)
        context = offloading(model, monkeypatch)
        outcome = fit(model, labelled_loss, context)
        assert not context.tracker, f"{len(context.tracker)} tensors are kept for ever"
        return outcome

    check_both(train)
    check_layers_split(plans)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_loss():
    """The loss function goes through torch.compile, the model through seqsplit."""

    def train(add_line):
        model = tiny_model()
        add_line(model)
        compiled = torch.compile(cross_entropy, backend="aot_eager", dynamic=True)
        return fit(model, lambda model, batch: loss_of_logits(model, batch, compiled))

    check_both(train)
