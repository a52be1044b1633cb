"""The Trainer of transformers, unchanged but for `seqsplit.compile(model)`."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import transformers
from common import (
    SMALL,
    STEPS,
    add_nothing,
    add_seqsplit,
    check_all_split,
    check_both,
    check_numbers,
    check_tensors,
    collate,
    run_trainer,
    tiny_model,
    token_rows,
    trainer_arguments,
)
from transformers import Trainer, TrainingArguments

import seqsplit


def make_trainer(model, folder, *, rows=24, trainer=None, **arguments):
    """A trainer with nothing special about it."""
    return Trainer(
        model=model,
        args=trainer_arguments(TrainingArguments, folder, **arguments),
        train_dataset=token_rows(rows),
        data_collator=collate,
        **trainer or {},
    )


VARIANTS = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    # Adam with a larger eps: see common.py.
    "adamw, clipping": {
        "optim": "adamw_torch",
        "adam_epsilon": 1e-3,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
    },
}


@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS.keys())
def test_trainer(arguments, tmp_path, plans):
    def train(add_line):
        model = tiny_model()
        add_line(model)
        return run_trainer(make_trainer(model, tmp_path, **arguments))

    check_both(train)
    check_all_split(plans)


def test_autocast(tmp_path, plans):
    """bf16=True: autocast, in which both runs round to 8 bits, in different orders."""

    def train(add_line):
        model = tiny_model("qwen3")
        add_line(model)
        return run_trainer(make_trainer(model, tmp_path, bf16=True))

    check_both(train, tolerance=2**-8)
    check_all_split(plans)


def accuracy(prediction):
    """A metric that reads what the trainer collected."""
    labels = prediction.label_ids[:, 1:]
    right = prediction.predictions[:, :-1] == labels
    return {"accuracy": float(right[labels != -100].mean())}


def mean_logit(prediction):
    """A metric of all logits."""
    logits = prediction.predictions
    return {"mean": float(logits[..., :5].mean()), "rows": logits.shape[0]}


METRICS = {
    "logits": (mean_logit, None),
    "argmax": (accuracy, lambda logits, labels: logits.argmax(dim=-1)),
}


# A metric of all logits needs all of them, which is warned of.
WHOLE_LOGITS = pytest.mark.filterwarnings("ignore::seqsplit.errors.MaterializedWarning")


@pytest.mark.parametrize("name", [pytest.param("logits", marks=WHOLE_LOGITS), "argmax"])
def test_evaluation(name, tmp_path):
    """Evaluation after each step, of batches of different lengths, which the trainer pads and
    joins: a metric of all logits, and one of what a function makes of them."""
    metric, preprocess = METRICS[name]
    given = {
        "eval_dataset": token_rows(5, seed=1),
        "compute_metrics": metric,
        "preprocess_logits_for_metrics": preprocess,
    }

    def train(add_line):
        model = tiny_model()
        add_line(model)
        evaluation = {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "per_device_eval_batch_size": 2,
        }
        trainer = make_trainer(model, tmp_path, trainer=given, **evaluation)
        outcome = run_trainer(trainer)
        assert sum("eval_loss" in entry for entry in outcome.numbers) == STEPS
        return outcome

    check_both(train)


@WHOLE_LOGITS
def test_predict(tmp_path):
    """`predict` returns the logits."""
    found = []
    for add_line in (add_nothing, add_seqsplit):
        model = tiny_model()
        add_line(model)
        rows = token_rows(5, low=60, high=60, seed=1)
        found.append(make_trainer(model, tmp_path).predict(rows))
    eager, mine = (torch.from_numpy(result.predictions) for result in found)
    check_tensors({"logits": eager}, {"logits": mine})


def files_in(folder):
    """The bytes of the weights' files."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_saved_files(tmp_path):
    """Before any step the files are the same, byte by byte, and the names in the state too."""
    model, plain = tiny_model(), tiny_model()
    seqsplit.compile(model, **SMALL)
    assert list(model.state_dict()) == list(plain.state_dict())
    for kind, each in (("mine", model), ("plain", plain)):
        each.save_pretrained(tmp_path / kind)
    assert files_in(tmp_path / "mine") == files_in(tmp_path / "plain") != {}
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "mine" / name).read_text() == (tmp_path / "plain" / name).read_text()


def test_plain_and_saved(tmp_path, plans):
    """No options; what a compiled model has learnt loads without seqsplit."""

    def train(add_line):
        model = tiny_model()
        add_line(model)
        trainer = make_trainer(model, tmp_path)
        outcome = run_trainer(trainer)
        folder = tmp_path / add_line.__name__
        trainer.save_model(str(folder))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert loaded._compiled_call_impl is None
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
        return outcome

    check_both(train)
    check_all_split(plans)


def test_resume(tmp_path):
    """Saved after two steps and resumed, by a compiled model too; eager resumes what it saved."""

    def train(add_line):
        model = tiny_model()
        add_line(model)
        folder = tmp_path / add_line.__name__
        saving = {"save_strategy": "steps", "save_steps": 2}
        make_trainer(model, folder, max_steps=2, **saving).train()
        again = tiny_model()
        add_line(again)
        trainer = make_trainer(again, folder, max_steps=4)
        return run_trainer(trainer, resume_from_checkpoint=str(folder / "checkpoint-2"))

    expected, actual = check_both(train)
    model = tiny_model()
    checkpoint = str(tmp_path / "add_seqsplit" / "checkpoint-2")
    crossed = run_trainer(
        make_trainer(model, tmp_path, max_steps=4), resume_from_checkpoint=checkpoint
    )
    check_numbers(expected.numbers, crossed.numbers)
    check_tensors(expected.weights, crossed.weights)


LONG, LARGE_VOCAB = 1024, 2000


def step_peak(add_line, folder):
    """Peak memory of the second `training_step`, the first having compiled."""
    model = tiny_model(vocab_size=LARGE_VOCAB)
    if add_line is add_seqsplit:
        seqsplit.compile(model, chunk_size=128)
    trainer = make_trainer(model, folder)
    batch = collate(token_rows(2, low=LONG, high=LONG, vocab=LARGE_VOCAB))
    count = (batch["labels"] != -100).sum()
    model.train()
    trainer.training_step(model, dict(batch), num_items_in_batch=count)
    model.zero_grad(set_to_none=True)
    with seqsplit.track_memory() as memory:
        trainer.training_step(model, dict(batch), num_items_in_batch=count)
    return memory.peak_bytes


def test_memory(tmp_path):
    """A step of the trainer at a longer length needs a third of the memory."""
    mine, eager = (step_peak(line, tmp_path) for line in (add_seqsplit, add_nothing))
    assert mine < eager / 3, (mine, eager)
