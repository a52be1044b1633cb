"""Ops that rename, merge, split, repeat or pick dims and compute nothing.

Reshapes are read through a small algebra. A dim that holds the sequence inside factors, of size
``outer * T * inner``, lies in the flattened tensor between ``before * outer`` and
``inner * after``; the reshaped tensor holds the same sequence in the dim for which these two
products are the same.

>>> # view: [B, T, V] -> [B*T, V]
>>> # out dim 0, outer=B, inner=1   <-   in dim 1
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch

from seqsplit.ir.placement import Chunk, Placement, Whole
from seqsplit.passes.graph.sizes import quotient
from seqsplit.passes.rules.registry import Operand, rule

aten = torch.ops.aten

Rows = Iterator[tuple[Placement, ...]]


def _product(sizes: tuple[sympy.Expr, ...]) -> sympy.Expr:
    return sympy.Mul(*sizes) if sizes else sympy.S.One


def reshape_rows(source: Operand, out: Operand) -> Rows:
    """Rows of a reshape, from the shapes alone (see the module's text)."""
    for out_dim, out_size in enumerate(out.shape):
        before = _product(out.shape[:out_dim])
        after = _product(out.shape[out_dim + 1 :])
        for in_dim, in_size in enumerate(source.shape):
            same_before = _product(source.shape[:in_dim])
            same_after = _product(source.shape[in_dim + 1 :])
            if in_size == out_size and in_size != 1 and before == same_before:
                yield Chunk(out_dim), Chunk(in_dim)
            # the output merges what the source has as a dim of its own
            outer, inner = quotient(same_before, before), quotient(same_after, after)
            if _splits(out_size, outer, inner, in_size):
                yield Chunk(out_dim, outer, inner), Chunk(in_dim)
            # and the other way round
            outer, inner = quotient(before, same_before), quotient(after, same_after)
            if _splits(in_size, outer, inner, out_size):
                yield Chunk(out_dim), Chunk(in_dim, outer, inner)


def _splits(
    merged: sympy.Expr, outer: sympy.Expr | None, inner: sympy.Expr | None, size: sympy.Expr
) -> bool:
    if outer is None or inner is None or (outer == 1 and inner == 1) or not size.free_symbols:
        return False
    return sympy.expand(outer * size * inner - merged) == 0


@rule(aten.view.default, aten._unsafe_view.default, sizes="size")
def view(self: Operand, out: Operand) -> Rows:
    yield from reshape_rows(self, out)


@rule(aten.reshape.default, sizes="shape")
def reshape(self: Operand, out: Operand) -> Rows:
    yield from reshape_rows(self, out)


@rule(aten.flatten.using_ints)
def flatten(self: Operand, out: Operand) -> Rows:
    yield from reshape_rows(self, out)


@rule(aten.unflatten.int)
def unflatten(self: Operand, dim: int, out: Operand) -> Rows:
    dim %= self.ndim
    grown = out.ndim - self.ndim
    for kept in range(self.ndim):  # the dim that is taken apart has to stay whole
        if kept != dim:
            yield Chunk(kept if kept < dim else kept + grown), Chunk(kept)


@rule(aten.expand.default, sizes="size")
def expand(self: Operand, out: Operand) -> Rows:
    shift = out.ndim - self.ndim
    for dim in range(out.ndim):
        own = dim - shift
        broadcast = own < 0 or (self.shape[own] == 1 and out.shape[dim] != 1)
        yield Chunk(dim), Whole if broadcast else Chunk(own)


@rule(aten.broadcast_to.default, sizes="size")
def broadcast_to(self: Operand, out: Operand) -> Rows:
    yield from expand(self, out)


@rule(operator.getitem)
def getitem(out: Operand) -> Rows:
    """An item of a tuple: its dims are those of the tuple's tensors."""
    for dim in range(out.ndim):
        yield Chunk(dim), Chunk(dim)


@rule(aten.unsqueeze.default)
def unsqueeze(self: Operand, dim: int) -> Rows:
    dim %= self.ndim + 1
    for own in range(self.ndim):
        yield Chunk(own + int(own >= dim)), Chunk(own)


@rule(aten.squeeze.dim, aten.squeeze.dims)
def squeeze(self: Operand, dim: int | list[int]) -> Rows:
    """Of dims of size 1, and never of one that may be a chunk's (rewrite/normalize.py)."""
    gone = {d % self.ndim for d in ([dim] if isinstance(dim, int) else dim)}
    kept = [own for own in range(self.ndim) if own not in gone]
    for out_dim, own in enumerate(kept):
        yield Chunk(out_dim), Chunk(own)


@rule(aten.transpose.int)
def transpose(operands: list[Operand], dim0: int = 0, dim1: int = 1) -> Rows:
    (x,) = operands
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    yield from _reordered(order)


@rule(aten.t.default, aten.numpy_T.default, aten.mT.default)
def reverse_dims(self: Operand, target: Any) -> Rows:
    order = list(range(self.ndim))
    if target is aten.mT.default:
        order[-2:] = reversed(order[-2:])
    else:
        order.reverse()
    yield from _reordered(order)


@rule(aten.permute.default)
def permute(self: Operand, dims: list[int]) -> Rows:
    yield from _reordered([dim % self.ndim for dim in dims])


@rule(aten.movedim.int)
def movedim(self: Operand, source: int, destination: int) -> Rows:
    order = [dim for dim in range(self.ndim) if dim != source % self.ndim]
    order.insert(destination % self.ndim, source % self.ndim)
    yield from _reordered(order)


def _reordered(order: list[int]) -> Rows:
    for out_dim, in_dim in enumerate(order):
        yield Chunk(out_dim), Chunk(in_dim)


@rule(aten.select.int, aten.unbind.int)
def select(self: Operand, dim: int) -> Rows:
    dim %= self.ndim
    for own in range(self.ndim):
        if own != dim:
            yield Chunk(own - int(own > dim)), Chunk(own)


@rule(
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
)
def split(self: Operand, dim: int) -> Rows:
    for own in range(self.ndim):
        if own != dim % self.ndim:
            yield Chunk(own), Chunk(own)


@rule(aten.cat.default, aten.concat.default)
def cat(operands: list[Operand], dim: int) -> Rows:
    ndim = max(operand.ndim for operand in operands)
    for own in range(ndim):
        if own != dim % ndim:
            yield Chunk(own), *(Chunk(own) for _ in operands)


@rule(aten.stack.default)
def stack(operands: list[Operand], dim: int) -> Rows:
    dim %= operands[0].ndim + 1
    for own in range(operands[0].ndim):
        yield Chunk(own + int(own >= dim)), *(Chunk(own) for _ in operands)


def _rewrite_slice(node: Any, arguments: dict, placement: Placement, chunk: Any) -> dict:
    """A slice that reaches the sequence's end reaches the chunk's; one of a table moves along."""
    dim = (arguments["dim"] or 0) % node.meta["val"].ndim
    span = placement.dims.get(dim)
    if span is None:
        return arguments
    source, out = chunk.shape(node.args[0])[dim], chunk.shape(node)[dim]
    if chunk.is_sequence(source):
        if source == out:
            return {**arguments, "start": 0, "end": None}
        return {**arguments, "start": 0, "end": chunk.size(out, span)}
    first = chunk.first(span)
    start = arguments["start"] or 0
    begin = chunk.add(first, start) if start else first
    return {**arguments, "start": begin, "end": chunk.add(begin, chunk.size(out, span))}


@rule(aten.slice.Tensor, rewrite=_rewrite_slice)
def slice_(self: Operand, dim: int, start: Any, step: Any, out: Operand) -> Rows:
    dim = (dim or 0) % self.ndim
    for own in range(self.ndim):
        if own != dim:
            yield Chunk(own), Chunk(own)
    from_the_front = start in (None, 0) and step in (None, 1)
    grows_with = out.shape[dim].free_symbols - self.shape[dim].free_symbols
    if grows_with and step in (None, 1):
        yield Chunk(dim), Whole  # the first rows of a table, however long that is
    elif from_the_front and self.shape[dim].free_symbols:
        yield Chunk(dim), Chunk(dim)  # drops at most a few last positions


@rule(aten.select_scatter.default, aten.slice_scatter.default)
def scatter(self: Operand, src: Operand, dim: int) -> Rows:
    dim %= self.ndim
    lost = int(src.ndim < self.ndim)
    for own in range(self.ndim):
        if own != dim:
            yield Chunk(own), Chunk(own), Chunk(own - lost * int(own > dim))


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(self: Operand, repeats: Any, dim: int | None) -> Rows:
    if dim is None:
        return
    for own in range(self.ndim):
        if own != dim % self.ndim:
            yield Chunk(own), Chunk(own)
        elif isinstance(repeats, int) and repeats > 0:  # copies of a row stand side by side
            yield Chunk(own, sympy.S.One, sympy.Integer(repeats)), Chunk(own)


@rule(aten.repeat.default, aten.tile.default)
def repeat(self: Operand, out: Operand) -> Rows:
    shift = out.ndim - self.ndim
    for dim in range(out.ndim):
        own = dim - shift
        if own >= 0 and self.shape[own] == out.shape[dim]:
            yield Chunk(dim), Chunk(own)


@rule(aten.roll.default)
def roll(self: Operand, dims: list[int]) -> Rows:
    rolled = {dim % self.ndim for dim in dims} or set(range(self.ndim))
    for own in range(self.ndim):
        if own not in rolled:
            yield Chunk(own), Chunk(own)


@rule(aten.pad.default, aten.constant_pad_nd.default)
def pad(self: Operand, pad: list[Any]) -> Rows:
    padded = len(pad) // 2
    for own in range(self.ndim - padded):
        yield Chunk(own), Chunk(own)
    for index in range(padded):
        if pad[2 * index] == 0 and pad[2 * index + 1] == 0:
            yield Chunk(self.ndim - 1 - index), Chunk(self.ndim - 1 - index)


@rule(aten.view_as_complex.default)
def view_as_complex(self: Operand) -> Rows:
    for dim in range(self.ndim - 1):
        yield Chunk(dim), Chunk(dim)


@rule(aten.view_as_real.default)
def view_as_real(self: Operand) -> Rows:
    for dim in range(self.ndim):
        yield Chunk(dim), Chunk(dim)


@rule(aten.diagonal.default)
def diagonal(self: Operand, dim1: int, dim2: int) -> Rows:
    kept = [d for d in range(self.ndim) if d not in (dim1 % self.ndim, dim2 % self.ndim)]
    for out_dim, own in enumerate(kept):
        yield Chunk(out_dim), Chunk(own)
