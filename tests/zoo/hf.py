"""Tiny causal LMs of the transformers library, built from configurations (nothing is downloaded).

Sizes are distinct so that a swapped dim shows: 4 heads over 2 key/value heads of 6, hidden 20
(24 where the family ties it to the heads), MLP 29, vocabulary 61.
"""

import transformers

from .batches import VOCAB
from .float64 import causal_lm_loss
from .weights import randomise

GROUPED = {
    "vocab_size": VOCAB,
    "hidden_size": 20,
    "intermediate_size": 29,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# family -> (configuration class, its arguments, the name of the layer count)
FAMILIES = {
    "qwen3": (transformers.Qwen3Config, GROUPED, "num_hidden_layers"),
    "llama": (transformers.LlamaConfig, GROUPED, "num_hidden_layers"),
    "gpt2": (
        transformers.GPT2Config,
        TOKENS
        | {"n_embd": 24, "n_head": 4, "n_inner": 29, "n_positions": 128}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "n_layer",
    ),
    "gemma2": (
        transformers.Gemma2Config,
        GROUPED
        | {"sliding_window": 5, "query_pre_attn_scalar": 6}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        "num_hidden_layers",
    ),
    "mistral": (
        transformers.MistralConfig,
        GROUPED | {"sliding_window": 5},
        "num_hidden_layers",
    ),
    "gpt_neox": (
        transformers.GPTNeoXConfig,
        TOKENS
        | {"hidden_size": 24, "intermediate_size": 29, "num_attention_heads": 4}
        | {"max_position_embeddings": 128, "rotary_pct": 0.67, "use_parallel_residual": True}
        | {"attention_dropout": 0.0, "hidden_dropout": 0.0},
        "num_hidden_layers",
    ),
    "bloom": (transformers.BloomConfig, TOKENS | {"hidden_size": 24, "n_head": 4}, "n_layer"),
}

# These two refuse fused attention (softcapped scores, ALiBi): asking for it is an error there.
EAGER_ONLY = {"gemma2", "bloom"}
COMBINATIONS = [
    (family, attention)
    for family in FAMILIES
    for attention in ("sdpa", "eager")
    if attention == "eager" or family not in EAGER_ONLY
]
SDPA = [family for family, attention in COMBINATIONS if attention == "sdpa"]


def config(family, layers=2, **overrides):
    """A configuration object; `overrides` replace single fields."""
    kind, fields, layer_field = FAMILIES[family]
    return kind(**{layer_field: layers, "use_cache": False} | fields | overrides)


def build(family, attention="sdpa", layers=2, *, honest=True, **overrides):
    """A random model in training mode. honest: its loss is computed in the logits' dtype."""
    model = transformers.AutoModelForCausalLM.from_config(
        config(family, layers, **overrides), attn_implementation=attention
    )
    if honest:
        model.loss_function = causal_lm_loss
    return randomise(model).train()


def builder(family, attention="sdpa", layers=2, **overrides):
    """`build` with its arguments bound, as `Pair` wants it."""
    return lambda: build(family, attention, layers, **overrides)
