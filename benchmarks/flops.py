"""Count the FLOPs of a step, matrix products and attention apart, causality taken into account.

torch's own counter has no formula for attention on CPU and counts a causal square as a full one.
Here an attention op counts the (query, key) pairs it has to visit: with ``is_causal`` the pairs of
the triangle, without it the whole rectangle (also under an explicit mask: the kernels compute all
of it). A multiply-add is two FLOPs. Everything that is not a product (norms, softmax, rotations)
counts nothing, as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def causal_pairs(queries: int, keys: int, align: str) -> int:
    """Pairs (query, key) under a causal mask on a ``queries x keys`` rectangle.

    Args:
        queries: number of query positions.
        keys: number of key positions.
        align: ``"top_left"``: query i sees keys 0..i (``is_causal`` on CPU and in the math
            kernel). ``"bottom_right"``: the last query sees all keys (flash kernels on CUDA).
    """
    if align == "top_left":
        offset = 0
    elif align == "bottom_right":
        offset = keys - queries
    else:
        raise ValueError(f'align must be "top_left" or "bottom_right", not {align!r}')
    # Query i sees clamp(i + 1 + offset, 0, keys) keys: nothing, then a ramp, then all of them.
    first = min(max(0, -offset), queries)
    full = min(max(keys - offset, first), queries)  # from here on every key is seen
    ramp = full - first
    return ramp * (first + 1 + offset + full + offset) // 2 + (queries - full) * keys


def attention_flops(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    *,
    causal: bool,
    align: str,
    backward: bool,
) -> int:
    """FLOPs of one fused attention call on ``[batch, heads, length, head_dim]`` shapes.

    Forward: scores and their product with V. Backward: the scores again and four products. K and V
    may have fewer heads than the queries; work is per query head.
    """
    batch, heads, queries, d_qk = query
    keys, d_v = key[2], value[3]
    pairs = causal_pairs(queries, keys, align) if causal else queries * keys
    widths = 3 * d_qk + 2 * d_v if backward else d_qk + d_v
    return 2 * batch * heads * pairs * widths


def _sdpa(align: str, backward: bool) -> Callable[..., int]:
    """A formula for ops on ``[batch, heads, length, head_dim]`` that have ``is_causal``."""

    def formula(arguments: dict[str, Any]) -> int:
        return attention_flops(
            arguments["query"].shape,
            arguments["key"].shape,
            arguments["value"].shape,
            causal=arguments["is_causal"],
            align=align,
            backward=backward,
        )

    return formula


def _packed(align: Callable[[dict[str, Any]], str | None], backward: bool) -> Callable[..., int]:
    """A formula for ops on ``[batch, length, heads, head_dim]``, or packed ones by offsets."""

    def formula(arguments: dict[str, Any]) -> int:
        q, k, v = arguments["query"], arguments["key"], arguments["value"]
        offsets_q = arguments.get("cum_seq_q", arguments.get("cu_seqlens_q"))
        offsets_k = arguments.get("cum_seq_k", arguments.get("cu_seqlens_k"))
        alignment = align(arguments)
        if offsets_q is None:
            calls = [(q.shape[0], q.shape[1], k.shape[1])]
        else:
            lengths = zip(offsets_q.diff().tolist(), offsets_k.diff().tolist(), strict=True)
            calls = [(1, queries, keys) for queries, keys in lengths]
        return sum(
            attention_flops(
                (batch, q.shape[-2], queries, q.shape[-1]),
                (batch, k.shape[-2], keys, k.shape[-1]),
                (batch, v.shape[-2], keys, v.shape[-1]),
                causal=alignment is not None,
                align=alignment or "top_left",
                backward=backward,
            )
            for batch, queries, keys in calls
        )

    return formula


def _flash_align(arguments: dict[str, Any]) -> str | None:
    return "bottom_right" if arguments["is_causal"] else None


def _efficient_align(arguments: dict[str, Any]) -> str | None:
    # 0: no mask; 1: causal from the top left; 2: causal from the bottom right.
    return (None, "top_left", "bottom_right")[arguments["custom_mask_type"]]


# Fused attention ops and how each aligns `is_causal` when queries and keys differ in number.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: _sdpa("top_left", False),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa("top_left", True),
    aten._scaled_dot_product_flash_attention: _sdpa("bottom_right", False),
    aten._scaled_dot_product_flash_attention_backward: _sdpa("bottom_right", True),
    aten._scaled_dot_product_efficient_attention: _sdpa("top_left", False),
    aten._scaled_dot_product_efficient_attention_backward: _sdpa("top_left", True),
    aten._scaled_dot_product_cudnn_attention: _sdpa("top_left", False),
    aten._scaled_dot_product_cudnn_attention_backward: _sdpa("top_left", True),
    aten._flash_attention_forward: _packed(_flash_align, False),
    aten._flash_attention_backward: _packed(_flash_align, True),
    aten._efficient_attention_forward: _packed(_efficient_align, False),
    aten._efficient_attention_backward: _packed(_efficient_align, True),
}

# Products over a batch dim: attention written by hand, and linears on inputs that are not flat.
BATCHED = (aten.bmm, aten.baddbmm)


# The registry knows products by the ops that make a new tensor.
_IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}


class FlopCounter(TorchDispatchMode):
    """Counts while active, in forward and backward, also in code Dynamo has compiled to aten ops.

    Attributes:
        linear: FLOPs of matrix products without a batch dim, and of convolutions.
        batched: FLOPs of products with a batch dim.
        attention: FLOPs of fused attention.
        by_op: the same by op.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Dynamo would otherwise refuse to compile while the counter is active. The compiler's own
        # work (capture, validation) is not counted.
        return True

    @property
    def linear(self) -> int:
        apart = set(BATCHED) | set(ATTENTION)
        return sum(count for op, count in self.by_op.items() if op not in apart)

    @property
    def batched(self) -> int:
        return sum(self.by_op[op] for op in BATCHED)

    @property
    def attention(self) -> int:
        return sum(self.by_op[op] for op in ATTENTION)

    @property
    def total(self) -> int:
        return sum(self.by_op.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        op = getattr(func, "overloadpacket", func)
        op = _IN_PLACE.get(op, op)
        if op in ATTENTION:
            self.by_op[op] += ATTENTION[op](_arguments(func, args, kwargs))
        elif op in flop_registry:
            self.by_op[op] += int(flop_registry[op](*args, **kwargs, out_val=result))
        return result


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by the name its schema gives them, defaults filled in."""
    named = {}
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            named[argument.name] = args[index]
        else:
            named[argument.name] = kwargs.get(argument.name, argument.default_value)
    return named
