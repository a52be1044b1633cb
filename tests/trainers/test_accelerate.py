"""Accelerate's training loop, unchanged but for `seqsplit.compile(model)`."""

import pytest

pytest.importorskip("accelerate")

import accelerate
import torch
from accelerate.state import AcceleratorState
from common import (
    STEPS,
    Outcome,
    check_all_split,
    check_both,
    check_tensors,
    collate,
    sgd,
    tiny_model,
    token_rows,
    trained,
)


@pytest.fixture(autouse=True)
def fresh_state():
    """An accelerator's settings are global: other tests are to have their own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def loop(accelerator, model, steps):
    """The loop of Accelerate's documentation. `steps` counts batches."""
    loader = torch.utils.data.DataLoader(token_rows(2 * steps), batch_size=2, collate_fn=collate)
    before, numbers = trained(model), []
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                numbers.append({"norm": norm.item()})
            optimizer.step()
            optimizer.zero_grad()
        numbers.append({"loss": accelerator.gather(loss.detach()).mean().item()})
    return Outcome(trained(accelerator.unwrap_model(model)), numbers, before)


def test_accumulate_and_clip(plans):
    def train(add_line):
        model = tiny_model()
        add_line(model)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        return loop(accelerator, model, 2 * STEPS)

    check_both(train)
    check_all_split(plans)


def test_line_after_prepare(plans):
    """The line works on a prepared model as well."""

    def train(add_line):
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(tiny_model("qwen3"))
        add_line(model)
        return loop(accelerator, model, STEPS)

    check_both(train)
    check_all_split(plans)


def test_autocast(plans):
    """Mixed precision: `prepare` replaces the model's forward, and turns its outputs to float32.
    Both runs round to 8 bits, in different orders."""

    def train(add_line):
        model = tiny_model()
        add_line(model)
        return loop(accelerate.Accelerator(cpu=True, mixed_precision="bf16"), model, STEPS)

    check_both(train, tolerance=2**-8)
    check_all_split(plans)


def test_saved_state(tmp_path):
    """What is saved loads, and `unwrap_model` and `get_state_dict` return what they should."""
    model = tiny_model()
    accelerator = accelerate.Accelerator(cpu=True)

    def train(add_line):
        model = tiny_model()
        add_line(model)
        outcome = loop(accelerator, model, STEPS)
        assert accelerator.unwrap_model(model) is model
        folder = tmp_path / add_line.__name__
        accelerator.save_model(model, folder)
        outcome.weights = accelerator.get_state_dict(model)
        return outcome

    _, actual = check_both(train)
    accelerate.load_checkpoint_in_model(model, tmp_path / "add_seqsplit")
    check_tensors(actual.weights, model.state_dict(), tolerance=0)
