"""A Llama of transformers with the sizes of a decoder of ours, and the same weights everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..models import DecoderShape


def make_llama(shape: DecoderShape, dtype: str) -> nn.Module:
    """The model in training mode, its attention through ``scaled_dot_product_attention``.

    Weights are drawn in the order of the parameters, so that they do not depend on how a version
    of transformers initialises.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.d,
        intermediate_size=shape.ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.02 * drawn)
    return model


def checkpointed(model: Any) -> Any:
    """Gradient checkpointing as transformers does it, layer by layer."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
