"""Proof by execution that a kernel computes the attention that its arguments speak of.

It is run in its own dtype on small random tensors: on whole sequences and as a chunk would call
it, with fewer queries than keys and with documents that no query of the chunk is in. Outputs and
gradients have to be those of the definition, written out below in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from seqsplit.passes.trials.double import as_double

__all__ = ["TOLERANCES", "Given", "Meaning", "is_proved", "reference"]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# Lengths, each with chunks of it. The long ones are for what works in blocks.
_TRIALS = {
    13: ((0, 13), (5, 9), (9, 13), (8, 9)),
    389: ((133, 389),),
    4099: ((4091, 4099),),
}

_PROVED: dict[Any, bool] = {}


@dataclass(frozen=True)
class Meaning:
    """Which attention a call computes.

    Attributes:
        scale: of the scores, ``None`` for ``1 / sqrt(E)``.
        causal: whether a query sees no key after its own place.
        left: how many keys before its own place it sees, ``None`` for all.
        softcap: scores are ``softcap * tanh(score / softcap)``.
    """

    scale: float | None
    causal: bool
    left: int | None
    softcap: float | None

    @property
    def window(self) -> int | None:
        """How many keys a query sees, its own place included."""
        return None if self.left is None else self.left + 1


@dataclass(frozen=True)
class Given:
    """An operand of a kernel: its shape, ``None`` for sizes that vary. A size has no dtype."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None
    device: torch.device | None


