"""Pieces: some ops of the graph as one function, to be run by itself or put in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.graph.lowered import Region as Contexts
from seqsplit.passes.graph.sizes import write_expression
from seqsplit.passes.graph.structure import structure_of
from seqsplit.passes.rules.registry import takes_double
from seqsplit.passes.trials.double import double_graph

__all__ = ["is_value", "write_piece"]

aten = torch.ops.aten


def is_value(node: fx.Node) -> bool:
    """Whether a node gives a tensor or several."""
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def write_piece(
    lowered: Lowered, members: list[fx.Node], outputs: list[fx.Node]
) -> tuple[Callable, list[fx.Node], list[sympy.Symbol]]:
    """A piece as a function of its operands and of the symbols of its sizes.

    Args:
        lowered: the graph.
        members: of the piece, in the graph's order.
        outputs: those of them whose values the function gives, a tuple if there are several.

    Returns:
        The function, the nodes that are its operands, and the symbols whose values follow them.

    Raises:
        ValueError: a size inside follows from the data.
    """
    chosen = set(members)
    operands = list(
        dict.fromkeys(o for node in members for o in node.all_input_nodes
                      if o not in chosen and is_value(o))
    )  # fmt: skip
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {o: graph.placeholder(f"in_{i}") for i, o in enumerate(operands)}
    sizes = [i for node in members for i in node.all_input_nodes if i not in copies]
    sizes = [node for node in sizes if node not in chosen]
    expressions = {node: lowered.expr(node.meta["val"]) for node in dict.fromkeys(sizes)}
    symbols = sorted({s for e in expressions.values() for s in e.free_symbols}, key=str)
    given = {symbol: graph.placeholder(f"size_{i}") for i, symbol in enumerate(symbols)}
    for node, expr in expressions.items():
        copies[node] = write_expression(
            expr, given.__getitem__, lambda function, *args: graph.call_function(function, args)
        )
    for node in members:
        copies[node] = _copy(graph, node, copies)
    results = tuple(copies[node] for node in outputs)
    graph.output(results if len(results) > 1 else results[0])
    piece = _function(fx.GraphModule(lowered.module, graph, class_name="Piece"))
    # One op inside that does not take float64, and the piece as a whole does not.
    piece.in_double = None
    if all(takes_double(node, lowered.shape) for node in members):
        piece.in_double = _function(fx.GraphModule(lowered.module, double_graph(graph)))
    return piece, operands, symbols


def _function(module: fx.GraphModule) -> Callable:
    """A graph module as a node's target, which has to be a function."""

    def piece(*args: Any) -> Any:
        return module.forward(*args)  # not called: a failure of what is only tried is no news

    piece.__module__ = __name__
    piece.fingerprint = ("piece", structure_of(module))
    return piece


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, Any]) -> fx.Node:
    """One op, under the contexts it was traced under."""
    contexts: Contexts = node.meta["region"]
    if not contexts.grad and not isinstance(node.meta["val"], torch.Tensor):
        raise ValueError(f"{node.target} under no_grad gives several values")
    entered = [
        graph.call_function(torch.amp.autocast_mode._enter_autocast, autocast)
        for autocast in contexts.autocast
    ]
    new = graph.node_copy(node, copies.__getitem__)
    if not contexts.grad:
        new = graph.call_function(aten.detach.default, (new,))
    for context in reversed(entered):
        graph.call_function(torch.amp.autocast_mode._exit_autocast, (context,))
    return new
