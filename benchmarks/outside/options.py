"""What an option set is, and the sizes that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, LAYERS = 61, 32, 4, 2
LENGTH, BATCH = 37, 2


def same(output: Any) -> Tensor:
    """The output of a decoder that gives its logits and nothing else."""
    return output


@dataclass(frozen=True)
class OptionSet:
    """One configuration of a package's decoder.

    Attributes:
        name: unique within the package; also the name of the file that keeps its result.
        build: makes the tiny decoder. It is called with the token ids.
        logits: takes the logits out of what the decoder returns.
        dtype: float64 is compared to 1e-9; float32, for code that cannot run wider, to 1e-4.
        widen: a module to import, with its submodules, whose code writes float32 in its middle
            and is made to compute in float64 there; '' for none.
    """

    name: str
    build: Callable[[], nn.Module]
    logits: Callable[[Any], Tensor] = same
    dtype: torch.dtype = torch.float64
    widen: str = ""
