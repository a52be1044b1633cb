"""Free the length: a graph that was captured for one length, written for any.

Where a model's own Python looks at the length (a mask in a buffer that is exactly as long, a
library that solves for shapes), Dynamo makes it a constant of the graph, and nothing tells the
length from a width any more. :mod:`.reading` proposes which of the numbers are the length; here
the graph is written with a symbol in their place.

The reading is a proposal, never a claim. A graph in which the length was fixed is only ever run at
that length (Dynamo captures again for another one), and there the new graph is the captured one,
whatever was read. Where a reading makes no sense for other lengths, running the graph with the
symbol fixes the symbol, and the graph is left as it was captured.

A table (a weight, a buffer) keeps its size: where that is the length, its first entries are taken,
as a model would do whose table is longer than the sequence.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from seqsplit.passes.analysis.facts import FEW, fixed_dims
from seqsplit.passes.analysis.tables import compute_tables
from seqsplit.passes.graph.lowered import Lowered, Region
from seqsplit.passes.graph.sizes import SizeWriter
from seqsplit.passes.rewrite.reading import (
    LENGTH,
    Fixed,
    Place,
    Sizes,
    Unreadable,
    arguments_at,
    dims_of,
    is_given,
    open_dims,
    read_sizes,
    value_of,
)

__all__ = ["free_length"]

aten = torch.ops.aten

# Where an op says at which entry it begins; before it stands the dim.
_FIRST = {
    aten.select.int: 2,
    aten.select_scatter.default: 3,
    aten.slice.Tensor: 2,
    aten.slice_scatter.default: 3,
}


def free_length(lowered: Lowered, examples: Sequence[Any], seq_dim: int | None) -> Lowered | None:
    """The graph with a symbol for the length that the model's code has fixed.

    Args:
        lowered: as it was captured; what it computes is left alone.
        examples: the real inputs of that call, in the graph's order.
        seq_dim: the dim of the inputs that is the sequence, ``None`` for dim 1.

    Returns:
        A new graph, at the captured length the same; ``None`` if no length was fixed, or if the
        graph makes no sense for other lengths.
    """
    found = fixed_dims(lowered, 1 if seq_dim is None else seq_dim)
    if not any(_may_hold_tokens(node) for node, _ in found):
        return None
    length = max(found.values())
    fixed = Fixed(length, frozenset(place for place, size in found.items() if size == length))
    _count_from_front(lowered, fixed.length)
    compute_tables(lowered)
    tables = {
        node
        for node in lowered.graph.nodes
        if is_given(node) and dims_of(lowered, node, fixed.length) and not open_dims(node)
    }
    weights = {
        node
        for node, value in zip(lowered.placeholders, examples)
        if isinstance(value, nn.Parameter)
    }
    # A weight of that size is rather a width than the length, but it may be a table of positions.
    for asked in dict.fromkeys((frozenset(tables - weights), frozenset(tables))):
        with contextlib.suppress(Unreadable), _quietly():
            readings = read_sizes(lowered, fixed, asked)
            return _Rewriting(lowered, fixed).write(readings)
    return None


def _may_hold_tokens(node: fx.Node) -> bool:
    """Whether an input is of token ids, or of a width for each token; a matrix of numbers has
    columns, which are none."""
    held = node.meta["val"]
    return held.ndim > 2 or not held.is_floating_point()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without a line in the log for each op that does not take what it is tried with."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _count_from_front(lowered: Lowered, length: int) -> None:
    """The last entries, as many as there are, are all of them: ``x[-T:]`` is ``x[0:]``."""
    for node in lowered.graph.nodes:
        place = _FIRST.get(node.target, len(node.args))
        if node.args[place : place + 1] == (-length,):
            source, dim = node.args[0], node.args[place - 1]
            if lowered.shape(source)[dim] == length:
                node.update_arg(place, 0)


class _Rewriting:
    """Writes a copy of a graph with readings in the place of numbers.

    Args:
        lowered: the graph.
        fixed: the length.
    """

    def __init__(self, lowered: Lowered, fixed: Fixed) -> None:
        self._old, self._fixed = lowered, fixed
        self._sizes = Sizes(lowered, fixed, _another_length(lowered, fixed.length))
        self._copies: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        graph.output(graph.graph_copy(lowered.graph, self._copies))
        self._first = next(node for node in graph.nodes if not is_given(node))
        self._new = Lowered(
            fx.GraphModule(lowered.module, graph),
            self._sizes.env,
            list(lowered.writes),
            assumptions=list(lowered.assumptions),
            fixed_length=fixed.length,
        )

    def write(self, readings: dict[Place, sympy.Expr]) -> Lowered:
        """The new graph.

        Raises:
            Unreadable: the ops fix the length again, or another size.
        """
        for node in self._new.graph.nodes:
            node.meta = {k: v for k, v in node.meta.items() if k not in ("shape_exprs", "rows")}
        self._open_inputs({place: expr for place, expr in readings.items() if _is_open(place)})
        writer = SizeWriter(self._new)
        for place, expr in readings.items():
            if not is_given(place[0]):
                _put(self._copies[place[0]], place[1], writer.write(self._own(expr)))
            elif expr == LENGTH and not _is_open(place):
                self._take_first(place, writer.write(self._sizes.length))
        self._run(writer)
        self._check()
        self._new.graph.lint()
        self._new.module.recompile()
        return self._new

    def _own(self, expr: sympy.Expr) -> sympy.Expr:
        return expr.xreplace({LENGTH: self._sizes.length})

    def _open_inputs(self, readings: dict[Place, sympy.Expr]) -> None:
        dims: dict[fx.Node, dict[int, sympy.Expr]] = {}
        for (node, dim), expr in readings.items():
            dims.setdefault(node, {})[dim] = self._own(expr)
        for node in filter(is_given, self._old.graph.nodes):
            self._copies[node].meta["val"] = self._sizes.input(node, dims.get(node, {}))

    def _take_first(self, place: Place, length: Any) -> None:
        """The users of a table get its first entries along a dim."""
        node, dim = self._copies[place[0]], place[1]
        with self._new.graph.inserting_before(self._first):
            first = self._new.graph.call_function(aten.slice.Tensor, (node, dim, 0, length))
        first.meta["region"] = Region()
        node.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)
        self._copies[place[0]] = first  # of which another dim's first entries may be taken

    def _run(self, writer: SizeWriter) -> None:
        """Find every value's sizes in the new symbols."""
        for node in self._new.graph.nodes:
            if node.op == "output" or is_given(node) or writer.wrote(node):
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = value_of(node, self._sizes.mode, args, kwargs)

    def _check(self) -> None:
        env, now, then = self._sizes.env, self._sizes.hints, self._old.hints
        if any(env.simplify(symbol) != symbol for symbol in now):
            raise Unreadable("an op holds for one length only")
        captured = now | {self._sizes.length: self._fixed.length}
        for node, copy in self._copies.items():
            if _shapes(self._old, node, then) != _shapes(self._new, copy, captured):
                raise Unreadable(f"{node} has other sizes at the captured length")


