"""litgpt: one GPT class, configured in the style of each published family.

The family's own configuration is taken, and only its sizes are made small.
"""

from __future__ import annotations

import functools
from typing import Any

from ..options import HEADS, LAYERS, VOCAB, WIDTH, OptionSet

REQUIREMENTS = ("litgpt",)
IMPORTS = "litgpt.model"

_SMALL = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "head_size": WIDTH // HEADS,
          "block_size": 64, "padded_vocab_size": VOCAB}  # fmt: skip
_GATED = {"intermediate_size": 48}
_GROUPED = {"n_query_groups": 2, **_GATED}

# The configuration's name, and what has to shrink besides.
_STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "pythia": ("pythia-14m", {"intermediate_size": 64, "n_query_groups": HEADS}),
    "llama3": ("Llama-3.2-1B", _GROUPED),
    "gemma2": ("Gemma-2-2b", {**_GROUPED, "sliding_window_size": 6}),
    "gemma3": ("Gemma-3-1b-it", {**_GROUPED, "n_query_groups": 1, "sliding_window_size": 6}),
    "phi2": ("phi-2", {"intermediate_size": 64, "n_query_groups": HEADS}),
    "phi3": ("Phi-3-mini-4k-instruct", {**_GATED, "n_query_groups": HEADS}),
    "falcon": ("falcon-7b", {"intermediate_size": 64, "n_query_groups": 1}),
    "mixtral": ("Mixtral-8x7B-v0.1", {**_GROUPED, "n_expert": 4}),
    "mistral-window": ("Mistral-7B-v0.1", {**_GROUPED, "sliding_window_size": 6}),
    "qwen3": ("Qwen3-0.6B", _GROUPED),
    "qwen3-moe": ("Qwen3-30B-A3B", {**_GROUPED, "n_expert": 4, "n_expert_per_token": 2,
                                    "moe_intermediate_size": 24}),
    "olmo2": ("OLMo-2-1124-7B", {**_GATED, "n_query_groups": HEADS}),
}  # fmt: skip


def option_sets() -> list[OptionSet]:
    return [
        OptionSet(style, functools.partial(_build, name, changes), widen="litgpt")
        for style, (name, changes) in _STYLES.items()
    ]


def _build(name: str, changes: dict[str, Any]) -> Any:
    from litgpt.config import Config
    from litgpt.model import GPT

    return GPT(Config.from_name(name, **(_SMALL | changes)))
