"""Tiny configurations of any class, made from its default one by the meaning of its fields.

Nothing here knows a model: a field is given a small value if it has one of the names by which
configurations call that quantity. Several attempts are made, since some classes tie sizes to
each other; the first that builds and runs in eager counts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

VOCAB = 61
MAX_POSITIONS = 128

# What a quantity is called, and its small value. Widths are multiples of all head counts.
_SMALL: dict[int | float | bool, tuple[str, ...]] = {
    VOCAB: ("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"),
    48: ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "model_dim", "embedding_size",
         "word_embed_proj_dim", "decoder_hidden_size"),
    64: ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim",
         "ffn_hidden_size", "intermediate_size_mlp", "dim_ff", "dense_intermediate_size", "dff"),
    24: ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "moe_shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_dim"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
        "encoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts",
        "moe_num_experts", "conv_kernel", "mamba_d_conv", "linear_num_value_heads"),
    2: ("num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk",
        "linear_num_key_heads", "num_kv_heads", "n_groups", "mamba_n_groups"),
    1: ("n_group", "topk_group", "num_expert_groups", "first_k_dense_replace",
        "n_shared_experts", "num_shared_experts"),
    12: ("head_dim", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "d_kv",
         "mamba_d_head", "mamba_head_dim",
         "linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "kv_channels"),
    8: ("qk_rope_head_dim", "state_size", "mamba_d_state", "ssm_state_size", "time_step_rank",
        "mamba_n_heads", "mamba_num_heads",
        "mamba_dt_rank", "chunk_size", "mamba_chunk_size", "rotary_dim", "index_topk",
        "hidden_size_per_layer_input"),
    16: ("q_lora_rank", "kv_lora_rank", "lora_rank", "o_lora_rank", "index_n_heads"),
    5: ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size",
        "sliding_window_size"),
    MAX_POSITIONS: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len",
                    "max_sequence_length", "original_max_position_embeddings", "max_length"),
    0: ("pad_token_id",),
}  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
           "encoder_layers", "num_decoder_layers")  # fmt: skip
_RATES = ("dropout", "drop_rate", "pdrop", "drop_prob", "dropout_prob", "layerdrop", "dropout_rate",
          "jitter_noise")  # fmt: skip
# Fields that spell a pattern over the layers: they have to be made anew for few layers.
_PATTERNS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "no_rope_layers",
             "attention_types", "hybrid_override_pattern", "sliding_window_pattern_list",
             "moe_layers", "mlp_only_layers", "kv_shared_layers", "full_attn_idxs")  # fmt: skip

# Further attempts: what else to change where the plain small configuration does not run.
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "head_dim": 12},
    {"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    {"q_lora_rank": None},
    {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
     "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8},
    {"rotary_dim": 4, "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_expand": 2, "n_groups": 1,
     "mamba_n_groups": 1, "num_heads": 12, "mamba_num_heads": 12, "mamba_head_dim": 8},
    {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    {"_keep": True},
)  # fmt: skip


def tiny_configs(default: Any) -> Iterator[Callable[[], Any]]:
    """What makes small variants of a default configuration, the likeliest first."""
    for attempt in ATTEMPTS:
        yield functools.partial(_tiny, default, attempt)


def _tiny(default: Any, attempt: dict[str, Any]) -> Any:
    changes = dict(attempt)
    keeps_sizes = changes.pop("_keep", False)
    given = default.to_dict()
    patterned = any(given.get(name) for name in _PATTERNS)
    fields: dict[str, Any] = {}
    for small, names in _SMALL.items():
        for name in names:
            value = given.get(name)
            kept = keeps_sizes and name not in _SMALL[VOCAB] + _SMALL[MAX_POSITIONS]
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not kept:
                fields[name] = small
    for name in _LAYERS:
        if isinstance(given.get(name), int):
            fields[name] = 4 if patterned else 2
    for name, value in given.items():
        if isinstance(value, float) and name.endswith(_RATES):
            fields[name] = 0.0
        if name.endswith("token_id") and isinstance(value, int) and value >= VOCAB:
            fields[name] = VOCAB - 1
    fields.update({name: value for name, value in changes.items() if name in given})
    kept = {
        name: value
        for name, value in given.items()
        if name not in (*_PATTERNS, "model_type", "transformers_version", "architectures", "dtype")
        and not isinstance(value, dict)
    }
    kept["use_cache"] = False
    for name in getattr(default, "sub_configs", {}):  # a text model inside one of several kinds
        inner = getattr(default, name, None)
        if hasattr(inner, "to_dict"):
            fields[name] = _tiny(inner, attempt).to_dict()
    return type(default)(**copy.deepcopy(kept | fields))
