"""Peak memory of one training step inside the trainers people use, with and without seqsplit.

Writes ``docs/trainers.md``. The trainers are those of ``tests/trainers``, which compare losses,
metrics and weights; here sequences are longer and the vocabulary larger, and the second step is
tracked (the first compiles).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch

from seqsplit import compile as compile_model
from seqsplit import track_memory

from .common import ROOT, Screen, mib

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "trainers")]
PAGE = ROOT / "docs" / "trainers.md"
LENGTH, VOCAB, CHUNK = 1500, 8192, 128
NAMES = (
    "transformers Trainer",
    "transformers Trainer, LoRA",
    "TRL SFTTrainer",
    "TRL DPOTrainer",
    "TRL GRPOTrainer",
    "TRL RewardTrainer",
    "Accelerate",
    "Lightning",
)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--one", nargs=2, metavar=("TRAINER", "WITH"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        warnings.simplefilter("ignore")
        name, with_line = given.one
        print("RESULT " + json.dumps(peak_bytes(name, with_line == "with")))
        return 0
    found: dict[str, dict[str, int]] = {}
    with Screen().progress("trainers", 2 * len(NAMES)) as begin:
        for name in NAMES:
            for kind in ("without", "with"):
                begin(f"{name}, {kind}")
                found.setdefault(name, {})[kind] = in_a_process(name, kind)
    PAGE.write_text(page(found))
    return 0 if all(each["with"] < each["without"] for each in found.values()) else 1


def in_a_process(name: str, kind: str) -> int:
    command = [sys.executable, "-m", "benchmarks.trainers", "--one", name, kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{name}, {kind}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


class Tracked:
    """Calls a function; its second call is tracked."""

    def __init__(self, function: Callable) -> None:
        self._function, self._calls = function, 0
        self.peak = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls != 2:
            return self._function(*args, **kwargs)
        with track_memory() as memory:
            result = self._function(*args, **kwargs)
        self.peak = memory.peak_bytes
        return result


def peak_bytes(name: str, with_line: bool) -> int:
    import common

    def add_line(model: Any) -> Any:
        return compile_model(model, chunk_size=CHUNK) if with_line else model

    model = common.tiny_model(vocab_size=VOCAB, max_position_embeddings=2 * LENGTH)
    if name == "Accelerate":
        return accelerate_peak(common, add_line(model))
    if name == "Lightning":
        return lightning_peak(common, add_line(model))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(name, common, model, add_line, folder)
        trainer.training_step = tracked = Tracked(trainer.training_step)
        trainer.train()
    return tracked.peak


def make_trainer(name: str, common: Any, model: Any, add_line: Callable, folder: str) -> Any:
    import datasets
    import peft
    import transformers
    import trl

    def texts(seed: int, length: int = LENGTH) -> list[str]:
        return common.random_texts(8, length, length, seed=seed)

    def arguments(kind: type, **more: Any) -> Any:
        return common.trainer_arguments(kind, folder, max_steps=2, **more)

    tokenizer = common.tiny_tokenizer()
    shared = {"processing_class": tokenizer}
    if name.startswith("transformers"):
        if name.endswith("LoRA"):
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        return transformers.Trainer(
            add_line(model),
            arguments(transformers.TrainingArguments),
            train_dataset=common.token_rows(8, LENGTH, LENGTH),
            data_collator=common.collate,
        )
    if name == "TRL SFTTrainer":
        data = datasets.Dataset.from_dict({"text": texts(0)})
        settings = arguments(trl.SFTConfig, max_length=None)
        return trl.SFTTrainer(add_line(model), settings, train_dataset=data, **shared)
    if name == "TRL GRPOTrainer":
        data = datasets.Dataset.from_dict({"prompt": texts(0, LENGTH)})
        settings = arguments(
            trl.GRPOConfig,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=64,
        )
        return trl.GRPOTrainer(
            add_line(model),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=settings,
            train_dataset=data,
            **shared,
        )
    half = LENGTH // 2
    data = datasets.Dataset.from_dict(
        {"prompt": texts(0, half), "chosen": texts(1, half), "rejected": texts(2, half)}
    )
    if name == "TRL DPOTrainer":
        settings = arguments(trl.DPOConfig, max_length=None)
        reference = common.tiny_model(vocab_size=VOCAB, max_position_embeddings=2 * LENGTH)
        return trl.DPOTrainer(
            add_line(model), add_line(reference), settings, train_dataset=data, **shared
        )
    kind = transformers.AutoModelForSequenceClassification
    scorer = common.tiny_model(
        auto=kind, vocab_size=VOCAB, max_position_embeddings=2 * LENGTH, num_labels=1
    )
    settings = arguments(trl.RewardConfig, max_length=None)
    return trl.RewardTrainer(add_line(scorer), args=settings, train_dataset=data, **shared)


def batches(common: Any) -> list[dict[str, Any]]:
    return common.batches(2, low=LENGTH, high=LENGTH)


def accelerate_peak(common: Any, model: Any) -> int:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, common.sgd(model))

    def step(batch: dict[str, Any]) -> None:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

    tracked = Tracked(step)
    for batch in batches(common):
        tracked(batch)
    return tracked.peak


def lightning_peak(common: Any, model: Any) -> int:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.automatic_optimization = False

        def training_step(self, batch: dict[str, Any], index: int) -> None:
            tracked(batch)

        def configure_optimizers(self) -> Any:
            return common.sgd(self)

    def step(batch: dict[str, Any]) -> None:
        module.manual_backward(module.model(**batch).loss)
        module.optimizers().step()
        module.optimizers().zero_grad()

    module, tracked = Module(), Tracked(step)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(common), batch_size=None))
    return tracked.peak


def page(found: dict[str, dict[str, int]]) -> str:
    rows = "\n".join(
        f"| {name} | {mib(each['with'])} | {mib(each['without'])} "
        f"| {each['without'] / each['with']:.1f} |"
        for name, each in found.items()
    )
    return f"""# Trainers

Written by `make trainers`; not by hand. Each trainer runs unmodified, with one line added:
`seqsplit.compile(model)`. That losses, metrics and weights are the same is tested in
`tests/trainers/`. Here is the peak of tracked memory in one step (bytes above what was alive before
it, generation included for GRPO): a random decoder of two layers, hidden 32, vocabulary {VOCAB},
float32, two sequences of {LENGTH} tokens.

| trainer | with seqsplit | without | ratio |
| --- | --- | --- | --- |
{rows}

TRL's SFT, DPO and GRPO trainers bring a head of their own, which never holds the logits, but takes
a buffer of 32,768 columns for up to 4,096 tokens, whatever the vocabulary: next to it, what the
layers of this small model save is little.
"""


if __name__ == "__main__":
    sys.exit(main())
