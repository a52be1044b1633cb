"""Ops that reduce or normalise over some dims and treat the other dims one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from seqsplit.ir.placement import Chunk, Placement, Sum, Whole
from seqsplit.ops.linear_attention import linear_attention
from seqsplit.ops.linear_scan import linear_scan
from seqsplit.passes.rules.pointwise import broadcast
from seqsplit.passes.rules.registry import Operand, rule
from seqsplit.passes.rules.scans import final_state_of, recurrence_of

aten = torch.ops.aten

Rows = Iterator[tuple[Placement, ...]]


@rule(family=lambda target: recurrence_of(target) is not None)
def recurrent() -> Rows:
    """No rows along the sequence, which is scanned (split/demand.py), and none along others."""
    yield from ()


@rule(family=lambda target: final_state_of(target) is not None)
def final_state(target: Any, operands: list[Operand]) -> Rows:
    """The last chunk gives it, the share of all others is zero."""
    yield Sum, *final_state_of(target).wanted(len(operands))


def _as_dims(dim: Any, ndim: int) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(ndim))
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return [d % ndim if ndim else 0 for d in dims]


def _kept(ndim: int, reduced: list[int], keepdim: bool) -> Iterator[tuple[int, int]]:
    """Pairs (output dim, input dim) of the dims that a reduction keeps."""
    out_dim = 0
    for dim in range(ndim):
        if dim in reduced:
            out_dim += int(keepdim)
        else:
            yield out_dim, dim
            out_dim += 1


@rule(aten.sum.default)
def sum_all(self: Operand) -> Rows:
    for dim in range(self.ndim):
        yield Sum, Chunk(dim)
    yield Sum, Sum


@rule(aten.sum.dim_IntList)
def sum_dims(self: Operand, dim: Any, keepdim: bool) -> Rows:
    reduced = _as_dims(dim, self.ndim)
    for out_dim, in_dim in _kept(self.ndim, reduced, keepdim):
        yield Chunk(out_dim), Chunk(in_dim)
    for in_dim in reduced:
        yield Sum, Chunk(in_dim)
    yield Sum, Sum


@rule(
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.logsumexp.default,
    aten.var.dim,
    aten.var.correction,
    aten.std.dim,
    aten.std.correction,
    aten.var_mean.correction,
    aten.linalg_vector_norm.default,
    aten.norm.ScalarOpt_dim,
    aten.any.dim,
    aten.all.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.prod.dim_int,
    aten.count_nonzero.dim_IntList,
)
def reduce(operands: list[Operand], dim: Any, keepdim: bool = False) -> Rows:
    (x,) = operands
    for out_dim, in_dim in _kept(x.ndim, _as_dims(dim, x.ndim), keepdim):
        yield Chunk(out_dim), Chunk(in_dim)


@rule(aten.histc.default)
def histogram(self: Operand, min: float, max: float) -> Rows:  # noqa: A002 - the schema's names
    """Counts add up, unless the bins depend on the largest value of all."""
    for dim in range(self.ndim if min < max else 0):
        yield Sum, Chunk(dim)


@rule(
    aten.softmax.int,
    aten._softmax.default,
    aten.log_softmax.int,
    aten._log_softmax.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.glu.default,
    aten.flip.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.topk.default,
    aten.diff.default,
    aten.renorm.default,
    aten.cross.default,
    aten.linalg_cross.default,
)
def along_one_dim(operands: list[Operand], dim: Any = None, dims: Any = None) -> Rows:
    along = _as_dims(dims if dims is not None else dim, operands[0].ndim)
    for kept in range(operands[0].ndim):
        if kept not in along:
            yield Chunk(kept), *(Chunk(kept) for _ in operands)


@rule(linear_scan)
def along_time(operands: list[Operand], out: Operand, arg2: int) -> Rows:
    for kept in range(out.ndim):
        if kept != arg2:
            yield Chunk(kept), *(broadcast(operand, out, kept) for operand in operands)


@rule(linear_attention)
def by_batch_and_head(operands: list[Operand]) -> Rows:
    for kept in (0, 2):
        yield Chunk(kept), *(Chunk(kept) for _ in operands)


@rule(aten.layer_norm.default, aten.native_layer_norm.default)
def layer_norm(operands: list[Operand], normalized_shape: list[int]) -> Rows:
    x, *affine = operands
    for dim in range(x.ndim - len(normalized_shape)):
        yield Chunk(dim), Chunk(dim), *(Whole for _ in affine)


@rule(aten.rms_norm.default, aten._fused_rms_norm.default)
def rms_norm(operands: list[Operand], normalized_shape: list[int]) -> Rows:
    yield from layer_norm(operands, normalized_shape)


@rule(aten.group_norm.default)
def group_norm(operands: list[Operand]) -> Rows:
    yield Chunk(0), Chunk(0), *(Whole for _ in operands[1:])
