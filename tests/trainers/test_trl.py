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
    check_both,
    check_layers_split,
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
    check_layers_split(plans)
    return outcomes


# Activation offloading is not here: TRL's needs an accelerator. See test_loops.py.
SFT = {
    "plain": (plain_texts, {"gradient_accumulation_steps": 2}),
    "completions": (prompts_with_completions, {"completion_only_loss": True}),
    "packing": (plain_texts, {"packing": True, "max_length": 96}),
    "padding-free": (plain_texts, {"padding_free": True, "max_length": None}),
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


LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def lora():
    """A configuration of LoRA, from a random start that is not zero."""
    return peft.LoraConfig(**LORA, task_type="CAUSAL_LM", init_lora_weights=False)


def reference_model():
    """Another model than the one that is trained."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model


def dpo_trainer(model, folder, **options):
    return trl.DPOTrainer(
        model=model,
        args=trainer_arguments(trl.DPOConfig, folder, beta=1.0),
        train_dataset=preferences(),
        processing_class=tiny_tokenizer(),
        **options,
    )


def test_dpo(tmp_path, plans):
    """With a reference model, which is compiled as well."""

    def train(add_line):
        model, reference = tiny_model(), reference_model()
        add_line(model)
        add_line(reference)
        return run_trainer(dpo_trainer(model, tmp_path, ref_model=reference))

    expected, _ = check_both(train)
    assert {"rewards/margins", "logits/chosen", "entropy"} <= set(expected.numbers[0])
    check_layers_split(plans)


def test_dpo_with_adapter(tmp_path, plans):
    """The reference is the model with its adapter switched off."""
    check_trainer(lambda model: dpo_trainer(model, tmp_path, peft_config=lora()), plans)


def test_reward(tmp_path, plans):
    def classifier():
        kind = transformers.AutoModelForSequenceClassification
        return tiny_model(auto=kind, num_labels=1)

    def make(model):
        return trl.RewardTrainer(
            model=model,
            args=trainer_arguments(trl.RewardConfig, tmp_path),
            train_dataset=preferences(),
            processing_class=tiny_tokenizer(),
        )

    expected, _ = check_trainer(make, plans, make_model=classifier)
    assert {"accuracy", "margin"} <= set(expected.numbers[0])


def few_distinct(completions, **_):
    """A reward that differs between completions: how many of their words repeat."""
    return [float(len(text.split()) - len(set(text.split()))) for text in completions]


GRPO = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 24,
    "learning_rate": 1.0,
}
GRPO_KINDS = {
    "plain": {},
    "reference, several updates": {"beta": 0.1, "num_iterations": 2, "entropy_coef": 0.01},
}


class AfterEachStep(transformers.TrainerCallback):
    """Notes how many plans there are after each step."""

    def __init__(self, plans):
        self.plans, self.counts = plans, []

    def on_step_end(self, *args, **kwargs):
        self.counts.append(len(self.plans))


@pytest.mark.parametrize("name", GRPO_KINDS)
def test_grpo(name, tmp_path, plans):
    """Generation, scoring and training in turn, from the same random numbers.

    Prompts and completions are of another length in each step, and only the first step compiles.
    """
    prompts = datasets.Dataset.from_dict({"prompt": random_texts(ROWS, 20, 40)})
    tiny_model().save_pretrained(tmp_path / "start")  # the trainer loads the reference model
    seen = []

    def make(model):
        torch.manual_seed(1)
        seen.append(AfterEachStep(plans))
        return trl.GRPOTrainer(
            model=model,
            reward_funcs=few_distinct,
            args=trainer_arguments(trl.GRPOConfig, tmp_path, **GRPO | GRPO_KINDS[name]),
            train_dataset=prompts,
            processing_class=tiny_tokenizer(),
            callbacks=[seen[-1]],
        )

    def load():
        kind = transformers.AutoModelForCausalLM
        return kind.from_pretrained(tmp_path / "start", dtype=torch.float32).train()

    expected, _ = check_trainer(make, plans, make_model=load)
    assert {"reward", "entropy", "completions/mean_length"} <= set(expected.numbers[0])
    without, with_line = (each.counts for each in seen)
    assert set(without) == {0}
    assert with_line[0] > 0 and set(with_line) == {with_line[0]}
