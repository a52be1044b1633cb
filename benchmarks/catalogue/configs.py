"""Tiny configurations of any class, made from its default one by the meaning of its fields.

A field is given a small value if it has one of the names by which configurations call that
quantity. Several attempts are made, since some classes tie sizes to each other; the first that
builds and runs in eager counts. The few classes that no rule fits have fields of their own.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

VOCAB = 61
MAX_POSITIONS = 128
NUM_MIXED = 4  # layers, where there are several kinds

# What a quantity is called, and its small value. Widths are multiples of all head counts.
_SMALL: dict[int | float | bool, tuple[str, ...]] = {
    VOCAB: ("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size", "decoder_vocab_size",
            "encoder_hash_byte_group_vocab"),
    96: ("mamba_d_ssm",),
    48: ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "model_dim", "embedding_size",
         "word_embed_proj_dim", "decoder_hidden_size", "emb_dim", "embedding_dim",
         "hidden_size_global", "adapter_in_dim", "adapter_input_size", "adapter_out_dim"),
    64: ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim",
         "ffn_hidden_size", "intermediate_size_mlp", "dim_ff", "dense_intermediate_size", "dff",
         "feed_forward_size"),
    24: ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "moe_shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_dim",
         "router_hidden_size"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
        "encoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts",
        "moe_num_experts", "conv_kernel", "mamba_d_conv", "linear_num_value_heads",
        "linear_num_heads"),
    2: ("num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk",
        "linear_num_key_heads", "num_kv_heads", "n_groups", "mamba_n_groups",
        "zero_expert_num"),
    1: ("n_group", "topk_group", "num_expert_groups", "first_k_dense_replace",
        "n_shared_experts", "num_shared_experts"),
    12: ("head_dim", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "d_kv",
         "mamba_d_head", "mamba_head_dim",
         "linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "kv_channels",
         "attention_head_size", "linear_head_dim"),
    8: ("qk_rope_head_dim", "state_size", "mamba_d_state", "ssm_state_size", "time_step_rank",
        "mamba_n_heads", "mamba_num_heads",
        "mamba_dt_rank", "chunk_size", "mamba_chunk_size", "rotary_dim", "index_topk",
        "hidden_size_per_layer_input"),
    16: ("q_lora_rank", "kv_lora_rank", "lora_rank", "o_lora_rank", "index_n_heads",
         "hc_lowrank"),
    5: ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size",
        "sliding_window_size"),
    MAX_POSITIONS: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len",
                    "max_sequence_length", "original_max_position_embeddings", "max_length"),
    0: ("pad_token_id",),
}  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
           "encoder_layers", "num_decoder_layers", "num_blocks")  # fmt: skip
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
    {"num_experts_per_tok": 1},
    {"num_heads": 8, "head_dim": 12},  # a scan's: together they are twice the width
    {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 4},  # a quarter of it still rotates
    # What is None unless a checkpoint says otherwise, and cannot be.
    {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
     "num_key_value_heads": 4},
    {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 8,
     "indexer_compress_ratio": 2},
)  # fmt: skip

# What a class needs beyond that, by its model type: words and patterns of its own, or sizes that
# its default does not show.
_FITTING: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    # Read by its attention: the first is not among the fields, the other may not be None.
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots3_note_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16, "swa_head_dim": 20, "swa_qk_nope_head_dim": 12,
        "swa_qk_rope_head_dim": 8, "swa_v_head_dim": 12, "num_key_value_heads": 4,
    },
    "gemma3n_text": {"num_kv_shared_layers": 2, "intermediate_size": 64},
    "git": {"num_image_with_embedding": 0},  # text alone: no logits are those of an image
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "hash_seed": 0},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64},  # its heads are rounded up to 64
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip


def tiny_configs(default: Any) -> Iterator[Callable[[], Any]]:
    """What makes small variants of a default configuration, the likeliest first."""
    for derive in (False, True):
        for attempt in ATTEMPTS:
            yield functools.partial(_tiny, default, attempt, derive=derive)
    yield functools.partial(_tiny, default, {}, keep_sizes=True)


def _tiny(
    default: Any, attempt: dict[str, Any], *, derive: bool = False, keep_sizes: bool = False
) -> Any:
    """A small variant of a configuration.

    Args:
        default: what it is a variant of.
        attempt: fields to change besides, where the class has them.
        derive: let the class derive anew whatever is not made small, and mix the kinds of layers.
        keep_sizes: make nothing small but the vocabulary, the positions and the number of layers.
    """
    given = default.to_dict()
    fields = _small_fields(given, default.attribute_map, keep_sizes)
    if derive:
        fields.update(_mixed_patterns(given))
    fields.update({name: value for name, value in attempt.items() if name in given})
    fields.update(_FITTING.get(default.model_type, {}))
    for name in getattr(default, "sub_configs", {}):  # a text model inside one of several kinds
        inner = getattr(default, name, None)
        if hasattr(inner, "to_dict"):
            small = _tiny(inner, attempt, derive=derive, keep_sizes=keep_sizes)
            fields[name] = small.to_dict() | fields.get(name, {})
    kept = _kept_fields(given, only=("is_decoder",) if derive else None)
    return type(default)(**copy.deepcopy(kept | {"use_cache": False} | fields))


def _small_fields(given: dict[str, Any], aliases: dict[str, str], keep_sizes: bool) -> dict:
    """The fields that are made small or switched off, wherever a class has them."""
    fields: dict[str, Any] = {}
    patterned = any(given.get(name) for name in _PATTERNS)
    for name, small in _sizes(aliases).items():
        value = given.get(name)
        kept = keep_sizes and small not in (VOCAB, MAX_POSITIONS)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not kept:
            fields[name] = small
    for name in _LAYERS:
        if isinstance(given.get(name), int):
            fields[name] = NUM_MIXED if patterned else 2
    for name, value in given.items():
        if isinstance(value, float) and name.endswith(_RATES):
            fields[name] = 0.0
        if name.endswith("token_id") and isinstance(value, int) and value >= VOCAB:
            fields[name] = VOCAB - 1
    return fields


def _sizes(aliases: dict[str, str]) -> dict[str, int | float | bool]:
    """The small value of each name, and of names that a class has only aliases for."""
    sizes = {name: small for small, names in _SMALL.items() for name in names}
    return {aliases[name]: small for name, small in sizes.items() if name in aliases} | sizes


def _mixed_patterns(given: dict[str, Any]) -> dict[str, list[str]]:
    """For each list of the layers' kinds, one of few layers with as many kinds as they can have."""
    return {
        name: list(itertools.islice(itertools.cycle(dict.fromkeys(given[name])), NUM_MIXED))
        for name in _PATTERNS
        if isinstance(given.get(name), list) and all(isinstance(kind, str) for kind in given[name])
    }


def _kept_fields(given: dict[str, Any], only: tuple[str, ...] | None) -> dict[str, Any]:
    """The default's other fields, but for what has to be made anew for few layers."""
    left_out = (*_PATTERNS, "model_type", "transformers_version", "architectures", "dtype")
    return {
        name: value
        for name, value in given.items()
        if name not in left_out and not isinstance(value, dict) and (only is None or name in only)
    }
