"""Products that sum over a shared dim: linear, matmul and their relatives, einsum."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from seqsplit.ir.placement import Chunk, Placement, Sum, Whole
from seqsplit.passes.rules.pointwise import broadcast
from seqsplit.passes.rules.registry import Operand, rule

aten = torch.ops.aten

Rows = Iterator[tuple[Placement, ...]]


@rule(aten.mm.default)
def mm(self: Operand, mat2: Operand) -> Rows:
    yield Chunk(0), Chunk(0), Whole
    yield Chunk(1), Whole, Chunk(1)
    yield Sum, Chunk(1), Chunk(0)
    yield Sum, Sum, Whole
    yield Sum, Whole, Sum


@rule(aten.bmm.default)
def bmm(self: Operand, mat2: Operand) -> Rows:
    yield Chunk(0), Chunk(0), Chunk(0)
    yield Chunk(1), Chunk(1), Whole
    yield Chunk(2), Whole, Chunk(2)
    yield Sum, Chunk(2), Chunk(1)


@rule(aten.mv.default)
def mv(self: Operand, vec: Operand) -> Rows:
    yield Chunk(0), Chunk(0), Whole
    yield Sum, Chunk(1), Chunk(0)


@rule(aten.dot.default)
def dot(self: Operand, tensor: Operand) -> Rows:
    yield Sum, Chunk(0), Chunk(0)


@rule(aten.cdist.default)
def cdist(x1: Operand, x2: Operand, out: Operand) -> Rows:
    for dim in range(out.ndim - 2):
        yield Chunk(dim), broadcast(x1, out, dim), broadcast(x2, out, dim)
    yield Chunk(-2), Chunk(-2), Whole
    yield Chunk(-1), Whole, Chunk(-2)


@rule(aten.linear.default)
def linear(input: Operand, bias: Operand | None) -> Rows:  # noqa: A002 - the schema's name
    rest = [Whole] if bias is not None else []
    for dim in range(input.ndim - 1):
        yield Chunk(dim), Chunk(dim), Whole, *rest
    yield Chunk(-1), Whole, Chunk(0), *([Chunk(0)] if bias is not None else [])
    if bias is None:
        yield Sum, Chunk(-1), Chunk(-1)
        yield Sum, Sum, Whole


@rule(aten.addmm.default)
def addmm(self: Operand, mat1: Operand, mat2: Operand, out: Operand) -> Rows:
    yield Chunk(0), broadcast(self, out, 0), Chunk(0), Whole
    yield Chunk(1), broadcast(self, out, 1), Whole, Chunk(1)


@rule(aten.baddbmm.default)
def baddbmm(self: Operand, batch1: Operand, batch2: Operand, out: Operand) -> Rows:
    yield Chunk(0), broadcast(self, out, 0), Chunk(0), Chunk(0)
    yield Chunk(1), broadcast(self, out, 1), Chunk(1), Whole
    yield Chunk(2), broadcast(self, out, 2), Whole, Chunk(2)


@rule(aten.matmul.default)
def matmul(self: Operand, other: Operand, out: Operand) -> Rows:
    if self.ndim == 1 or other.ndim == 1:
        if self.ndim > 1:
            for dim in range(self.ndim - 1):
                yield Chunk(dim), Chunk(dim), Whole
        yield Sum, Chunk(-1), Chunk(-2 if other.ndim > 1 else 0)
        return
    batch = out.ndim - 2
    for dim in range(batch):
        yield Chunk(dim), broadcast(self, out, dim), broadcast(other, out, dim)
    yield Chunk(-2), Chunk(-2), Whole
    yield Chunk(-1), Whole, Chunk(-1)
    yield Sum, Chunk(-1), Chunk(-2)
    yield Sum, Sum, Whole
    yield Sum, Whole, Sum


@rule(aten.einsum.default)
def einsum(equation: str, tensors: list[Operand]) -> Rows:
    parsed = parse_einsum(equation, [operand.ndim for operand in tensors])
    if parsed is None:
        return
    inputs, output = parsed
    if any(len(set(labels)) != len(labels) for labels in inputs):
        return  # a diagonal: the dim cannot be cut on its own

    def placements(label: str) -> list[Placement]:
        return [Chunk(labels.index(label)) if label in labels else Whole for labels in inputs]

    for dim, label in enumerate(output):
        yield Chunk(dim), *placements(label)
    for label in sorted({label for labels in inputs for label in labels} - set(output)):
        yield Sum, *placements(label)


def parse_einsum(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]] | None:
    """Labels of each operand's dims and of the output's, an ellipsis spelled out.

    Returns ``None`` for an ellipsis that stands for different numbers of dims.
    """
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    extra = {
        rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks) if "..." in term
    }
    if len(extra) > 1:
        return None
    hidden = [f"_{index}" for index in range(extra.pop() if extra else 0)]

    def labels(term: str) -> list[str]:
        head, dots, tail = term.partition("...")
        return [*head, *(hidden if dots else []), *tail]

    inputs = [labels(term) for term in terms]
    if arrow:
        return inputs, labels(right)
    flat = [label for term in inputs for label in term if label not in hidden]
    return inputs, hidden + sorted(label for label in set(flat) if flat.count(label) == 1)
