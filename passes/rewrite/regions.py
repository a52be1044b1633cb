"""Regions: pieces of the model that are token-wise as a whole, though not op by op.

A mixture of experts sorts its tokens, counts them, multiplies them in groups and puts them back:
no single step can be cut along the sequence, but the whole piece can. When an op cannot be split,
the modules that enclose it are tried, the innermost first: the module's ops are gathered into one
node, and that node's rows are found by execution, as for any op without a rule.
"""

from __future__ import annotations

import operator
import re

import torch
from torch import fx

from seqsplit.passes.analysis.facts import Facts, draws_random
from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.graph.lowered import Region as Contexts
from seqsplit.passes.graph.sizes import SizeWriter
from seqsplit.passes.rewrite.pieces import is_value, write_piece
from seqsplit.passes.rules.registry import rows_of

__all__ = ["Regions", "has_rows"]


class Regions:
    """Gathers regions of one graph; remembers which scopes were tried."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._tried: set[str] = set()

    def gather_around(self, facts: Facts, mixers: list[fx.Node], node: fx.Node) -> bool:
        """Gather the smallest token-wise module around a node, and all modules like it.

        Returns:
            Whether the graph was changed: then facts have to be found anew.
        """
        for scope in reversed(_scopes(node)):
            if scope in self._tried:
                continue
            alike = [s for s in self._all_scopes() if s not in self._tried and _alike(s, scope)]
            self._tried.update(alike)
            gathered = [self._gather(facts, mixers, s) for s in alike]
            if any(gathered):
                self._lowered.graph.lint()
                return True
        return False

    def _all_scopes(self) -> list[str]:
        found: dict[str, None] = {}
        for node in self._lowered.graph.nodes:
            found.update(dict.fromkeys(_scopes(node)))
        return list(found)

    def _gather(self, facts: Facts, mixers: list[fx.Node], scope: str) -> bool:
        members = _members(facts, scope)
        if any(node in mixers or draws_random(node) for node in members):
            return False
        chosen = set(members)
        outputs = [
            node
            for node in members
            if node in facts.stream and any(user not in chosen for user in node.users)
        ]
        if len(members) < 2 or not outputs or not _same_dims(facts, outputs):
            return False
        try:
            region, operands, symbols = write_piece(self._lowered, members, outputs)
        except ValueError:
            return False
        graph = self._lowered.graph
        sizes = SizeWriter(self._lowered)
        with graph.inserting_after(members[-1]):
            new = graph.call_function(region, (*operands, *map(sizes.symbol, symbols)))
        held = tuple(node.meta["val"] for node in outputs)
        place = ("stack_trace", "nn_module_stack")
        new.meta = {key: members[0].meta[key] for key in place if key in members[0].meta}
        new.meta |= {"region": Contexts(), "val": held if len(held) > 1 else held[0]}
        if not has_rows(facts, new):
            graph.erase_node(new)
            sizes.take_back()
            return False
        self._replace(new, outputs, chosen)
        return True

    def _replace(self, new: fx.Node, outputs: list[fx.Node], members: set[fx.Node]) -> None:
        """Users outside refer to the region; members without other users go."""
        graph, last = self._lowered.graph, new
        for index, output in enumerate(outputs):
            value = new
            if len(outputs) > 1:
                with graph.inserting_after(last):
                    last = value = graph.call_function(operator.getitem, (new, index))
                value.meta = {**output.meta}
                value.meta.pop("rows", None)
            for user in [u for u in output.users if u not in members and u is not new]:
                user.replace_input_with(output, value)
        for node in sorted(members, reverse=True):
            if not node.users:
                graph.erase_node(node)


def _scopes(node: fx.Node) -> list[str]:
    """The calls of modules that a node lies in, outermost first, each with its path."""
    while node.target is operator.getitem:  # an item is where its tuple is
        node = node.args[0]
    stack = node.meta.get("nn_module_stack") or {}
    return [f"{path} #{key}" for key, (path, _) in stack.items()]


def _alike(one: str, other: str) -> bool:
    """Whether two scopes are the same module of different layers."""
    plain = [re.sub(r"\d+", "0", scope.rpartition(" #")[0]) for scope in (one, other)]
    return plain[0] == plain[1]


def _members(facts: Facts, scope: str) -> list[fx.Node]:
    """The ops of a scope on tensors along the sequence, and what only they use."""
    graph = facts.lowered.graph
    chosen = {
        node
        for node in graph.nodes
        if node.op == "call_function" and scope in _scopes(node) and is_value(node)
    }
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not node.users or not is_value(node):
            continue
        if all(user in chosen for user in node.users):
            chosen.add(node)
    # A tuple does not enter a region: its items do.
    return [
        node
        for node in graph.nodes
        if node in chosen and (node.target is not operator.getitem or node.args[0] in chosen)
    ]


def _same_dims(facts: Facts, outputs: list[fx.Node]) -> bool:
    if not all(isinstance(node.meta["val"], torch.Tensor) for node in outputs):
        return False
    layouts = {
        tuple(size if size.free_symbols else None for size in facts.shape(node))
        for node in outputs
    }  # fmt: skip
    return len(layouts) == 1


def has_rows(facts: Facts, node: fx.Node) -> bool:
    """Whether chunks of a node's operands give chunks of it along the sequence."""
    return any(
        facts.sequence in facts.shape(node)[dim].free_symbols
        for row in rows_of(node, facts.shape)
        for dim, _ in row.out.spans
    )
