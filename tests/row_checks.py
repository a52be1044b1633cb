"""One row of a rule, run as a chunk body would run it.

Operands are cut where the row says, other arguments are rewritten for the chunk, and outputs and
gradients are put together again.
"""

import itertools
from dataclasses import dataclass

import sympy
import torch
from torch.utils import _pytree as pytree

from graphs import trace
from seqsplit.ir.placement import Sum
from seqsplit.passes.rules import registry


class Traced:
    """A call as a node with symbolic sizes, and what they and its operands are."""

    def __init__(self, call):
        is_op = isinstance(call.op, torch._ops.OpOverload)
        self._lowered = trace(call.function if is_op else lambda *tensors: tensors, *call.tensors)
        nodes = self._lowered.graph.nodes
        inputs = [node for node in nodes if node.op == "placeholder"]
        given = dict(zip(inputs, call.tensors, strict=True))
        if not is_op:
            _append(self._lowered.graph, call, inputs)
        self.node = next(node for node in nodes if node.target is call.op)
        self.operands = registry.operands_of(self.node)
        self.values = [given[operand] for operand in self.operands]
        self.sizes = {
            expr: size
            for node, tensor in given.items()
            for expr, size in zip(self.shape(node), tensor.shape, strict=True)
            if isinstance(expr, sympy.Symbol)
        }

    @property
    def rows(self):
        return registry.rows_of(self.node, self.shape)

    def shape(self, node):
        return self._lowered.shape(node)

    def number(self, expr):
        return int(sympy.sympify(expr).xreplace(self.sizes))

    def run(self, values, arguments=None):
        """The op on these operands: its outputs as a list."""
        known = dict(zip(self.operands, values, strict=True))

        def value_of(node):
            return known[node] if node in known else self.number(node.meta["val"].node.expr)

        named = registry.arguments_of(self.node) if arguments is None else arguments
        named = torch.fx.node.map_arg(named, value_of)
        schema = getattr(self.node.target, "_schema", None)
        only = {a.name for a in schema.arguments if a.kwarg_only} if schema else set()
        args = [value for name, value in named.items() if name not in only]
        kwargs = {name: named[name] for name in only}
        outputs = pytree.tree_leaves(self.node.target(*args, **kwargs))
        return [output for output in outputs if output is not None]

    def symbol_of(self, row):
        """The size that a row splits; ``None`` if that is the same in every call."""
        found = {
            sympy.cancel(self.shape(node)[dim] / (span.outer * span.inner))
            for node, placement in zip(
                [self.node, *self.operands], [row.out, *row.operands], strict=True
            )
            for dim, span in placement.spans
        }
        symbol = found.pop() if len(found) == 1 else None
        return symbol if isinstance(symbol, sympy.Symbol) else None

    def part(self, value, placement, start, end):
        """Rows ``[start, end)`` of a value, which may lie inside a merged dim."""
        for dim, span in placement.spans:
            outer, inner = self.number(span.outer), self.number(span.inner)
            apart = value.unflatten(dim, (outer, -1, inner))
            value = apart.narrow(dim + 1, start, end - start).flatten(dim, dim + 2)
        return value

    def joined(self, pieces, placement):
        """A value whose parts these are; of what all were given whole, the sum."""
        if not placement.spans:
            return sum(pieces)
        ((dim, span),) = placement.spans
        outer, inner = self.number(span.outer), self.number(span.inner)
        apart = [piece.unflatten(dim, (outer, -1, inner)) for piece in pieces]
        return torch.cat(apart, dim + 1).flatten(dim, dim + 2)


def _append(graph, call, inputs):
    """A node for a function that a trace would look into."""
    given = iter(inputs)
    args = [next(given) if isinstance(arg, torch.Tensor) else arg for arg in call.arguments]
    output = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):
        node = graph.call_function(call.op, tuple(args))
    node.meta["region"] = inputs[0].meta["region"]
    held = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args]
    with held[0].fake_mode:
        node.meta["val"] = call.op(*held)


