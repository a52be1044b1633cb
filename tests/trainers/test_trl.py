"""The trainers of TRL, unchanged but for `seqsplit.compile(model)`."""

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import datasets
import peft
import torch
import transformers
import trl

from common import (
    add_nothing,
    add_seqsplit,
    check_all_split,
    check_both,
    random_texts,
    run_trainer,
    tiny_model,
    tiny_tokenizer,
    trainer_arguments,
)

ROWS = 8


def plain_texts():
    return datasets.Dataset.from_dict({"text": random_texts(ROWS)})


def prompts_with_completions():
    columns = {
        "prompt": random_texts(ROWS, 20, 40, seed=1),
        "completion": random_texts(ROWS, 20, 40, seed=2),
    }
    return datasets.Dataset.from_dict(columns)


def preferences():
    columns = {
        "prompt": random_texts(ROWS, 10, 20, seed=1),
        "chosen": random_texts(ROWS, 20, 50, seed=2),
        "rejected": random_texts(ROWS, 20, 50, seed=3),
    }
    return datasets.Dataset.from_dict(columns)


def check_trainer(make_trainer, plans, *, make_model=tiny_model, **options):
    """Train twice with `make_trainer(model)`; returns both outcomes."""

    def train(add_line):
        model = make_model()
        add_line(model)
        return run_trainer(make_trainer(model))

    outcomes = check_both(train, **options)
    check_all_split(plans)
    return outcomes


SFT = {
    "plain": (plain_texts, {"gradient_accumulation_steps": 2}),
    "completions": (prompts_with_completions, {"completion_only_loss": True}),
    "packing": (plain_texts, {"packing": True, "max_length": 96}),
    "padding-free": (plain_texts, {"padding_free": True}),
    "dft": (plain_texts, {"loss_type": "dft"}),
    "activation offloading": (plain_texts, {"activation_offloading": True}),
}


@pytest.mark.parametrize("name", SFT)
def test_sft(name, tmp_path, plans):
    data, arguments = SFT[name]

    def make(model):
        return trl.SFTTrainer(
            model=model,
            args=trainer_arguments(trl.SFTConfig, tmp_path, **arguments),
            train_dataset=data(),
            processing_class=tiny_tokenizer(),
        )

    expected, _ = check_trainer(make, plans)
    assert {"mean_token_accuracy", "entropy"} <= set(expected.numbers[0])
