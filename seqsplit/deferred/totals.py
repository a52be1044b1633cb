"""Losses and sums over all tokens: the sum of something that each token has by itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqsplit.deferred.evaluate import compute_total
from seqsplit.deferred.tensor import DeferredTensor

__all__ = ["Total", "as_total"]


@dataclass(frozen=True)
class Total:
    """A reduction as a sum over tokens.

    Attributes:
        func, args, kwargs: a call that gives what each token adds.
        divisor: of the sum; a function of what each token adds, which has the right shape.
    """

    func: Callable
    args: tuple
    kwargs: dict
    divisor: Callable[[DeferredTensor], Any]

    def of(self, per_token: DeferredTensor) -> Tensor:
        """The reduction itself."""
        total = compute_total(per_token._node, per_token._options)
        return (total / self.divisor(per_token)).to(per_token._node.dtype)


def as_total(func: Callable, name: str, args: tuple, kwargs: dict) -> Total | None:
    """A reduction of everything to one number, as a sum; ``None`` for other calls."""
    if name in ("sum", "mean"):
        return _plain(name, args, kwargs)
    signature = _signature(func)
    if signature is None or "reduction" not in signature.parameters:
        return None
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    reduction = given["reduction"]
    if reduction not in ("sum", "mean", "batchmean"):
        return None
    given["reduction"] = "none"
    divisor = _divisor(func, reduction, given)
    return None if divisor is None else Total(func, bound.args, bound.kwargs, divisor)


def _plain(name: str, args: tuple, kwargs: dict) -> Total | None:
    """``x.sum()`` and ``x.mean()`` of something wide."""
    tensor, *more = args or (kwargs.get("input"),)
    if more or set(kwargs) - {"dtype", "input"} or not isinstance(tensor, DeferredTensor):
        return None
    if not tensor.is_wide or not tensor._node.dtype.is_floating_point:
        return None
    dtype = kwargs.get("dtype") or tensor._node.dtype
    divisor = _one if name == "sum" else Tensor.numel
    return Total(Tensor.to, (tensor, dtype), {}, divisor)


@functools.cache
def _signature(func: Callable) -> inspect.Signature | None:
    try:
        return inspect.signature(func)
    except (TypeError, ValueError):
        return None


def _divisor(func: Callable, reduction: str, given: dict[str, Any]) -> Callable | None:
    """What the sum is divided by; ``None`` if each function has its own idea of that."""
    if reduction == "sum":
        return _one
    if reduction == "batchmean":
        return lambda per_token: given["input"].shape[0]
    if func in (F.cross_entropy, F.nll_loss):
        target = given["target"]
        if target.is_floating_point():
            return Tensor.numel
        return lambda per_token: _num_counted(target, given["ignore_index"], given["weight"])
    if given.get("weight") is not None or "ignore_index" in given:
        return None  # the mean of mse_loss is divided by its weights, that of huber_loss is not
    return Tensor.numel


def _one(per_token: DeferredTensor) -> int:
    return 1


def _num_counted(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    """How many targets count, each with its class's weight."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return (weight[torch.where(counts, target, 0)] * counts).sum()
