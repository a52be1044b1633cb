"""mambapy: a state-space model in plain PyTorch, scanned in parallel or one step at a time.

Its own language model cannot be imported without a CUDA package, so the layers get an embedding
and a head here.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ..options import HEADS, LAYERS, VOCAB, WIDTH, OptionSet

REQUIREMENTS = ("mambapy", "numpy")
IMPORTS = "mambapy.mamba"

_SWITCHES: dict[str, dict[str, Any]] = {
    "parallel-scan": {"pscan": True},
    "sequential-scan": {"pscan": False},
    "inner-norms": {"pscan": False, "inner_layernorms": True},
    "mup": {"pscan": False, "mup": True},
}


class _LanguageModel(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = layers
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids)))


def option_sets() -> list[OptionSet]:
    found = [
        OptionSet(name, functools.partial(_build, switches), widen="mambapy")
        for name, switches in _SWITCHES.items()
    ]
    jamba = [("jamba", 1), ("jamba-experts", 4)]
    return found + [
        OptionSet(name, functools.partial(_build_jamba, experts), _first, widen="mambapy")
        for name, experts in jamba
    ]


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The logits; in training the logits of the routers follow where there are experts."""
    return output[0] if isinstance(output, tuple) else output


def _build(switches: dict[str, Any]) -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    return _LanguageModel(Mamba(MambaConfig(WIDTH, LAYERS, d_state=8, **switches)))


def _build_jamba(experts: int) -> nn.Module:
    from mambapy.jamba import JambaLM, JambaLMConfig

    config = JambaLMConfig(
        d_model=WIDTH, n_layers=LAYERS, mlp_size=48, d_state=8, pscan=False, vocab_size=VOCAB,
        num_attention_heads=HEADS, num_key_value_heads=2, num_experts=experts,
        num_experts_per_tok=min(2, experts), attn_layer_offset=1, attn_layer_period=2,
    )  # fmt: skip
    return JambaLM(config)
