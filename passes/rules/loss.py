"""Losses. Means were rewritten as sum divided by count before (passes/rewrite/normalize.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from seqsplit.ir.placement import Chunk, Placement, Sum, Whole
from seqsplit.passes.rules.pointwise import broadcast
from seqsplit.passes.rules.registry import Operand, rule

aten = torch.ops.aten

Rows = Iterator[tuple[Placement, ...]]

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction

ELEMENTWISE_LOSSES = (
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.kl_div.default,
    aten.soft_margin_loss.default,
)


@rule(
    aten.cross_entropy_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
)
def class_loss(self: Operand, target: Operand, weight: Any, reduction: int) -> Rows:
    """Scores ``[N, C, ...]`` with targets ``[N, ...]`` (class indices) or ``[N, C, ...]``."""
    if self.ndim < 2 or reduction == MEAN:
        return
    rest = [Whole] if weight is not None else []
    indices = target.ndim == self.ndim - 1
    for dim in range(self.ndim):
        if dim == 1:
            continue
        lost = int(dim > 1)
        labels = Chunk(dim - lost) if indices else Chunk(dim)
        yield Sum if reduction == SUM else Chunk(dim - lost), Chunk(dim), labels, *rest


@rule(*ELEMENTWISE_LOSSES)
def elementwise_loss(operands: list[Operand], reduction: int, out: Any) -> Rows:
    first = operands[0]
    if reduction == MEAN or any(o.shape != first.shape for o in operands[:2]):
        return
    for dim in range(first.ndim):
        placements = [broadcast(operand, first, dim) for operand in operands]
        yield Sum if reduction == SUM else Chunk(dim), *placements
