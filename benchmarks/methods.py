"""Methods by name: ways to compute the loss of a decoder and its gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

import seqsplit
from seqsplit import Schedule

from . import baselines
from .models import Decoder
from .names import (
    CHECKPOINTED,
    CHECKPOINTED_FULL,
    CHUNKED,
    COMPILED,
    EAGER,
    INDUCTOR,
    KEPT,
    OURS,
    OURS_THIRDS,
    THREE,
    TILED,
)

_BASELINES: dict[str, Callable[[Decoder, int, int], baselines.Loss]] = {
    EAGER: lambda model, chunk, loss_chunk: baselines.eager(model),
    CHECKPOINTED: lambda model, chunk, loss_chunk: baselines.checkpointed(model),
    CHECKPOINTED_FULL: lambda model, chunk, loss_chunk: baselines.checkpointed(model, False),
    CHUNKED: lambda model, chunk, loss_chunk: baselines.checkpointed_chunked(model, loss_chunk),
    TILED: baselines.tiled,
    COMPILED: lambda model, chunk, loss_chunk: baselines.compiled_layers(model, loss_chunk),
}
# Options of ours.
OPTIONS: dict[str, dict[str, Any]] = {
    OURS: {},
    OURS_THIRDS: {},
    KEPT: {"schedule": Schedule(keep_attention=True)},
    THREE: {"schedule": Schedule(forwards=3)},
    INDUCTOR: {"inner": "inductor"},
}
METHODS = (*_BASELINES, *OPTIONS)

# Their code is generated: it calls the allocator and the matrix products directly, out of sight of
# everything but the allocator's own records.
GENERATED = (COMPILED, INDUCTOR)


def build(
    method: str, model: Decoder, chunk: int, loss_chunk: int | None = None
) -> tuple[baselines.Loss, Decoder]:
    """The loss function of a method, and the module whose parameters it trains.

    seqsplit compiles in place, so it gets a copy of the model; the others share it.

    Args:
        chunk: positions per chunk of the layers (ours) and of the MLP.
        loss_chunk: positions per chunk of the logits, ``chunk`` if ``None``.

    Raises:
        ValueError: there is no such method.
    """
    loss_chunk = chunk if loss_chunk is None else loss_chunk
    if method in OPTIONS:
        compiled = compile_for(method, copy.deepcopy(model), chunk, loss_chunk)
        return compiled, compiled
    if method in _BASELINES:
        return _BASELINES[method](model, chunk, loss_chunk), model
    raise ValueError(f"unknown method {method!r}; one of {METHODS}")


def compile_for(method: str, model: nn.Module, chunk: int, loss_chunk: int) -> nn.Module:
    """Compile a model, in place, as one of our methods."""
    sizes = {"chunk_size": chunk, "head_chunk_size": loss_chunk}
    return seqsplit.compile(model, **sizes, **OPTIONS[method])