def reference(
    meaning: Meaning,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None = None,
    starts_q: Tensor | None = None,
    starts_k: Tensor | None = None,
) -> Tensor:
    """Attention by its definition.

    Args:
        meaning: which one.
        query: ``[..., L, H, E]``.
        key, value: ``[..., S, G, E]``; ``G`` divides ``H``.
        slopes: ``[H]`` or ``[B, H]``: scores are lowered by the distance times a head's slope.
        starts_q, starts_k: where documents start, and the last one's end: a query sees keys of its
            own document, the last of which is where the last query is. ``[N + 1]``.

    Returns:
        ``[..., L, H, E]``, zero for queries that see nothing.
    """
    shared = query.shape[-2] // key.shape[-2]
    query = query.transpose(-3, -2)
    key, value = (x.repeat_interleave(shared, -2).transpose(-3, -2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if meaning.scale is None else meaning.scale
    scores = query @ key.transpose(-2, -1) * scale
    if meaning.softcap is not None:
        scores = meaning.softcap * torch.tanh(scores / meaning.softcap)
    rows = torch.arange(query.shape[-2], device=query.device)[:, None]
    keys = torch.arange(key.shape[-2], device=query.device)
    if starts_q is None:
        places, seen = rows + len(keys) - len(rows), torch.ones_like(rows == keys)
    else:
        starts_q, starts_k = starts_q.long(), starts_k.long()
        document = torch.searchsorted(starts_q, rows, right=True)  # 1 for the first
        known = (document > 0) & (document < len(starts_q))
        last = document.clamp(1, len(starts_q) - 1)
        places = rows - starts_q[last] + starts_k[last]
        seen = known & (keys >= starts_k[last - 1]) & (keys < starts_k[last])
    if meaning.causal:
        seen = seen & (keys <= places)
    if meaning.left is not None:
        seen = seen & (keys >= places - meaning.left)
    if slopes is not None:
        scores = scores - slopes.detach()[..., None, None] * (places - keys).abs()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return (weights @ value).transpose(-3, -2)


def is_proved(
    key: Any, kernels: Sequence[Any], operands: Sequence[Given], limit: int | None
) -> bool:
    """Whether kernels compute what they mean.

    Args:
        key: the same for calls that need not be tried twice.
        kernels: the call, and the same call with other windows.
        operands: what they take.
        limit: the longest document they may be given, if that is fixed.
    """
    if key not in _PROVED:
        with disable_proxy_modes_tracing():
            _PROVED[key] = all(_agrees(kernel, operands, limit) for kernel in kernels)
    return _PROVED[key]


def _agrees(kernel: Any, operands: Sequence[Given], limit: int | None) -> bool:
    query = operands[kernel.places["query"]]
    tolerance, heads = TOLERANCES.get(query.dtype), query.shape[-2]
    if tolerance is None:
        return False
    return all(
        _agrees_at(kernel, _Inputs(operands, length, heads, limit), chunk, tolerance)
        for length, chunks in _TRIALS.items()
        for chunk in chunks
    )


def _agrees_at(kernel: Any, inputs: _Inputs, chunk: tuple[int, int], tolerance: float) -> bool:
    whole = [inputs.of(role, place, kernel.dim) for role, place in kernel.places.items()]
    start, first, end, given = _of_chunk(kernel, whole, inputs.length, *chunk)
    doubles = [as_double(value) for value in given]
    theirs = _run(kernel, kernel.in_double, start, first, end, doubles)
    _poison(given)
    try:
        mine = _run(kernel, kernel.run, start, first, end, given)
    except Exception:  # a kernel that fails on such inputs is not proved
        return False
    for have, want in zip(mine, theirs, strict=True):
        if have is None or have.shape != want.shape:
            return False
        if not (have.double() - want).norm() <= tolerance * want.norm().clamp_min(1e-30):
            return False
    return True


class _Inputs:
    """Random operands of one length."""

    def __init__(
        self, operands: Sequence[Given], length: int, heads: int, limit: int | None
    ) -> None:
        self.length = length
        self._operands, self._heads, self._limit = operands, heads, limit
        self._batch = 2 if length < 100 else 1
        self._generator = torch.Generator().manual_seed(0)

    def of(self, role: str, place: int, dim: int) -> Any:
        like = self._operands[place]
        if like.dtype is None:
            return self.length
        if role in ("starts_q", "starts_k"):
            return torch.tensor(self._documents(), dtype=like.dtype, device=like.device)
        shape = list(like.shape)
        if role == "slopes":
            shape = [*[self._batch] * (len(shape) - 1), self._heads]
        else:
            shape[: dim + 1] = [*[self._batch] * dim, self.length]
        value = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return (value.abs() if role == "slopes" else value).to(like.device, like.dtype)

    def _documents(self) -> list[int]:
        """Uneven ones; the rest of a long sequence is one document, if it may be."""
        limit = self._limit or self.length
        bounds = [*accumulate((min(length, limit) for length in (4, 6)), initial=0)]
        while bounds[-1] < self.length:
            bounds.append(min(bounds[-1] + limit, self.length))
        return bounds


def _of_chunk(
    kernel: Any, whole: list, length: int, start: int, end: int
) -> tuple[int, int, int, list]:
    """A chunk's own call: where it starts, its first key, its end, its operands."""
    causal, window = kernel.meaning.causal, kernel.meaning.window
    first = max(0, start - window + 1) if causal and window is not None else 0
    last = end if causal else length
    given = list(whole)
    for role, bounds in (("query", (start, end)), ("key", (first, last)), ("value", (first, last))):
        place = kernel.places[role]
        given[place] = whole[place].narrow(kernel.dim, bounds[0], bounds[1] - bounds[0])
    return start, first, end, given


def _run(
    kernel: Any, run: Any, start: int, first: int, end: int, given: Sequence[Any]
) -> list[Tensor | None]:
    """The output of a chunk, and the gradients of query, key and value."""
    given = list(given)
    places = [kernel.places[role] for role in ("query", "key", "value")]
    for place in places:
        given[place] = given[place].detach().clone().requires_grad_()
    leaves = [given[place] for place in places]
    with torch.enable_grad():
        out = kernel.rows(run, start, first, end, given)
        generator = torch.Generator().manual_seed(end)
        cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        # Rounded first, so that both sides are given the same numbers.
        cotangent = cotangent.to(torch.bfloat16).to(out.device, out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent, allow_unused=True)]


def _poison(given: Sequence[Any]) -> None:
    """Leave NaN where the next call may get its memory, so that what it does not write shows."""
    tensors = [value for value in given if isinstance(value, Tensor) and value.is_floating_point()]
    del [torch.full_like(value, float("nan")) for value in tensors for _ in range(4)][:]
