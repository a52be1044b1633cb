"""The planner's longest sequences for published models on one 80 GB device, in a table.

Writes ``docs/planning.md``. Nothing is downloaded: the sizes are those that the models' authors
publish, and the step is rehearsed on tensors without storage. What StreamBP reaches stands beside
it, as its authors give it (arXiv 2506.03077, one A800 with 80 GB).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch

import seqsplit

from . import common

SIZES = {
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": True},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32},
    "Qwen3-14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
                  "num_attention_heads": 40},
    "Qwen3-32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
                  "num_attention_heads": 64},
}  # fmt: skip
COMMON = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """A way of training a model, and how long StreamBP's sequences are in it."""

    model: str
    way: str
    lora: bool
    published: int | None


CASES = (
    Case("Qwen3-4B", "weights and gradients", False, None),
    Case("Qwen3-8B", "weights and gradients", False, 110_000),
    Case("Qwen3-4B", "LoRA", True, 247_000),
    Case("Qwen3-8B", "LoRA", True, 142_400),
    Case("Qwen3-14B", "LoRA", True, 84_600),
    Case("Qwen3-32B", "LoRA", True, 16_300),
)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    screen = common.Screen()
    lines = HEADER.splitlines()
    names: list[str] = []
    with screen.progress("planning", len(CASES)) as begin:
        for case in CASES:
            begin(f"{case.model}, {case.way}")
            found = seqsplit.plan(
                make_model(case),
                seq_len=131_072,
                memory=options.memory,
                optimizer="none",
                accumulate=not case.lora,
            )
            if not names:
                names = [choice.name for choice in found.choices]
                lines += ["", row("model", "trained", "resident", "StreamBP", *names)]
                lines += ["|" + " --- |" * (4 + len(names))]
            resident = found.weight_bytes + found.choices[0].parts.gradients
            published = f"{case.published:,}" if case.published else "–"
            longest = [f"{choice.longest:,}" for choice in found.choices]
            size = f"{resident / 2**30:.1f} GiB"
            lines.append(row(case.model, case.way, size, published, *longest))
            (common.ROOT / "docs" / "planning.md").write_text("\n".join(lines) + "\n")
    screen.say("\n".join(lines[-len(CASES) - 2 :]))
    screen.say("written: docs/planning.md")
    return 0


HEADER = """\
# How long a sequence fits

Tokens of the longest sequence (batch of one, bfloat16) on a device with 80 GB, of which 3% are
left alone, as `seqsplit.plan` predicts them under each schedule; written by `make planning`. The
optimizer's states are not counted, as in StreamBP's measurement of the backward alone; under
"weights and gradients" all gradients are there from the beginning of the step. StreamBP's
figures are its authors' (arXiv 2506.03077, tables for one A800 with 80 GB: the backward alone for
full training, SFT for LoRA). The planner's own error is measured by `tests/test_planner.py`.
"""


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def make_model(case: Case) -> Any:
    """The configuration of a model, or the model with adapters, without storage."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(**{**COMMON, **SIZES[case.model]})
    if not case.lora:
        return config
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        adapters = LoraConfig(
            r=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        return get_peft_model(model, adapters, autocast_adapter_dtype=False).train()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    options.add_argument("--memory", default="80GB", help="of the device")
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
