"""torchtune: a transformer decoder that each family's builder puts together in its own way."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ..options import HEADS, LAYERS, VOCAB, WIDTH, OptionSet

# The release has not followed torchao, whose nf4tensor has moved since.
REQUIREMENTS = ("torchtune", "torchao<0.12")
IMPORTS = "torchtune.models"

_SMALL = {"vocab_size": VOCAB, "num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": 2,
          "embed_dim": WIDTH, "max_seq_len": 64, "intermediate_dim": 48}  # fmt: skip
_HEAD = {"head_dim": WIDTH // HEADS}

# The family, and what its builder needs besides.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3": {},
    "llama3_1": {},
    "llama3_2": {},
    "mistral": {},
    "gemma": {**_HEAD, "num_kv_heads": 1},
    "gemma2": {**_HEAD, "sliding_window_size": 6, "query_pre_attn_scalar": 8},
    "phi3": {},
    "qwen2": {},
}


def option_sets() -> list[OptionSet]:
    return [
        OptionSet(family, functools.partial(_build, family, more), widen="torchtune")
        for family, more in _FAMILIES.items()
    ]


def _build(family: str, more: dict[str, Any]) -> Any:
    builders = importlib.import_module(f"torchtune.models.{family}._component_builders")
    return getattr(builders, family)(**(_SMALL | more))
