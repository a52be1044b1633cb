"""The registry of sequence rules, and how rows are read.

A rule is a generator of rows, output first::

    @rule(aten.mm.default)
    def mm(self, mat2):                  # out      <- self, mat2
        yield Chunk(0), Chunk(0), Whole  # rows are independent
        yield Chunk(1), Whole, Chunk(1)
        yield Sum, Chunk(1), Chunk(0)    # the contracted dim is the sequence

A row says: *if every chunk holds these parts of the operands, running the op on them gives that
part of the output*. Parameters of the generator are named as in the op's schema; tensors arrive
as :class:`Operand` (shapes as expressions, no data), everything else as it stands in the graph.
``out`` is the output. Placements of tensor operands follow in the order of the schema, a list of
tensors counting one by one; an absent optional tensor counts for none.

A ``Chunk(dim)`` row holds for any range of that dim (rows, a prefix, a window) and, unless the
row itself names factors, for any merged dim too. Dims that are split together are looked up one
at a time and their operands' placements are joined.

An op without a rule is tried by execution (:mod:`.probe`).

Ops that take sizes need them rewritten: ``sizes="size"`` names the argument that spells the
output's shape; ``rewrite=`` gives a function for the rest.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from seqsplit.ir.placement import Placement, Span, Sum, Whole
from seqsplit.passes.graph.sizes import quotient
from seqsplit.passes.rules import probe as by_execution

__all__ = [
    "Operand",
    "Row",
    "Unsplittable",
    "operands_of",
    "pull",
    "rewrite_arguments",
    "rows_of",
    "rule",
    "sum_rows",
    "takes_double",
]


class Unsplittable(Exception):
    """A node cannot give what is asked of it chunk by chunk.

    Attributes:
        node: the node of the lowered graph.
        reason: one sentence for the report.
    """

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


@dataclass(frozen=True)
class Operand:
    """A tensor as a rule sees it: its shape in symbols and its dtype."""

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Row:
    """One row of a rule: the output's placement and the operands'."""

    out: Placement
    operands: tuple[Placement, ...]

    @property
    def exact_factors(self) -> bool:
        """Whether the row holds only for the factors of merged dims that it names."""
        return any(span.merged for p in (self.out, *self.operands) for _, span in p.spans)


@dataclass(frozen=True)
class _Rule:
    function: Callable[..., Iterator[tuple[Placement, ...]]]
    sizes: str | None
    rewrite: Callable[..., dict[str, Any]] | None


_RULES: dict[Any, _Rule] = {}
_FAMILIES: list[tuple[Callable[[Any], bool], _Rule]] = []


def rule(
    *ops: Any,
    sizes: str | None = None,
    rewrite: Callable[..., dict[str, Any]] | None = None,
    family: Callable[[Any], bool] | None = None,
) -> Callable:
    """Register a generator of rows for ``ops`` (see the module's text).

    Args:
        ops: the op overloads it holds for.
        sizes: the schema's name of the argument that spells the output's shape.
        rewrite: ``rewrite(arguments, placement, sizes_of_the_chunk) -> arguments`` for other
            arguments that depend on where the chunk lies.
        family: a test that makes the rule hold for every op it accepts that has none of its own.
    """

    def register(function: Callable) -> Callable:
        entry = _Rule(function, sizes, rewrite)
        for op in ops:
            _RULES[op] = entry
        if family is not None:
            _FAMILIES.append((family, entry))
        return function

    return register


def _find(target: Any) -> _Rule | None:
    found = _RULES.get(target)
    if found is None:
        found = next((entry for accepts, entry in _FAMILIES if accepts(target)), None)
    return found


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by their names in the op's schema, defaults filled in."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return {f"arg{index}": value for index, value in enumerate(node.args)}
    named = {}
    for index, argument in enumerate(target._schema.arguments):
        if index < len(node.args):
            named[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            named[argument.name] = node.kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value if argument.has_default_value() else None
    return named


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node in schema order, lists flattened, absent ones left out."""
    found: list[fx.Node] = []

    def visit(value: Any) -> None:
        if isinstance(value, fx.Node):
            if isinstance(value.meta.get("val"), (torch.Tensor, tuple, list)):
                found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    for value in arguments_of(node).values():
        visit(value)
    return found


def rows_of(node: fx.Node, shape: Callable[[fx.Node], tuple[sympy.Expr, ...]]) -> tuple[Row, ...]:
    """All rows of a node's rule, dims counted from the front; none if it has no rule.

    Args:
        node: a node of the lowered graph.
        shape: gives a node's shape as expressions.
    """
    cached = node.meta.get("rows")
    if cached is not None:
        return cached
    entry = _find(node.target)
    operands = operands_of(node)
    ranks = [_rank(operand) for operand in operands]
    out_rank = _rank(node)
    if entry is None:
        table = by_execution.probe(node, operands, shape)
    else:
        table = entry.function(**_bind(entry.function, node, shape))
    rows = tuple(
        Row(
            out.normalized(out_rank),
            tuple(p.normalized(rank) for p, rank in zip(ins, ranks, strict=True)),
        )
        for out, *ins in table
    )
    node.meta["rows"] = rows
    return rows


def takes_double(node: fx.Node, shape: Callable[[fx.Node], tuple[sympy.Expr, ...]]) -> bool:
    """Whether a node's op can be tried in float64; PyTorch's own ops with a rule can."""
    plain = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
    if node.op != "call_function" or (plain and _find(node.target) is not None):
        return True
    if node.target is operator.getitem or not operands_of(node):
        return True
    if isinstance(node.meta["val"], torch.SymInt):
        return True
    if "takes_double" not in node.meta:
        node.meta["takes_double"] = by_execution.takes_double(node, operands_of(node), shape)
    return node.meta["takes_double"]


def _rank(node: fx.Node) -> int:
    value = node.meta["val"]
    while isinstance(value, (tuple, list)):
        value = value[0]
    return value.ndim


def _bind(function: Callable, node: fx.Node, shape: Callable) -> dict[str, Any]:
    def as_operand(value: Any) -> Any:
        if isinstance(value, fx.Node):
            held = value.meta.get("val")
            first = held[0] if isinstance(held, (tuple, list)) else held
            return Operand(shape(value), first.dtype) if isinstance(first, torch.Tensor) else held
        if isinstance(value, (list, tuple)):
            return [as_operand(item) for item in value]
        return value

    named = arguments_of(node)
    wanted = inspect.signature(function).parameters
    bound = {name: as_operand(named[name]) for name in wanted if name in named}
    if "out" in wanted and "out" not in bound:
        bound["out"] = as_operand(node)
    if "operands" in wanted and "operands" not in bound:
        bound["operands"] = [as_operand(operand) for operand in operands_of(node)]
    if "target" in wanted and "target" not in bound:
        bound["target"] = node.target
    return bound


def pull(
    node: fx.Node, placement: Placement, shape: Callable[[fx.Node], tuple[sympy.Expr, ...]]
) -> tuple[Placement, ...]:
    """What the operands have to hold so that the node gives ``placement``.

    Raises:
        Unsplittable: no row of the op's rule gives it.
    """
    rows = rows_of(node, shape)
    operands = operands_of(node)
    result = [Whole] * len(operands)
    for dim, span in placement.spans:
        asked = (_asks(row, dim, span) for row in rows)
        wanted = next((operands for operands in asked if operands is not None), None)
        if wanted is None:
            raise Unsplittable(node, _missing(node, rows, dim, span))
        for index, operand in enumerate(wanted):
            result[index] = result[index] | operand
    return tuple(result)


def _missing(node: fx.Node, rows: tuple[Row, ...], dim: int, span: Span) -> str:
    name = node.target if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
    if not rows:
        return f"no sequence rule for {name}"
    return f"{name} mixes positions along dim {dim} ({span})"


def _asks(row: Row, dim: int, span: Span) -> tuple[Placement, ...] | None:
    """What a row asks of the operands for this range of the output, if it gives it.

    A row speaks of one dim of the size ``s``, which may lie inside factors in the output and in
    the operands. The sequence may in turn lie inside factors in ``s``: these carry over.
    """
    if row.out.partial or len(row.out.spans) != 1 or row.out.spans[0][0] != dim:
        return None
    own = row.out.spans[0][1]
    outer, inner = quotient(span.outer, own.outer), quotient(span.inner, own.inner)
    if outer is None or inner is None:
        return None
    return tuple(
        Placement(
            tuple(
                (d, Span(span.kind, span.window, s.outer * outer, s.inner * inner))
                for d, s in operand.spans
            )
        )
        for operand in row.operands
    )


def sum_rows(
    node: fx.Node, shape: Callable[[fx.Node], tuple[sympy.Expr, ...]]
) -> Iterator[tuple[Placement, ...]]:
    """The operands' placements of the rows that give a share of a sum."""
    for row in rows_of(node, shape):
        if row.out == Sum:
            yield row.operands


def contracted(
    node: fx.Node, span: Span, shape: Callable[[fx.Node], tuple[sympy.Expr, ...]]
) -> tuple[Placement, ...]:
    """What the operands hold of the dim that a contraction sums over, restricted to ``span``."""
    for row in sum_rows(node, shape):
        if all(p.spans for p in row) or any(p.spans for p in row):
            return tuple(
                Placement(tuple((dim, Span(span.kind, span.window)) for dim, _ in p.spans))
                for p in row
            )
    raise Unsplittable(node, f"{node.target} has no row for its contracted dim")


def rewrite_arguments(
    node: fx.Node, placement: Placement, arguments: dict[str, Any], chunk: Any
) -> dict[str, Any]:
    """The node's arguments as the chunk's own call needs them.

    Args:
        node: the node of the lowered graph.
        placement: what the node is to give.
        arguments: its arguments by schema name, tensors already those of the chunk.
        chunk: gives sizes (``chunk.size(expr, span)``, ``chunk.first(span)``) as graph values.
    """
    entry = _find(node.target)
    if entry is None:
        return arguments
    if entry.sizes is not None:
        arguments = {**arguments, entry.sizes: chunk.sizes(node, placement)}
    if entry.rewrite is not None:
        arguments = entry.rewrite(node, arguments, placement, chunk)
    return arguments
