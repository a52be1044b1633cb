"""local-attention: each position sees its own window of keys and the one before."""

from __future__ import annotations

import functools
from typing import Any

from ..options import HEADS, LAYERS, VOCAB, WIDTH, OptionSet

REQUIREMENTS = ("local-attention",)
IMPORTS = "local_attention"

_SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "xpos": {"use_xpos": True, "xpos_scale_base": 16},
    "dynamic-bias": {"use_dynamic_pos_bias": True},
    "qk-rmsnorm": {"qk_rmsnorm": True},
    "gated-heads": {"gate_values_per_head": True},
    "hyper-connections": {"num_residual_streams": 2},
}


def option_sets() -> list[OptionSet]:
    return [
        OptionSet(name, functools.partial(_build, switches), widen=IMPORTS)
        for name, switches in _SWITCHES.items()
    ]


def _build(switches: dict[str, Any]) -> Any:
    from local_attention import LocalTransformer

    sizes = {"num_tokens": VOCAB, "max_seq_len": 64, "dim": WIDTH, "depth": LAYERS,
             "heads": HEADS, "dim_head": WIDTH // HEADS, "local_attn_window_size": 8,
             "num_residual_streams": 1}  # fmt: skip
    return LocalTransformer(**(sizes | switches))
