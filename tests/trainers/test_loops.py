"""Training loops of one's own, with what people put into them."""

import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common import (
    LEARNING_RATE,
    STEPS,
    Outcome,
    batches,
    check_all_split,
    check_both,
    check_moved,
    sgd,
    tiny_model,
    trained,
)


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


def loss_of_logits(model, batch):
    """The same loss from the logits."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


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


class Packing(torch.autograd.graph.saved_tensors_hooks):
    """What is saved for the backward goes elsewhere, as with offloading to disk."""

    def __init__(self):
        self.count = 0
        super().__init__(self.pack, lambda array: torch.from_numpy(array))

    def pack(self, tensor):
        self.count += 1
        return tensor.detach().numpy().copy()


HOOKS = {"save_on_cpu": torch.autograd.graph.save_on_cpu, "packing": Packing}


@pytest.mark.parametrize(
    "name, loss_of",
    [("save_on_cpu", labelled_loss), ("packing", labelled_loss), ("packing", loss_of_logits)],
)
def test_saved_tensor_hooks(name, loss_of, plans):
    """Contexts that move what autograd saves."""

    def train(add_line):
        model = tiny_model()
        add_line(model)
        before, numbers, optimizer = trained(model), [], sgd(model)
        for batch in batches():
            context = HOOKS[name]()
            with context:
                loss = loss_of(model, batch)
            assert name != "packing" or context.count > 0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            numbers.append({"loss": loss.item()})
        return Outcome(trained(model), numbers, before)

    check_both(train)
    check_all_split(plans)
