"""x-transformers: one wrapper and one decoder class with a switch for each published idea."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..options import HEADS, LAYERS, VOCAB, WIDTH, OptionSet

REQUIREMENTS = ("x-transformers",)
IMPORTS = "x_transformers"

# Switches of the decoder. Each option set is one idea, or two that are used together.
_DECODER: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "rotary-xpos": {"rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True},
    "t5-bias": {"rel_pos_bias": True},
    "dynamic-bias": {"dynamic_pos_bias": True},
    "data-dependent-alibi": {"attn_data_dependent_alibi": True},
    "polar": {"polar_pos_emb": True},
    "cope": {"attn_use_cope": True},
    "flash": {"attn_flash": True, "rotary_pos_emb": True},
    "flash-alibi": {"attn_flash": True, "alibi_pos_bias": True},
    "memory-kv": {"attn_num_mem_kv": 3},
    "value-residual": {"add_value_residual": True},
    "shift-tokens": {"shift_tokens": 1},
    "glu": {"ff_glu": True, "ff_swish": True, "ff_no_bias": True},
    "relu-squared": {"ff_relu_squared": True},
    "one-kv-head": {"attn_one_kv_head": True},
    "grouped-kv": {"attn_kv_heads": 2, "rotary_pos_emb": True},
    "talking-heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "sandwich": {"sandwich_coef": 1},
    "sandwich-norm": {"sandwich_norm": True},
    "macaron": {"macaron": True},
    "gated-attention": {"attn_gate_values": True},
    "gated-heads": {"attn_gate_value_heads": True},
    "output-gate": {"attn_output_gate": True},
    "on-attention": {"attn_on_attn": True},
    "qk-norm": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "qk-rmsnorm": {"attn_qk_rmsnorm": True},
    "sliding-window": {"attn_max_attend_past": 6},
    "sparse-topk": {"attn_sparse_topk": 3},
    "sigmoid-attention": {"attn_sigmoid": True},
    "selective-attention": {"attn_selective": True},
    "residual-attention": {"residual_attn": True},
    "head-sink": {"attn_head_learned_sink": True},
    "softclamp": {"attn_softclamp_logits": True},
    "laser": {"attn_laser": True},
    "l2-distance": {"attn_l2_distance": True},
    "latent-kv": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 16},
    "rmsnorm": {"use_rmsnorm": True},
    "dynamic-tanh": {"use_dynamic_tanh": True},
    "gated-residual": {"gate_residual": True},
    "hyper-connections": {"num_residual_streams": 2},
    "attention-residuals": {
        "attn_aggregated_residuals": True,
        "attn_aggregated_residual_kwargs": {"lora_rank": 8},
    },
    "integrated-layers": {"integrate_layers": True},
    "unet-skips": {"unet_skips": True, "depth": 4},
    "tied-layers": {"weight_tie_layers": True},
}

# Switches of the wrapper around the decoder.
_WRAPPER: dict[str, dict[str, Any]] = {
    "memory-tokens": {"num_memory_tokens": 4},
    "memory-tokens-interspersed": {"num_memory_tokens": 2, "memory_tokens_interspersed_every": 8},
    "sinusoidal": {"scaled_sinu_pos_emb": True},
    "mixture-of-softmax": {"mixture_of_softmax": True},
    "tied-embedding": {"tie_embedding": True, "l2norm_embed": True},
}


def option_sets() -> list[OptionSet]:
    builds = {name: functools.partial(_build, decoder=on) for name, on in _DECODER.items()}
    builds |= {name: functools.partial(_build, wrapper=on) for name, on in _WRAPPER.items()}
    return [OptionSet(name, build, widen=IMPORTS) for name, build in builds.items()]


def _build(decoder: dict[str, Any] | None = None, wrapper: dict[str, Any] | None = None) -> Any:
    from x_transformers import Decoder, TransformerWrapper

    shape = {"dim": WIDTH, "depth": LAYERS, "heads": HEADS, "attn_dim_head": WIDTH // HEADS}
    layers: nn.Module = Decoder(**(shape | (decoder or {})))
    return TransformerWrapper(
        num_tokens=VOCAB, max_seq_len=64, attn_layers=layers, **(wrapper or {})
    )
