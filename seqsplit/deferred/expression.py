"""Expressions that are computed row by row: one row per token.

A deferred value is a tree of calls over *sources*: tensors that exist, with one row for each of
the value's tokens (the hidden states, labels, a mask). The dims of the tokens are a single one
here, ``N`` rows; whether a caller sees them as ``[B, T, V]`` or as ``[B * T, V]`` is its layout.
Choosing rows of an expression (a slice, a mask, one sequence of the batch) chooses the rows of its
sources, so that nothing wide is ever cut.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqsplit.errors import StaleLogitsError, format_message
from seqsplit.ops.autocast import Autocast

__all__ = [
    "Layout",
    "Node",
    "Operand",
    "Operation",
    "Result",
    "Seen",
    "Source",
    "Value",
    "concatenate",
    "detached",
    "select",
    "unless_all",
]


@dataclass(frozen=True)
class Layout:
    """How rows lie in a tensor.

    Attributes:
        lead: the sizes of the tokens' dims.
        axes: which dims of the tensor these are.
    """

    lead: tuple[int, ...]
    axes: tuple[int, ...]

    @staticmethod
    def leading(lead: Sequence[int]) -> Layout:
        """Tokens first, features behind them."""
        return Layout(tuple(lead), tuple(range(len(lead))))

    @property
    def is_leading(self) -> bool:
        return self.axes == tuple(range(len(self.axes)))

    @property
    def num_rows(self) -> int:
        return torch.Size(self.lead).numel()

    @property
    def form(self) -> tuple[tuple[int, ...], int]:
        """What is the same for any number of rows."""
        return self.axes, len(self.lead)

    def holding(self, num_rows: int) -> Layout:
        """As many dims, for another number of rows."""
        return Layout((1,) * (len(self.lead) - 1) + (num_rows,), self.axes)

    def arrange(self, rows: Tensor) -> Tensor:
        """``[N, *features]`` as a tensor of this layout."""
        value = rows.reshape(self.lead + rows.shape[1:])
        return value if self.is_leading else value.movedim(list(range(len(self.axes))), self.axes)

    def rows_of(self, value: Tensor) -> Tensor:
        """The inverse of :meth:`arrange`."""
        if not self.is_leading:
            value = value.movedim(self.axes, list(range(len(self.axes))))
        return value.reshape((self.num_rows, *value.shape[len(self.axes) :]))

    def shape(self, features: Sequence[int]) -> tuple[int, ...]:
        """The sizes of a tensor of this layout."""
        places, rest = dict(zip(self.axes, self.lead)), iter(features)
        return tuple(
            places[dim] if dim in places else next(rest)
            for dim in range(len(self.lead) + len(features))
        )


class Node:
    """A value with ``num_rows`` rows of ``features``.

    Attributes:
        leaves: the tensors that need a gradient and that it is computed from.
    """

    num_rows: int
    features: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    leaves: tuple[Tensor, ...] = ()
    _rows: Tensor | None = None
    _version: int = 0

    @property
    def computed(self) -> Tensor | None:
        """Its rows if they have been computed and nobody wrote to them since."""
        if self._rows is None or self._rows._version != self._version:
            return None
        return self._rows

    def keep(self, rows: Tensor) -> None:
        """Its rows, which are computed now."""
        self._rows, self._version = rows, rows._version

    @property
    def width(self) -> int:
        """Elements per row."""
        return torch.Size(self.features).numel()


class Source(Node):
    """Rows of a tensor that exists.

    Args:
        base: ``[M, *features]``.
        index: which of its rows, an integer tensor ``[N]``; all of them if ``None``.
        like: a source whose tensor it is, as it was when that source was made.
    """

    def __init__(self, base: Tensor, index: Tensor | None = None, like: Source | None = None):
        self.base, self.index = base, index
        self.seen = Seen(base) if like is None else like.seen
        self.num_rows = len(base) if index is None else len(index)
        self.features = tuple(base.shape[1:])
        self.dtype, self.device = base.dtype, base.device
        self.requires_grad = self.seen.requires_grad
        self.leaves = (base,) if self.requires_grad else ()

    def rows(self) -> Tensor:
        """The rows themselves: a view where they lie side by side."""
        base = self.base  # which may have to be computed, to be seen
        base = self.seen.again(base)
        if self.index is None:
            return base
        first = int(self.index[0]) if len(self.index) else 0
        if torch.equal(self.index, first + torch.arange(len(self.index))):
            return base[first : first + len(self.index)]
        return base[self.index.to(base.device)]

    def same_rows(self, other: Source) -> bool:
        if self.base is not other.base or self.num_rows != other.num_rows:
            return False
        if self.requires_grad != other.requires_grad:
            return False
        if self.index is None or other.index is None:
            return self.index is other.index
        return torch.equal(self.index, other.index)


class Seen:
    """What a tensor was like when it was recorded.

    Args:
        tensor: as it is now.
        sampled: also note some of its elements: the kernels of some optimizers, and what is done to
            ``.data``, write without a version that counts it.
    """

    def __init__(self, tensor: Tensor, *, sampled: bool = False) -> None:
        self.version, self.requires_grad = tensor._version, tensor.requires_grad
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
        plain = plain and tensor.layout == torch.strided
        self._sample = _sample(tensor) if sampled and plain else None

    def same(self, other: Seen) -> bool:
        """Whether two looks at one tensor saw the same."""
        if (self.version, self.requires_grad) != (other.version, other.requires_grad):
            return False
        return self._sample is None or torch.equal(self._sample, other._sample)

    def again(self, tensor: Tensor) -> Tensor:
        """The tensor as it was: without a history if it had none, though it may need a gradient by
        now.

        Raises:
            StaleLogitsError: it was written to, or is frozen by now.
        """
        written = tensor._version != self.version
        if not written and self._sample is not None:
            written = not torch.equal(self._sample, _sample(tensor))
        if written:
            raise StaleLogitsError(
                format_message(
                    "deferred values were looked at too late",
                    why="they are computed at first use, and a tensor of shape "
                    f"{list(tensor.shape)} that they depend on has changed since",
                    fix="use them (or call .materialize() on them) before the optimizer steps",
                )
            )
        if self.requires_grad and not tensor.requires_grad:
            raise StaleLogitsError(
                format_message(
                    "deferred values were looked at too late",
                    why=f"their gradient goes to a tensor of shape {list(tensor.shape)}, which was "
                    "frozen since",
                    fix="use them (or call .materialize() on them) before requires_grad changes",
                )
            )
        needless = tensor.requires_grad and not self.requires_grad
        return tensor.detach() if needless else tensor


def _sample(tensor: Tensor) -> Tensor:
    """The bits of a few elements from all over a tensor."""
    spread = tuple(slice(None, None, max(1, size // 8)) for size in tensor.shape)
    return tensor.detach()[spread].clone().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, eq=False)
class Operand:
    """An argument of a call: a node as the caller saw it."""

    node: Node
    layout: Layout


@dataclass(frozen=True)
class Result:
    """What is known of a tensor that a call gives.

    Attributes:
        layout, features, dtype: of the tensor.
        differentiable: whether gradients flow through it to the operands.
        shares: the number of the argument whose memory it lies in: it is a view of that.
        is_argument: whether it is that argument itself.
    """

    layout: Layout
    features: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True
    shares: int | None = None
    is_argument: bool = False


@dataclass(frozen=True)
class Call:
    """A function with everything about its arguments but the rows: what a chunk's code holds.

    (Were it to hold nodes, a computed node would be held by its own history.)

    Attributes:
        function: what is called.
        layouts: of the arguments that have rows, ``None`` for others.
        structure: of the arguments.
        results: the tensors it gives.
        recorded: whether gradients were being recorded.
        autocast: as it was around the call.
    """

    function: Callable
    layouts: tuple[Layout | None, ...]
    structure: pytree.TreeSpec
    results: tuple[Result, ...]
    recorded: bool
    autocast: Autocast

    def run(self, leaves: Sequence[Any], num_rows: int) -> list[Tensor]:
        """The rows of its results.

        Args:
            leaves: the arguments, rows ``[num_rows, *features]`` where there are such.
        """
        arguments = [
            leaf if layout is None else layout.holding(num_rows).arrange(leaf)
            for layout, leaf in zip(self.layouts, leaves)
        ]
        args, kwargs = pytree.tree_unflatten(arguments, self.structure)
        recording = self.recorded and torch.is_grad_enabled()
        same = self.autocast == Autocast.current()
        context = contextlib.nullcontext() if same else self.autocast.restored()
        with context, torch.set_grad_enabled(recording):
            values = pytree.tree_leaves(self.function(*args, **kwargs))
        return [
            result.layout.holding(num_rows).rows_of(value)
            for value, result in zip(values, self.results)
        ]

    def alike(self, other: Call) -> bool:
        """Whether it is the same but for the number of rows."""
        mine, others = (
            [layout and layout.form for layout in call.layouts] for call in (self, other)
        )
        return (
            self.function is other.function
            and self.structure == other.structure
            and self.recorded == other.recorded
            and self.autocast == other.autocast
            and mine == others
        )


class Operation:
    """A call, one row of whose results depends on one row of its operands.

    Args:
        function, structure, results, recorded, autocast: see :class:`Call`.
        leaves: its arguments, flattened; operands stand for nodes, tensors among them are whole
            (weights, constants).
    """

    def __init__(
        self,
        function: Callable,
        leaves: Sequence[Any],
        structure: pytree.TreeSpec,
        results: Sequence[Result],
        recorded: bool,
        autocast: Autocast,
    ) -> None:
        layouts = tuple(leaf.layout if isinstance(leaf, Operand) else None for leaf in leaves)
        self.call = Call(function, layouts, structure, tuple(results), recorded, autocast)
        self.leaves = list(leaves)
        self.seen = {id(tensor): Seen(tensor, sampled=True) for tensor in self.constants}

    @property
    def operands(self) -> Iterator[Operand]:
        return (leaf for leaf in self.leaves if isinstance(leaf, Operand))

    @property
    def constants(self) -> Iterator[Tensor]:
        return (leaf for leaf in self.leaves if isinstance(leaf, Tensor))

    def on(self, leaves: Sequence[Any]) -> Operation:
        """The same call on other rows."""
        other = copy.copy(self)
        other.leaves = list(leaves)
        return other


class Value(Node):
    """One result of an operation."""

    def __init__(self, operation: Operation, slot: int) -> None:
        self.operation, self.slot = operation, slot
        operands = list(operation.operands)
        self.num_rows, self.device = operands[0].node.num_rows, operands[0].node.device
        result = operation.call.results[slot]
        self.features, self.dtype = result.features, result.dtype
        inputs = [*(operand.node for operand in operands), *operation.constants]
        self.requires_grad = (
            operation.call.recorded
            and result.differentiable
            and any(value.requires_grad for value in inputs)
        )
        if self.requires_grad:
            weights = (tensor for tensor in operation.constants if tensor.requires_grad)
            below = (leaf for operand in operands for leaf in operand.node.leaves)
            self.leaves = tuple({id(leaf): leaf for leaf in (*below, *weights)}.values())


def detached(node: Node) -> Node:
    """The same rows without their history."""
    layout = Layout.leading((node.num_rows,))
    leaves, structure = pytree.tree_flatten(((Operand(node, layout),), {}))
    results = [Result(layout, node.features, node.dtype, differentiable=False)]
    operation = Operation(Tensor.detach, leaves, structure, results, False, Autocast.current())
    return Value(operation, 0)


def select(node: Node, index: Tensor, memo: dict[Any, Any] | None = None) -> Node:
    """The expression for the rows ``index`` of ``node``."""
    memo = {} if memo is None else memo
    if node not in memo:
        if isinstance(node, Source):
            chosen = index if node.index is None else node.index[index]
            memo[node] = Source(node.base, chosen, node)
        else:
            operation = node.operation
            if operation not in memo:
                memo[operation] = operation.on(
                    [
                        Operand(select(leaf.node, index, memo), leaf.layout)
                        if isinstance(leaf, Operand)
                        else leaf
                        for leaf in operation.leaves
                    ]
                )
            memo[node] = Value(memo[operation], node.slot)
    return memo[node]


def concatenate(nodes: Sequence[Node], memo: dict[Any, Any] | None = None) -> Node | None:
    """The expression whose rows are those of all ``nodes``; ``None`` if they differ in more than
    their rows."""
    memo = {} if memo is None else memo
    key = tuple(id(node) for node in nodes)
    if key not in memo:
        memo[key] = (_concatenate(nodes, memo), nodes)  # the nodes live as long as their ids
    return memo[key][0]


def _concatenate(nodes: Sequence[Node], memo: dict[Any, Any]) -> Node | None:
    first = nodes[0]
    if any(type(node) is not type(first) or node.features != first.features for node in nodes):
        return None
    if isinstance(first, Source):
        return _concatenate_sources(nodes)
    if any(node.slot != first.slot for node in nodes):
        return None
    operations = [node.operation for node in nodes]
    key = tuple(id(operation) for operation in operations)
    if key not in memo:
        memo[key] = (_concatenate_operations(operations, memo), operations)
    joined = memo[key][0]
    return None if joined is None else Value(joined, first.slot)


def _concatenate_operations(
    operations: Sequence[Operation], memo: dict[Any, Any]
) -> Operation | None:
    first = operations[0]
    if not all(operation.call.alike(first.call) for operation in operations):
        return None
    leaves = []
    for column in zip(*(operation.leaves for operation in operations)):
        kept = column[0]
        if any(type(leaf) is not type(kept) for leaf in column):
            return None
        if isinstance(kept, Operand):
            node = concatenate([leaf.node for leaf in column], memo)
            if node is None:
                return None
            leaves.append(Operand(node, kept.layout))
        elif isinstance(kept, Tensor):
            if any(leaf is not kept for leaf in column):
                return None
            if not all(o.seen[id(kept)].same(first.seen[id(kept)]) for o in operations[1:]):
                return None  # at another time
            leaves.append(kept)
        elif any(leaf != kept for leaf in column):
            return None
        else:
            leaves.append(kept)
    return first.on(leaves)


def _concatenate_sources(sources: Sequence[Source]) -> Source | None:
    base = sources[0].base
    if any(source.base._version != source.seen.version for source in sources):
        return None
    if any(
        source.base is not base or source.requires_grad != sources[0].requires_grad
        for source in sources
    ):
        return Source(torch.cat([source.rows() for source in sources]))
    every = torch.arange(len(base))
    index = torch.cat([every if s.index is None else s.index for s in sources])
    return Source(base, unless_all(index, len(base)), sources[0])


def unless_all(index: Tensor, num_rows: int) -> Tensor | None:
    """A choice of rows, ``None`` if it is all of them in order."""
    return None if torch.equal(index, torch.arange(num_rows)) else index
