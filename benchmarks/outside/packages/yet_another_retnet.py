"""yet-another-retnet: retention in its parallel form."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ..options import HEADS, LAYERS, VOCAB, WIDTH, OptionSet

REQUIREMENTS = ("yet-another-retnet",)
IMPORTS = "yet_another_retnet.retnet"

_SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "post-norm": {"norm_first": False},
    "gelu": {"activation": "gelu"},
}


class _Logits(nn.Module):
    """The model without the loss that its forward computes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.forward_parallel(ids)


def option_sets() -> list[OptionSet]:
    return [
        OptionSet(name, functools.partial(_build, switches), widen="yet_another_retnet")
        for name, switches in _SWITCHES.items()
    ]


def _build(switches: dict[str, Any]) -> Any:
    from yet_another_retnet.retnet import RetNet

    sizes = {"num_tokens": VOCAB, "d_model": WIDTH, "nhead": HEADS, "num_layers": LAYERS,
             "dim_feedforward": 48, "dropout": 0.0}  # fmt: skip
    return _Logits(RetNet(**(sizes | switches)))
