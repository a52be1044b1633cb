"""Causal attention of a chunk of queries, without a mask tensor.

The keys come in two parts: those before the chunk, which every query sees, and the chunk's own,
a causal square. Each part is one call of a fused kernel; the results are merged through their
log-sum-exp, and in the backward each part is given the merged output and log-sum-exp, which makes
its gradients those of the whole (the step of ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqsplit.ops.caches import PrefixGradient
from seqsplit.ops.replay import Replay

__all__ = ["banded_attention", "causal_attention", "documents_within"]

aten = torch.ops.aten

_PREFIX_CHUNKS = 4  # of keys before the chunk whose gradient is made at a time


def causal_attention(
    query: Tensor,
    key_before: Tensor,
    key: Tensor,
    value_before: Tensor,
    value: Tensor,
    scale: float | None,
    enable_gqa: bool,
    replay: Replay,
    slot: int,
) -> Tensor:
    """Attention of queries at the end of a sequence to everything up to themselves.

    Args:
        query: ``[B, H, c, E]``.
        key_before, value_before: ``[B, G, s, E]``, seen by all queries; ``s`` may be 0.
        key, value: ``[B, G, c, E]``, seen causally. ``G`` divides ``H`` with ``enable_gqa``.
        scale: of the scores, ``1 / sqrt(E)`` if ``None``.
        replay: keeps the result for the recomputation, under some schedules.
        slot: the number of this attention in its chunk.

    Returns:
        ``[B, H, c, E]``.
    """
    kernel = _kernel_for(query, key, value)
    if kernel is None:
        keys, values = torch.cat([key_before, key], -2), torch.cat([value_before, value], -2)
        start = key_before.shape[-2]
        return banded_attention(query, keys, values, start, 0, None, 0.0, scale, enable_gqa)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    prefix = _gradient_of(key_before), _gradient_of(value_before)
    return _MergedAttention.apply(
        query, key_before, key, value_before, value, scale, kernel, prefix, replay, slot
    )


def banded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    first: int,
    window: int | None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The same through a mask of chunk x keys: for windows, dropout and other kernels.

    Args:
        query: ``[..., c, E]``, at positions ``start, start + 1, ...``.
        key, value: ``[..., s, E]``, at positions ``first, first + 1, ...``.
        window: how many positions, itself included, a query sees; ``None`` for all.
    """
    rows = torch.arange(start, start + query.shape[-2], device=query.device)[:, None]
    columns = torch.arange(first, first + key.shape[-2], device=query.device)
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    if query.is_meta and dropout_p == 0.0:
        return _MaskedShapes.apply(query, key, value, mask.to(query.dtype))
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa
    )


def documents_within(starts: Tensor, first: int, end: int) -> Tensor:
    """Where documents start in the positions ``[first, end)``, counted from ``first``.

    Args:
        starts: where they start in the whole sequence, and the last one's end, ``[N + 1]``.

    Returns:
        ``[N + 1]``. A document that lies outside is empty; one that is cut keeps its part.
    """
    return starts.clamp(first, end) - first


class _FlashCpu:
    """The fused kernel for CPU: float32 and float64, grouped heads as they are."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse, ()

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, scale: float, extra: tuple,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )


class _FlashCuda:
    """FlashAttention on CUDA: half precision, grouped heads as they are."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
        out, lse, *extra, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out, lse, tuple(extra)

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, scale: float, extra: tuple,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        cum_q, cum_k, _, _, seed, offset = extra
        max_q, max_k = q.shape[-2], k.shape[-2]  # of the keys at hand, perhaps not all of them
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset,
            scale=scale,
        )  # fmt: skip


class _NoKernel:
    """Shapes only, for tensors without storage: what a fused kernel allocates."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
        return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32), ()

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, scale: float, extra: tuple,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _MaskedShapes(torch.autograd.Function):
    """What a fused kernel with a mask allocates. (Without storage, torch would take attention
    apart, and have scores.)"""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, mask, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _kernel_for(query: Tensor, key: Tensor, value: Tensor) -> Any:
    if query.dim() != 4 or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return None
    if not query.dtype == key.dtype == value.dtype:
        return None
    if query.is_meta:
        return _NoKernel
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cpu":
        # In half precision each part's output is rounded before they are merged: one masked
        # call is more precise.
        return None if half else _FlashCpu
    if query.device.type == "cuda" and half and query.shape[-1] % 8 == 0:
        return _FlashCuda if query.shape[-1] <= 256 else None
    return None


def _gradient_of(before: Tensor) -> PrefixGradient | None:
    return getattr(before, "seqsplit_gradient", None)


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key_before: Tensor, key: Tensor, value_before: Tensor,
        value: Tensor, scale: float, kernel: Any,
        prefix: tuple[PrefixGradient | None, PrefixGradient | None], replay: Replay, slot: int,
    ) -> Tensor:  # fmt: skip
        def compute() -> tuple[Any, ...]:
            return _merged(query, key_before, key, value_before, value, scale, kernel)

        out, lse, extra, extra_before = replay.once(slot, compute)
        ctx.save_for_backward(query, key_before, key, value_before, value, out, lse)
        ctx.scale, ctx.kernel, ctx.extra, ctx.extra_before = scale, kernel, extra, extra_before
        ctx.prefix = prefix
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key_before, key, value_before, value, out, lse = ctx.saved_tensors
        kernel, scale = ctx.kernel, ctx.scale
        dq, dk, dv = kernel.backward(grad, query, key, value, out, lse, True, scale, ctx.extra)
        dk_before = dv_before = None
        length = key_before.shape[-2] if ctx.extra_before is not None else 0
        add_keys, add_values = ctx.prefix
        in_parts = add_keys is not None and add_values is not None and all(ctx.needs_input_grad[:5])
        # In parts, the prefix's gradient takes the room of a few chunks and not of the sequence.
        rows = _PREFIX_CHUNKS * key.shape[-2] if in_parts else length
        for first in range(0, length, max(rows, 1)):
            count = min(rows, length - first)
            keys, values = (t.narrow(-2, first, count) for t in (key_before, value_before))
            more, dk_before, dv_before = kernel.backward(
                grad, query, keys, values, out, lse, False, scale, ctx.extra_before
            )
            dq = dq.add_(more)
            if in_parts:
                add_keys.add(dk_before, first)
                add_values.add(dv_before, first)
                dk_before = dv_before = None
        return dq, dk_before, dk, dv_before, dv, None, None, None, None, None


def _merged(
    query: Tensor, key_before: Tensor, key: Tensor, value_before: Tensor, value: Tensor,
    scale: float, kernel: Any,
) -> tuple[Tensor, Tensor, tuple, tuple | None]:  # fmt: skip
    """The output, its log-sum-exp, and what the kernel wants back for each part."""
    out, lse, extra = kernel.forward(query, key, value, True, scale)
    if key_before.shape[-2] == 0:
        return out, lse, extra, None
    out_before, lse_before, extra_before = kernel.forward(
        query, key_before, value_before, False, scale
    )
    merged = torch.logaddexp(lse_before, lse)
    return (
        _weighted(out_before, lse_before - merged, out, lse - merged),
        merged,
        extra,
        extra_before,
    )


def _weighted(first: Tensor, log_first: Tensor, second: Tensor, log_second: Tensor) -> Tensor:
    """``[B, H, c, E]`` outputs weighted by ``exp`` of ``[B, H, c]``, in the weights' dtype."""
    total = first * log_first.exp().unsqueeze(-1) + second * log_second.exp().unsqueeze(-1)
    return total.to(first.dtype)
