"""Fused attention: queries are rows; which keys they need is for passes/split/attend.py to say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from seqsplit.ir.placement import Chunk, Placement, Whole
from seqsplit.passes.rules.registry import Operand, rule

aten = torch.ops.aten

SDPA = aten.scaled_dot_product_attention.default
SOFTMAX = {aten.softmax.int, aten._softmax.default}


def kernel_of(target: Any) -> Any:
    """The :class:`~..kernels.Kernel` that a node's target calls, if it calls one."""
    return getattr(target, "attends", None)


@rule(SDPA)
def scaled_dot_product_attention(
    query: Operand, key: Operand, attn_mask: Any, out: Operand
) -> Iterator[tuple[Placement, ...]]:
    """``[..., L, E], [..., S, E], [..., S, Ev]`` with a mask ``[..., L, S]``.

    ``is_causal`` aligns queries and keys at the top left: passes/split/body.py replaces it by the
    alignment that a chunk of later queries needs.
    """

    def masked(dim: int) -> list[Placement]:
        if not isinstance(attn_mask, Operand):
            return []
        own = dim + attn_mask.ndim - out.ndim
        return [Chunk(own) if own >= 0 and attn_mask.shape[own] != 1 else Whole]

    for dim in range(out.ndim - 2):
        if query.shape[dim] == key.shape[dim]:  # not heads that share a key head
            yield Chunk(dim), Chunk(dim), Chunk(dim), Chunk(dim), *masked(dim)
    yield Chunk(-2), Chunk(-2), Whole, Whole, *masked(out.ndim - 2)


@rule(family=lambda target: kernel_of(target) is not None)
def kernel(operands: list[Operand], target: Any) -> Iterator[tuple[Placement, ...]]:
    """``[B, T, H, E]``: sequences are independent. Their positions are for split/attend.py."""
    attends = kernel_of(target)
    if attends.dim == 1:
        split = [attends.places[role] for role in ("query", "key", "value")]
        slopes = attends.places.get("slopes")
        if slopes is not None and operands[slopes].ndim > 1:
            split.append(slopes)
        yield Chunk(0), *(Chunk(0) if i in split else Whole for i in range(len(operands)))
