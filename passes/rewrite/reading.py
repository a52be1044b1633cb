"""Which sizes of a graph are the length of its sequence, found by asking the ops.

Every size that might be the length, an argument or a dim of an input, becomes an unknown of its
own. The graph is then run on tensors without data, whose record of guards says which unknowns have
to be equal for the ops to make sense: a broadcast wants two dims to be the same, a product wants
what it contracts to be. What follows to be the length is an expression in it, the rest are the
numbers they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from seqsplit.passes.graph.lowered import Lowered

__all__ = [
    "LENGTH",
    "Fixed",
    "Place",
    "Sizes",
    "Unreadable",
    "arguments_at",
    "dims_of",
    "is_given",
    "open_dims",
    "read_sizes",
    "value_of",
]

LENGTH = sympy.Symbol("T", integer=True, positive=True)  # in what is read

_NEAR = 2  # a size that differs from the length by this much may be the length and a constant
_MAX_GUESSED = 4  # unknowns of one equation that are guessed together

# An input or a constant and its dim, or an op and the number of its argument.
Place = tuple[fx.Node, int]


class Unreadable(Exception):
    """The graph makes no sense for other lengths."""


@dataclass(frozen=True)
class Fixed:
    """A length that the model's code has fixed.

    Attributes:
        length: the number.
        dims: of inputs, that are the length.
    """

    length: int
    dims: frozenset[Place]


def read_sizes(
    lowered: Lowered, fixed: Fixed, tables: Collection[fx.Node]
) -> dict[Place, sympy.Expr]:
    """Find the sizes that are the length or follow from it.

    Args:
        lowered: the captured graph, where they are numbers.
        fixed: the length.
        tables: inputs of a size that does not vary, dims of which may be the length too.

    Returns:
        Expressions in :data:`LENGTH` alone, whose value at the captured length is the number. (A
        number that happens to be the size of the batch stays a number: the graph is run for other
        batches.)

    Raises:
        Unreadable: an op does not take what it was given.
    """
    return _Reading(lowered, fixed, tables).solve()


class Sizes:
    """Symbols with a record of guards of their own: Dynamo's stays as it is.

    Args:
        lowered: the captured graph. Its symbols have twins here.
        fixed: the length, which has a symbol here.
        hint: a value for that symbol in the place of the captured length.

    Attributes:
        env: the record.
        mode: makes tensors without data whose sizes it records.
        hints: the symbols' values.
        length: the symbol of the length.
    """

    def __init__(self, lowered: Lowered, fixed: Fixed, hint: int | None = None) -> None:
        self.env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env)
        self.hints: dict[sympy.Symbol, int] = {}
        self.length = self.new(fixed.length if hint is None else hint)
        self._fixed, self._lowered = fixed, lowered
        self._twins = {old: self.new(hint) for old, hint in lowered.hints.items()}

    def new(self, hint: int) -> sympy.Symbol:
        source = ConstantSource(f"size_{len(self.hints)}")
        symbol = self.env.create_symbol(hint, source, DimDynamic.DYNAMIC)
        self.hints[symbol] = hint
        return symbol

    def as_argument(self, expr: sympy.Expr) -> int | torch.SymInt:
        """An expression as what ops take."""
        if not expr.free_symbols:
            return int(expr)
        return self.env.create_symintnode(expr, hint=self.number(expr))

    def number(self, expr: sympy.Expr) -> int:
        """The value of an expression."""
        return int(expr.xreplace(self.hints))

    def input(self, node: fx.Node, dims: dict[int, sympy.Expr]) -> Any:
        """The value of one of the graph's inputs, some more ``dims`` of it being given anew."""
        held = node.meta.get("val")
        if isinstance(held, torch.SymInt):
            return self.as_argument(self._twin(self._lowered.expr(held)))
        if not isinstance(held, Tensor):
            return held
        fixed = {dim: self.length for owner, dim in self._fixed.dims if owner is node}
        given = fixed | dims
        own = [self._twin(size) for size in self._lowered.shape(node)]
        shape = [given.get(dim, size) for dim, size in enumerate(own)]
        strides, stride = {}, sympy.S.One
        for dim in sorted(range(held.ndim), key=lambda dim: int(held.stride(dim))):
            strides[dim], stride = stride, stride * shape[dim]
        with self.mode:
            return torch.empty_strided(
                [self.as_argument(size) for size in shape],
                [self.as_argument(strides[dim]) for dim in range(held.ndim)],
                dtype=held.dtype,
                device=held.device,
            )

    def _twin(self, expr: sympy.Expr) -> sympy.Expr:
        return expr.xreplace(self._twins)