def _another_length(lowered: Lowered, length: int) -> int:
    """A shorter length that is no other size: at the captured one, an op that compares a table's
    size with the length would find them equal, and record that they have to be."""
    numbers = {
        leaf
        for node in lowered.graph.nodes
        for leaf in arguments_at(node)[0]
        if isinstance(leaf, int)
    }
    for node in lowered.placeholders:
        if isinstance(node.meta.get("val"), Tensor):
            numbers |= {int(size) for size in lowered.shape(node) if size.is_Integer}
    numbers |= set(lowered.hints.values())
    return max((n for n in range(FEW, length) if n not in numbers), default=length)


def _is_open(place: Place) -> bool:
    return place[1] in open_dims(place[0]) and is_given(place[0])


def _put(node: fx.Node, index: int, value: Any) -> None:
    leaves, structure = arguments_at(node)
    leaves[index] = value
    node.args, node.kwargs = pytree.tree_unflatten(leaves, structure)


def _shapes(
    lowered: Lowered, node: fx.Node, numbers: dict[sympy.Symbol, int]
) -> list[list[sympy.Expr]]:
    """The shapes of the tensors that a node gives, at a length."""
    values = pytree.tree_leaves(node.meta.get("val"))
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [[lowered.expr(size).xreplace(numbers) for size in t.shape] for t in tensors]
