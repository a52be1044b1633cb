"""Inputs: a model's weights in float64 without holding them all.

To run a whole model once in float64 would take twice or four times the memory of its weights, and
as much again for their gradients. So each is made when it is first used, forgotten after its last
use, and made again where the backward wants it; of its gradient a few sums are kept: its norm and
its products with random vectors, by which any two that differ are told apart.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from seqsplit.passes.checks.samples import Samples
from seqsplit.passes.graph.lowered import Lowered

__all__ = ["PROJECTIONS", "Inputs", "random_like"]

PROJECTIONS = 3  # sums kept of a gradient, beside its norm
_STARTS = 4096  # different vectors of random numbers, cut from one


class _Recipe(NamedTuple):
    """A view of an input, for the backward to make it again."""

    number: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class Inputs:
    """Inputs of a graph, made when they are used.

    Args:
        lowered: the graph.
        samples: a short call of it.
        draw: another number makes parameters a little different in another way.

    Attributes:
        anchor: what the gradients of all that need one are taken with respect to.
    """

    def __init__(self, lowered: Lowered, samples: Samples, draw: int) -> None:
        self.anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self._nodes, self._samples, self._draw = lowered.placeholders, samples, draw
        self._written = dict.fromkeys(write.index for write in lowered.writes)
        self._live: dict[int, tuple[int, torch.dtype]] = {}  # by the address of their memory

    def make(self, number: int, gradients: dict[int, Tensor]) -> Any:
        """An input; where it needs a gradient, sums of that are put into ``gradients``."""
        if not self._nodes[number].meta.get("requires_grad"):
            value = self._value(number)
        else:
            with torch.enable_grad():  # wherever it is used first
                value = _Learning.apply(self.anchor, self._value, number, gradients)
        if number in self._written:
            value = self._written[number] = value.clone()
        elif isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value):
            self._live[value.untyped_storage().data_ptr()] = number, value.dtype
        return value

    def forget(self, number: int | None, value: Any) -> None:
        """It is not used any more."""
        plain = isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)
        if number is not None and plain:
            self._live.pop(value.untyped_storage().data_ptr(), None)

    def written(self) -> list[Tensor]:
        """The inputs that are written to, as they are now."""
        return [value.detach() for value in self._written.values()]

    @contextlib.contextmanager
    def made_again(self) -> Iterator[None]:
        """Autograd keeps no memory of an input, but where to get it."""
        self._live.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if wrapped or is_traceable_wrapper_subclass(tensor):
            return tensor
        number, dtype = self._live.get(tensor.untyped_storage().data_ptr(), (None, None))
        if number is None or tensor.dtype != dtype:
            return tensor
        return _Recipe(number, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, held: Any) -> Tensor:
        if not isinstance(held, _Recipe):
            return held
        with torch.no_grad():
            return self._value(held.number).as_strided(held.size, held.stride, held.offset)

    def _value(self, number: int) -> Any:
        node = self._nodes[number]
        value = self._samples.input(node)
        if not node.meta.get("requires_grad"):
            return value
        return _varied(value, seed=self._draw * len(self._nodes) + number)


class _Learning(torch.autograd.Function):
    """An input that needs a gradient, of which only sums are kept."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable, number: int, sums: dict) -> Tensor:
        ctx.number, ctx.sums = number, sums
        return make(number)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        sums = gradient.unsqueeze(-1)
        for dim in reversed(range(gradient.ndim)):
            vectors = [_vectors(gradient, seed)[dim] for seed in range(PROJECTIONS)]
            sums = _contracted(sums, torch.stack(vectors, 1))
        norm = gradient.norm().unsqueeze(0)
        ctx.sums[ctx.number] = torch.cat([norm, sums.expand(PROJECTIONS)]).cpu()
        return None, None, None, None


def _contracted(sums: Tensor, vectors: Tensor) -> Tensor:
    """The last dim but one, multiplied by a vector for each entry of the last, and summed."""
    if sums.shape[-1] == 1:
        return sums.squeeze(-1) @ vectors
    return (sums * vectors).sum(-2)


def _varied(value: Tensor, seed: int) -> Tensor:
    """A value made a little different: its columns scaled, and a matrix of norm 0.5 added."""
    if not value.ndim:
        return value + 0.5
    *lead, last = _vectors(value, seed)
    scale = 0.5 * max(value.numel(), 1) ** -0.5
    scaled = value * (1 + 0.1 * last.clamp(-2, 2))
    return scaled.addcmul_(_product(lead, value).unsqueeze(-1), last, value=scale)


def _vectors(like: Tensor, seed: int) -> list[Tensor]:
    """Random numbers along each dim."""
    found = []
    for dim, size in enumerate(like.shape):
        start = (seed * 977 + dim * 131) % _STARTS
        numbers = _random_numbers(1 << (size + _STARTS).bit_length())
        found.append(numbers[start : start + size].to(like.device))
    return found


@functools.cache
def _random_numbers(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, generator=generator, dtype=torch.float64)


def _product(vectors: Sequence[Tensor], like: Tensor) -> Tensor:
    product = torch.ones((), dtype=torch.float64, device=like.device)
    for vector in vectors:
        product = product.unsqueeze(-1) * vector
    return product


def random_like(like: Tensor, seed: int) -> Tensor:
    """Random numbers of a tensor's shape, cheap ones: products of those along each dim."""
    return _product(_vectors(like, seed), like)
