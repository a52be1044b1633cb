"""Stitch: the outer graph, in which each segment is one node.

Outer ops (prologue, entry, whole ops, tail) stay as they are, in their order; a segment runs
where its cut is; the tail comes last.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from seqsplit.ir.plan import Segment
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.graph.lowered import Region
from seqsplit.passes.graph.sizes import symbol_source, write_expression
from seqsplit.passes.split.body import SplitSegment
from seqsplit.passes.split.cut import Cuts
from seqsplit.passes.split.schedule import chain_of
from seqsplit.schedule import Schedule

__all__ = ["Placed", "stitch"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Placed:
    """A segment with its place in the outer graph.

    Attributes:
        position: it runs before the node of this index.
        values: the nodes it gives, in the order of its outputs.
        nodes: the nodes of the stream that it computes.
        deferred: whether it runs only when its (single) value is looked at.
    """

    segment: Segment
    split: SplitSegment
    position: int
    values: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    deferred: bool = False


def stitch(
    facts: Facts, cuts: Cuts, placed: Sequence[Placed], executor: Any, schedule: Schedule
) -> fx.GraphModule:
    """Build the outer graph module.

    Args:
        facts: of the lowered graph.
        cuts: its groups, tail and whole nodes.
        placed: the segments.
        executor: the runtime's functions that a plan calls.
        schedule: what the segments keep for the backward.
    """
    return _Stitching(facts, cuts, executor, schedule).build(placed)


class _Stitching:
    def __init__(self, facts: Facts, cuts: Cuts, executor: Any, schedule: Schedule) -> None:
        self._facts, self._cuts = facts, cuts
        self._executor, self._schedule = executor, schedule
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._sizes: dict[sympy.Symbol, fx.Node] = {}
        self._segments = torch.nn.Module()
        self._steps: dict[int, int] = {}  # of the chain, by the id of what is placed
        self._chain: fx.Node | None = None

    def build(self, placed: Sequence[Placed]) -> fx.GraphModule:
        order = list(self._facts.lowered.graph.nodes)
        inside = self._facts.stream | {n for n in order if self._facts.is_active(n)}
        if self._schedule.chained:
            self._begin_chain(placed)
        for index, node in enumerate(order):
            if node.op == "output":
                break
            self._place_segments(placed, range(index, index + 1))
            if node in self._cuts.whole or (node not in inside and node not in self._cuts.tail):
                self._copy(node)
        self._place_segments(placed, range(len(order) - 1, len(order) + 1))
        for node in order:
            if node in self._cuts.tail:
                self._copy(node)
        (output,) = (node for node in order if node.op == "output")
        self._graph.output(fx.node.map_arg(output.args[0], self._lookup))
        self._graph.eliminate_dead_code(is_impure_node=_is_kept)
        self._graph.lint()
        for node in self._graph.nodes:
            if node.op == "get_attr" and not hasattr(self._segments, node.target):
                setattr(
                    self._segments, node.target, getattr(self._facts.lowered.module, node.target)
                )
        return fx.GraphModule(self._segments, self._graph, class_name="Outer")

    def _begin_chain(self, placed: Sequence[Placed]) -> None:
        steps = [item for item in placed if not item.deferred]
        steps.sort(key=lambda item: item.position)
        self._steps = {id(item): step for step, item in enumerate(steps)}
        self._segments.chain = chain_of(self._facts, steps, self._schedule)

    def _link(self, item: Placed) -> tuple[Any, ...]:
        """A segment's place in the chain, as it is given to the runtime."""
        if not self._schedule.chained:
            return ()
        if self._chain is None:
            spec = self._graph.get_attr("chain")
            self._chain = self._graph.call_function(self._executor.new_chain, (spec,))
        step = self._steps[id(item)]
        return None, self._graph.call_function(self._executor.link, (self._chain, step))

    def _place_segments(self, placed: Sequence[Placed], places: range) -> None:
        for item in placed:
            if item.position not in places:
                continue
            length = self._size(self._facts.sequence)
            sizes = tuple(self._size(symbol) for symbol in item.split.sizes)
            operands = tuple(self._new[node] for node in item.split.operands)
            name = f"segment_{len(self._segments.__dict__)}"
            setattr(self._segments, name, item.segment)
            segment = self._graph.get_attr(name)
            if item.deferred:
                (value,) = item.values
                shape = [self._expression(size) for size in self._facts.shape(value)]
                dims = self._size_dims(item, value)
                dtype, used = value.meta["val"].dtype, any(u.op != "output" for u in value.users)
                args = (segment, shape, dtype, length, sizes, operands, dims, used)
                self._new[value] = self._graph.call_function(self._executor.defer, args)
                continue
            args = (segment, length, sizes, operands, *self._link(item))
            call = self._graph.call_function(self._executor.run, args)
            for slot, value in enumerate(item.values):
                self._new[value] = self._graph.call_function(operator.getitem, (call, slot))

    def _size_dims(self, item: Placed, value: fx.Node) -> tuple[int, ...] | None:
        """For each size of the body, which of the value's dims it is the size of."""
        shape, body = self._facts.shape(value), item.split.body
        specs = [(spec.placement, spec.surplus) for spec in (*body.inputs, *body.outputs)]
        if any(surplus for _, surplus in specs) or any(p.has_keys for p, _ in specs):
            return None
        lead = shape[: body.outputs[0].placement.rows_dim]
        if any(symbol not in lead for symbol in item.split.sizes):
            return None
        return tuple(lead.index(symbol) for symbol in item.split.sizes)

    def _copy(self, node: fx.Node) -> None:
        """Copy an outer op, under the contexts it was traced under."""
        if node.op != "call_function" or node.target is operator.getitem:
            self._new[node] = self._graph.node_copy(node, self._lookup)
            return
        region: Region = node.meta["region"]
        operands = {operand: self._lookup(operand) for operand in node.all_input_nodes}
        contexts = [
            self._graph.call_function(torch.amp.autocast_mode._enter_autocast, autocast)
            for autocast in region.autocast
        ]
        if not region.grad:
            self._graph.call_function(torch._C._set_grad_enabled, (False,))
        self._new[node] = self._graph.node_copy(node, operands.__getitem__)
        if not region.grad:
            self._graph.call_function(torch._C._set_grad_enabled, (True,))
            if node.target is aten.reshape.default:  # may give its operand back, history and all
                self._new[node] = self._graph.call_function(aten.detach.default, (self._new[node],))
        for context in reversed(contexts):
            self._graph.call_function(torch.amp.autocast_mode._exit_autocast, (context,))

    def _lookup(self, node: fx.Node) -> fx.Node:
        """The new node; a mask or position bias that a whole op needs is computed whole."""
        if node not in self._new and node not in self._facts.stream:
            self._copy(node)
        return self._new[node]

    def _size(self, symbol: sympy.Symbol) -> fx.Node:
        """The value of a symbol: an input, or the size of one."""
        if symbol not in self._sizes:
            node, dim, surplus = symbol_source(self._facts.lowered, symbol)
            value = self._new[node]
            if dim is not None:
                value = self._graph.call_function(aten.sym_size.int, (value, dim))
            if surplus:
                value = self._graph.call_function(operator.sub, (value, surplus))
            self._sizes[symbol] = value
        return self._sizes[symbol]

    def _expression(self, expr: sympy.Expr) -> Any:
        def call(function: Any, left: Any, right: Any) -> fx.Node:
            return self._graph.call_function(function, (left, right))

        return write_expression(expr, self._size, call)


def _is_kept(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output") or node.target is torch._C._set_grad_enabled:
        return True
    return getattr(node.target, "__name__", "") in ("_enter_autocast", "_exit_autocast")
