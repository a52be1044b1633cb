"""Ops that treat every element by itself, with broadcasting; and those of them that are linear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from seqsplit.ir.placement import Chunk, Placement, Sum, Whole
from seqsplit.passes.rules.registry import Operand, rule

aten = torch.ops.aten

# Pointwise, but without the tag that says so.
_UNTAGGED = {
    aten.__and__.Tensor,
    aten.__and__.Scalar,
    aten.__or__.Tensor,
    aten.__or__.Scalar,
    aten.__xor__.Tensor,
    aten._to_copy.default,
    aten.alias.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.exponential.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.detach.default,
    aten.dropout.default,
    aten.isfinite.default,
    aten.isinf.default,
    aten.isnan.default,
    aten.lift_fresh_copy.default,
    aten.log_sigmoid.default,
    aten.mish.default,
    aten.native_dropout.default,
    aten.normal_functional.default,
    aten.prelu.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.rrelu.default,
    aten.selu.default,
    aten.celu.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
    aten.alpha_dropout.default,
    aten.floor_divide.default,
    aten.masked_fill.Tensor,
    aten.polar.default,
    aten.where.Scalar,
    aten.where.ScalarOther,
    aten.uniform.default,
    aten.where.ScalarSelf,
}

# Linear in their operands together (a sum of shares goes through), with how many they take: a
# number in the place of one would be added once per chunk.
_ADDITIVE = {aten.add.Tensor: 2, aten.sub.Tensor: 2, aten.neg.default: 1, aten.clone.default: 1}
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.alias.default}
# Linear in the first operand, the others being the same for every chunk.
_SCALING = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


def _is_pointwise(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags and not target._schema.is_mutable


def broadcast(operand: Operand, out: Operand, dim: int) -> Placement:
    """What an operand holds when dim ``dim`` of the broadcast output is split."""
    own = dim - (out.ndim - operand.ndim)
    if own < 0 or (operand.shape[own] == 1 and out.shape[dim] != 1):
        return Whole
    return Chunk(own)


@rule(*_UNTAGGED, family=_is_pointwise)
def pointwise(
    out: Operand, operands: list[Operand], target: Any
) -> Iterator[tuple[Placement, ...]]:
    for dim in range(out.ndim):
        yield Chunk(dim), *(broadcast(operand, out, dim) for operand in operands)
    additive = _ADDITIVE.get(target) == len(operands)
    additive = additive and all(operand.shape == out.shape for operand in operands)
    if additive or (target in _CASTS and _widens(operands[0].dtype, out.dtype)):
        yield Sum, *(Sum for _ in operands)
    if target in _SCALING and operands:
        yield Sum, Sum, *(Whole for _ in operands[1:])
        if target is aten.mul.Tensor and len(operands) == 2:
            yield Sum, Whole, Sum


def _widens(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast loses nothing, so that shares may be cast before they are added up."""
    return given.is_floating_point and torch.promote_types(given, wanted) == wanted