@dataclass
class ChunkOf:
    """What rules ask about a chunk ``[start, end)`` of ``symbol``, answered in numbers."""

    traced: Traced
    symbol: sympy.Symbol
    start: int
    end: int

    def shape(self, node):
        return self.traced.shape(node)

    def is_sequence(self, expr):
        return expr == self.symbol

    def first(self, span):
        return self.start

    def size(self, expr, span):
        return self.end - self.start

    def sizes(self, node, placement):
        own = {**self.traced.sizes, self.symbol: self.end - self.start}
        return [
            int(size.xreplace(own if dim in placement.dims else self.traced.sizes))
            for dim, size in enumerate(self.shape(node))
        ]

    def add(self, left, right):
        return left + right

    def subtract(self, left, right):
        return left - right


def assert_holds(traced, row):
    """Raise unless chunks of operands give chunks of the outputs, and of the gradients.

    Returns whether there was anything to run: the row splits a size that varies from call to call.
    """
    symbol = traced.symbol_of(row)
    placements = (row.out, *row.operands)
    if symbol is None and (Sum not in placements or any(p.spans for p in placements)):
        return False
    if Sum in row.operands and any(value.dtype == torch.bool for value in traced.values):
        return False  # what would a share be
    length = traced.sizes[symbol] if symbol is not None else 2
    edges = sorted({0, 1, max(length - 1, 1), length})  # uneven, and a chunk of one row
    learns = Sum not in row.operands and _has_gradients(traced)
    leaves = _leaves(traced.values, learns)
    whole = traced.run(leaves)
    cotangents = [torch.randn_like(out) if out.requires_grad else out for out in whole]
    outputs, gradients = [], []
    for start, end in itertools.pairwise(edges):
        parts = [
            _share(value, start, end, length)
            if placement == Sum
            else traced.part(value, placement, start, end)
            for value, placement in zip(traced.values, row.operands, strict=True)
        ]
        parts = _leaves(parts, learns)
        arguments = registry.arguments_of(traced.node)
        if symbol is not None:
            chunk = ChunkOf(traced, symbol, start, end)
            arguments = registry.rewrite_arguments(traced.node, row.out, arguments, chunk)
        outputs.append(traced.run(parts, arguments))
        given = [traced.part(cotangent, row.out, start, end) for cotangent in cotangents]
        gradients.append(_gradients(outputs[-1], parts, given))
    tolerance = _tolerance(traced.values)
    for pieces, value in zip(zip(*outputs, strict=True), whole, strict=True):
        have = traced.joined(pieces, row.out)
        torch.testing.assert_close(have, value, equal_nan=True, **tolerance)
    wanted = zip(_gradients(whole, leaves, cotangents), row.operands, zip(*gradients))
    for expected, placement, pieces in wanted:
        if expected is not None and None not in pieces:
            have = traced.joined(pieces, placement)
            torch.testing.assert_close(have, expected, equal_nan=True, **tolerance)
    return True


def _share(value, start, end, length):
    """Of a value that is a sum."""
    if value.is_floating_point():
        return value * ((end - start) / length)
    return value if start == 0 else torch.zeros_like(value)


def _has_gradients(traced):
    """Whether all operands may need one; the weights of classes may not."""
    try:
        traced.run(_leaves(traced.values, learns=True))
    except RuntimeError:
        return False
    return True


def _tolerance(values):
    narrow = any(value.dtype == torch.float32 for value in values)
    return {"rtol": 1e-3, "atol": 1e-4} if narrow else {"rtol": 1e-10, "atol": 1e-11}


def _leaves(values, learns):
    copies = [value.detach().clone() for value in values]
    return [v.requires_grad_(learns and (v.is_floating_point() or v.is_complex())) for v in copies]


def _gradients(outputs, leaves, cotangents):
    """Of the leaves; all ``None`` if no output needs one."""
    roots = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(())
    if roots and learning:
        outs, given = zip(*roots, strict=True)
        found = iter(torch.autograd.grad(outs, learning, given, allow_unused=True))
    return [next(found, None) if leaf.requires_grad else None for leaf in leaves]
