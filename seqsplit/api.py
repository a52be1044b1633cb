"""``seqsplit.compile``: what a user touches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from seqsplit.errors import InvalidOptionError, format_message
from seqsplit.frontend.handle import Handle, disable, handle_for
from seqsplit.options import Options
from seqsplit.passes import recurrent, rule
from seqsplit.schedule import Schedule

__all__ = ["compile", "disable", "recurrent", "rule"]

Target = TypeVar("Target", bound=Callable)


def compile(  # noqa: A001 - named after torch.compile
    target: Target,
    *,
    chunk_size: int | str = "auto",
    head_chunk_size: int | str = "auto",
    segment_layers: int | str = "auto",
    schedule: Schedule | None = None,
    inner: str | None = None,
    accumulate_dtype: torch.dtype = torch.float32,
    seq_dim: int | None = None,
    strict: bool = False,
    validate: bool = True,
) -> Target:
    """Make training steps of a causal decoder run chunk by chunk along the sequence.

    Gradients are those of the original, memory is a fraction. Logits are a
    :class:`~seqsplit.deferred.DeferredTensor`: a loss computed from them, outside the model too,
    never needs all of them at once. Calls without gradients (evaluation, ``generate()``) run the
    original code, with deferred logits where the sequence is long.

    Args:
        target: an ``nn.Module``, compiled in place and returned, or a function, for which a
            compiled function is returned (a loss computed in it is streamed as well).
        chunk_size: rows of the sequence per chunk of a layer. ``"auto"`` chooses by the width
            of the layer.
        head_chunk_size: the same for the head with the loss, whose rows are wider.
        segment_layers: layers per checkpoint.
        schedule: what is kept for the backward and what is computed again; by default every
            segment's input is kept, as gradient checkpointing would.
        inner: ``"inductor"`` (or another backend of ``torch.compile``) to compile the stretches of
            ordinary ops inside of chunk bodies; results then differ from eager's by rounding.
        accumulate_dtype: the least precise dtype in which gradients are added up over chunks.
        seq_dim: the dim of the inputs that is the sequence; found by itself where attention
            mixes it.
        strict: raise :class:`~seqsplit.errors.NotStreamedError` if a part would run whole.
        validate: try each distinct chunk body against the original code, on a short sequence in
            float64, before it is used.

    Returns:
        ``target`` itself if it is a module, else a function with the same signature.

    Raises:
        InvalidOptionError: an option is out of range. Errors about the model come at the first
            call, when its inputs are known.

    Example:
        >>> model = seqsplit.compile(model)
        >>> loss = model(input_ids=ids, labels=ids).loss
        >>> loss.backward()
    """
    options = Options.checked(
        chunk_size=chunk_size,
        head_chunk_size=head_chunk_size,
        segment_layers=segment_layers,
        schedule=schedule,
        inner=inner,
        accumulate_dtype=accumulate_dtype,
        seq_dim=seq_dim,
        strict=strict,
        validate=validate,
    )
    if isinstance(target, nn.Module):
        # The slot that nn.Module.compile uses: the module keeps its class, its state dict, its
        # hooks; copies and pickles of it are plain.
        target._compiled_call_impl = handle_for(target, options)
        return target
    if not callable(target):
        raise InvalidOptionError(
            format_message(
                f"cannot compile a {type(target).__name__}",
                fix="give an nn.Module or a function",
            )
        )
    return _as_function(target, handle_for(target, options))


def _as_function(target: Callable, handle: Handle) -> Any:
    @functools.wraps(target)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return handle(*args, **kwargs)

    compiled.__seqsplit__ = handle
    return compiled
