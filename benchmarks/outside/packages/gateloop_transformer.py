"""gateloop-transformer: gated linear recurrences by an associative scan, or attention."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ..options import HEADS, LAYERS, VOCAB, WIDTH, OptionSet

REQUIREMENTS = ("gateloop-transformer",)
IMPORTS = "gateloop_transformer"

_SWITCHES: dict[str, dict[str, Any]] = {
    "gate-loop": {"checkpoint_gate_looped_attn": False},
    "gate-loop-checkpointed": {},
    "gate-loop-real": {"checkpoint_gate_looped_attn": False, "ablate_complex": True},
    "attention": {"use_gate_looped_attn": False},
    "attention-rotary": {"use_gate_looped_attn": False, "rotary_emb": True},
    "attention-data-dependent": {"use_gate_looped_attn": False, "data_dependent_rel_pos": True},
}


class _Simple(nn.Module):
    """The package's simplified layer, which comes without a model around it."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def option_sets() -> list[OptionSet]:
    found = [
        OptionSet(name, functools.partial(_build, switches), widen=IMPORTS)
        for name, switches in _SWITCHES.items()
    ]
    return found + [
        OptionSet("simple", functools.partial(_build_simple, False), widen=IMPORTS),
        OptionSet("simple-heinsen", functools.partial(_build_simple, True), widen=IMPORTS),
    ]


def _build(switches: dict[str, Any]) -> Any:
    from gateloop_transformer import Transformer

    sizes = {"num_tokens": VOCAB, "dim": WIDTH, "depth": LAYERS, "heads": HEADS,
             "dim_head": WIDTH // HEADS, "ff_mult": 2}  # fmt: skip
    return Transformer(**(sizes | switches))


def _build_simple(heinsen: bool) -> Any:
    from gateloop_transformer import SimpleGateLoopLayer

    return _Simple([SimpleGateLoopLayer(WIDTH, use_heinsen=heinsen) for _ in range(LAYERS)])
