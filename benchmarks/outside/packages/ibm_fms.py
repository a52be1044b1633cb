"""ibm-fms: the published families, each a class of its own over shared building blocks."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ..options import HEADS, LAYERS, VOCAB, WIDTH, OptionSet

REQUIREMENTS = ("ibm-fms",)
IMPORTS = "fms.models"

_SMALL = {"src_vocab_size": VOCAB, "emb_dim": WIDTH, "nheads": HEADS, "nlayers": LAYERS,
          "max_expected_seq_len": 64}  # fmt: skip
_GROUPED = {**_SMALL, "kvheads": 2, "multiple_of": 16, "hidden_grow_factor": 2.0}
_HEAD = {"head_dim": WIDTH // HEADS}

# Module, class, and sizes; the configuration's class is named after the model's.
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LLaMA", _GROUPED),
    "llama-unfused": ("llama", "LLaMA", {**_GROUPED, "fused_weights": False, "attn_bias": True}),
    "gpt-bigcode": ("gpt_bigcode", "GPTBigCode", {**_SMALL, "pad_id": -1}),
    "granite": ("granite", "Granite", {**_GROUPED, **_HEAD, "residual_multiplier": 0.22,
                                       "embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    "mistral": ("mistral", "Mistral", {**_GROUPED, **_HEAD, "sliding_window": 6}),
    "qwen3": ("qwen3", "Qwen3", {**_GROUPED, **_HEAD}),
    "mixtral": ("mixtral", "Mixtral", {
        "src_vocab_size": VOCAB, "dim": WIDTH, "nheads": HEADS, "kvheads": 2, "nlayers": LAYERS,
        "hidden_dim": 48, "num_experts": 4, "top_k_experts": 2, "max_expected_seq_len": 64}),
    "gpt-oss": ("gpt_oss", "GptOss", {
        "src_vocab_size": VOCAB, "emb_dim": WIDTH, "nheads": HEADS, "nlayers": LAYERS,
        "head_dim": 64, "kvheads": 2, "num_experts": 4, "num_attention_heads": HEADS,
        "sliding_window": 6}),
}  # fmt: skip


def option_sets() -> list[OptionSet]:
    return [
        OptionSet(family, functools.partial(_build, *described), widen="fms")
        for family, described in _FAMILIES.items()
    ]


def _build(module: str, name: str, sizes: dict[str, Any]) -> Any:
    models = importlib.import_module(f"fms.models.{module}")
    config = getattr(models, f"{name}Config")(**sizes)
    model = getattr(models, name)(config)
    model.reset_parameters()  # until then some weights are uninitialised memory
    return model
