"""ai2-olmo: one class whose configuration covers several published decoders."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ..options import HEADS, LAYERS, VOCAB, WIDTH, OptionSet

# It imports a library that it does not require, of which only older releases take its numpy.
REQUIREMENTS = ("ai2-olmo", "datasets<4", "pyarrow<20")
IMPORTS = "olmo.model"

_SWITCHES: dict[str, dict[str, Any]] = {
    "gpt2-style": {},
    "rope": {"rope": True, "layer_norm_type": "rms", "include_bias": False},
    "alibi": {"alibi": True},
    "grouped-kv": {"rope": True, "n_kv_heads": 2, "weight_tying": False},
    "one-kv-head": {"rope": True, "n_kv_heads": 1},
    "llama-blocks": {"rope": True, "block_type": "llama", "layer_norm_type": "rms"},
    "qk-norm": {"rope": True, "attention_layer_norm": True, "norm_after": True},
    "clipped": {"rope": True, "clip_qkv": 2.0, "scale_logits": True},
}


def option_sets() -> list[OptionSet]:
    return [
        OptionSet(name, functools.partial(_build, switches), _logits, widen="olmo")
        for name, switches in _SWITCHES.items()
    ]


def _logits(output: Any) -> Tensor:
    return output.logits


def _build(switches: dict[str, Any]) -> Any:
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    config = ModelConfig(
        d_model=WIDTH, n_heads=HEADS, n_layers=LAYERS, mlp_ratio=2, vocab_size=VOCAB,
        embedding_size=VOCAB, max_sequence_length=64, eos_token_id=0, pad_token_id=0,
        attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0, init_device="cpu",
        **switches,
    )  # fmt: skip
    return OLMo(config)