def is_given(node: fx.Node) -> bool:
    """Whether a node is an input or a constant."""
    return node.op in ("placeholder", "get_attr")


def open_dims(node: fx.Node) -> set[int]:
    """The dims of an input that Dynamo took to vary; a constant has none."""
    return node.meta.get("open_dims", set())


def dims_of(lowered: Lowered, node: fx.Node, size: int) -> list[int]:
    """The dims of an input or a constant that have a size, as a number."""
    if not isinstance(node.meta.get("val"), Tensor):
        return []
    return [dim for dim, own in enumerate(lowered.shape(node)) if own == size]


def arguments_at(node: fx.Node) -> tuple[list[Any], Any]:
    """A node's arguments, lists taken apart, and how they are put together again: the number of
    an argument counts in this list."""
    return pytree.tree_flatten((node.args, node.kwargs))


def value_of(node: fx.Node, mode: Any, args: Any, kwargs: Any) -> Any:
    """Run a node on tensors without data.

    Raises:
        Unreadable: it does not take them.
    """
    try:
        with mode, enable_python_dispatcher(), torch.no_grad(), ExitStack() as contexts:
            for device_type, dtype, enabled, cache in node.meta["region"].autocast:
                contexts.enter_context(torch.autocast(device_type, dtype, enabled, cache))
            return node.target(*args, **kwargs)
    except Exception as error:  # whatever an op says to sizes that are not the length
        raise Unreadable(f"{node.target}: {error}") from error


