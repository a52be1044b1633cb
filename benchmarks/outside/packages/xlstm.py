"""xlstm: matrix memories in parallel form, scalar memories as a loop, and the large model."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..options import HEADS, LAYERS, LENGTH, VOCAB, WIDTH, OptionSet

REQUIREMENTS = ("xlstm",)
IMPORTS = "xlstm"

# Blocks with scalar memories among the layers.
_SCALAR: dict[str, list[int]] = {"matrix-memory": [], "scalar-memory": [0, 1], "mixed": [1]}
# The large model takes the parallel kernels' result for a pair, with states that they do not give.
_KERNELS = ("parallel--native_autograd", "chunkwise--native_autograd")


def option_sets() -> list[OptionSet]:
    found = [
        OptionSet(name, functools.partial(_build, scalar), widen="xlstm")
        for name, scalar in _SCALAR.items()
    ]
    # The kernels come from another package and cast to the type that their settings name.
    return found + [
        OptionSet(f"large-{kernel}", functools.partial(_build_large, kernel), _first, torch.float32)
        for kernel in _KERNELS
    ]


def _first(output: tuple[Any, ...]) -> torch.Tensor:
    """The logits; the states of the memories follow."""
    return output[0]


def _build(scalar: list[int]) -> Any:
    from xlstm import (
        FeedForwardConfig,
        mLSTMBlockConfig,
        mLSTMLayerConfig,
        sLSTMBlockConfig,
        sLSTMLayerConfig,
        xLSTMLMModel,
        xLSTMLMModelConfig,
    )

    matrix = mLSTMBlockConfig(mlstm=mLSTMLayerConfig(num_heads=HEADS))
    memory = sLSTMBlockConfig(
        slstm=sLSTMLayerConfig(backend="vanilla", num_heads=HEADS),
        feedforward=FeedForwardConfig(proj_factor=1.5, act_fn="gelu"),
    )
    config = xLSTMLMModelConfig(
        mlstm_block=matrix, slstm_block=memory, slstm_at=scalar, num_blocks=LAYERS,
        embedding_dim=WIDTH, vocab_size=VOCAB, context_length=64,
    )  # fmt: skip
    return xLSTMLMModel(config)


def _build_large(kernel: str) -> Any:
    from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

    config = xLSTMLargeConfig(
        embedding_dim=WIDTH, num_heads=HEADS, num_blocks=LAYERS, vocab_size=VOCAB,
        chunkwise_kernel=kernel, sequence_kernel="native_sequence__native", step_kernel="native",
        mode="train", chunk_size=LENGTH, ffn_round_up_to_multiple_of=16,
        autocast_kernel_dtype="float32", return_last_states=True,
    )  # fmt: skip
    return xLSTMLarge(config)
