"""Fused attention: queries are rows; which keys they need is for passes/attend.py to say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...placement import Chunk, Placement, Whole
from .registry import Operand, rule

aten = torch.ops.aten

SDPA = aten.scaled_dot_product_attention.default
SOFTMAX = {aten.softmax.int, aten._softmax.default}


@rule(SDPA)
def scaled_dot_product_attention(
    query: Operand, key: Operand, attn_mask: Any, out: Operand
) -> Iterator[tuple[Placement, ...]]:
    """``[..., L, E], [..., S, E], [..., S, Ev]`` with a mask ``[..., L, S]``.

    ``is_causal`` aligns queries and keys at the top left: passes/split.py replaces it by the
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