class _Reading:
    def __init__(self, lowered: Lowered, fixed: Fixed, tables: Collection[fx.Node]) -> None:
        self._lowered, self._length = lowered, fixed.length
        self._sizes = Sizes(lowered, fixed)
        self._sizes.mode.cache_enabled = False  # hardly two ops have the same unknowns
        self._known = set(self._sizes.hints)  # symbols that are not asked for
        self._unknown: dict[Place, sympy.Symbol] = {}
        self._arguments: set[sympy.Symbol] = set()  # the unknowns that are no input's
        self._seen = {fixed.length}  # sizes that hang on what is not known
        self._inputs: dict[fx.Node, dict[int, sympy.Expr]] = {}
        for node in filter(is_given, lowered.graph.nodes):
            dims = self._inputs.setdefault(node, {})
            for dim in dims_of(lowered, node, fixed.length):
                asked = node in tables or dim in open_dims(node)
                if asked and (node, dim) not in fixed.dims:
                    dims[dim] = self._ask((node, dim), fixed.length)

    def solve(self) -> dict[Place, sympy.Expr]:
        self._replay()
        solved = self._solved(list(self._equations()))
        return {
            place: solved[symbol].xreplace({self._sizes.length: LENGTH})
            for place, symbol in self._unknown.items()
            if symbol in solved and solved[symbol].free_symbols
        }

    # -- asking the ops ----------------------------------------------------------------------

    def _replay(self) -> None:
        sizes, known = self._sizes, {}
        for node in self._lowered.graph.nodes:
            if node.op == "output":
                continue
            if is_given(node):
                known[node] = sizes.input(node, self._inputs[node])
            else:
                leaves, structure = arguments_at(node)
                given = [self._argument(node, i, leaf, known) for i, leaf in enumerate(leaves)]
                args, kwargs = pytree.tree_unflatten(given, structure)
                known[node] = value_of(node, sizes.mode, args, kwargs)
            self._note_sizes(known[node])

    def _argument(self, node: fx.Node, index: int, leaf: Any, known: dict[fx.Node, Any]) -> Any:
        if isinstance(leaf, fx.Node):
            return known[leaf]
        if not isinstance(leaf, int) or isinstance(leaf, bool) or not self._may_be_length(leaf):
            return leaf
        symbol = self._ask((node, index), leaf)
        self._arguments.add(symbol)
        return self._sizes.as_argument(symbol)

    def _ask(self, place: Place, number: int) -> sympy.Symbol:
        self._unknown[place] = symbol = self._sizes.new(number)
        return symbol

    def _may_be_length(self, number: int) -> bool:
        if number < 2 or number == 2**63 - 1:
            return False
        near = abs(number - self._length) <= _NEAR or number % self._length == 0
        return near or number in self._seen

    def _note_sizes(self, value: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        given = self._known - {self._sizes.length}
        for size in (size for tensor in tensors for size in tensor.shape):
            if isinstance(size, torch.SymInt) and size.node.has_hint():
                self._seen |= (
                    {int(size.node.hint)} if size.node.expr.free_symbols - given else set()
                )

    # -- what they say -----------------------------------------------------------------------

    def _equations(self) -> Iterator[sympy.Expr]:
        """Terms that have to be zero."""
        env = self._sizes.env
        for symbol, value in env.replacements.items():
            yield symbol - value
        for guard in env.guards:
            if isinstance(guard.expr, sympy.Eq):
                yield guard.expr.lhs - guard.expr.rhs

    def _solved(self, equations: list[sympy.Expr]) -> dict[sympy.Symbol, sympy.Expr]:
        solved: dict[sympy.Symbol, sympy.Expr] = {}
        while equations:
            left = []
            for term in equations:
                term = sympy.expand(term.xreplace(solved))
                unknown = term.free_symbols - self._known
                root = self._root(term, *unknown) if len(unknown) == 1 else None
                if root is not None:
                    solved[unknown.pop()] = root
                elif unknown:
                    left.append(term)
            if len(left) == len(equations):
                left.sort(key=lambda term: not term.is_polynomial())
                solved |= self._guess(left[0])
            equations = left
        return solved

    def _root(self, term: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr | None:
        """The size that makes a term zero, if it is a sum of products of sizes."""
        if not term.is_polynomial(symbol) or sympy.degree(term, symbol) != 1:
            return None
        slope = term.coeff(symbol)
        root = sympy.cancel(-term.coeff(symbol, 0) / slope)
        if not root.free_symbols <= {self._sizes.length}:
            return None
        if not root.is_polynomial() or any(
            not factor.is_Integer for factor in sympy.expand(root).as_coefficients_dict().values()
        ):
            return None
        return root if self._sizes.number(root) == self._sizes.hints[symbol] else None

    def _guess(self, term: sympy.Expr) -> dict[sympy.Symbol, sympy.Expr]:
        """A reading under which a term is zero for any length (``[B, T, d] -> [B * T, d]``); all
        numbers if there is none."""
        unknown = sorted(term.free_symbols - self._known, key=list(self._sizes.hints).index)
        numbers = {symbol: sympy.Integer(self._sizes.hints[symbol]) for symbol in unknown}
        if len(unknown) <= _MAX_GUESSED:
            for choice in itertools.product(*map(self._options, unknown)):
                guess = dict(zip(unknown, choice))
                if sympy.expand(term.xreplace(guess)) == 0:
                    return guess
        return numbers

    def _options(self, symbol: sympy.Symbol) -> list[sympy.Expr]:
        """What a size may be, the likeliest first: an argument that is as large as the length
        is the length, other sizes are what they are."""
        number, length = sympy.Integer(self._sizes.hints[symbol]), self._length
        options: list[sympy.Expr] = [number]
        if number % length == 0:
            options.append(number // length * self._sizes.length)
        elif abs(number - length) <= _NEAR:
            options.append(self._sizes.length + (number - length))
        return options[::-1] if number == length and symbol in self._arguments else options
