"""Sizes as graph code: expressions in the sequence's length and the other symbols."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from .lower import Lowered, Region

__all__ = ["express_sizes", "symbol_source", "write_expression"]

aten = torch.ops.aten

OPERATORS: dict[str, Callable] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
    "Max": max,
    "Min": min,
}


def write_expression(
    expr: sympy.Expr,
    symbol: Callable[[sympy.Symbol], Any],
    call: Callable[[Callable, Any, Any], Any],
) -> Any:
    """Write an expression.

    Args:
        expr: the expression.
        symbol: gives the value (a node, a number) of a symbol.
        call: applies a function to two values.
    """
    if expr.is_Integer:
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        return symbol(expr)
    function = OPERATORS.get(expr.func.__name__)
    if function is None:
        raise ValueError(f"no way to write the size {expr}")
    result, *rest = (write_expression(arg, symbol, call) for arg in expr.args)
    for value in rest:
        result = call(function, result, value)
    return result


def symbol_source(lowered: Lowered, symbol: sympy.Symbol) -> tuple[fx.Node, int | None, int]:
    """Where a symbol's value is found: an input (or its dim), and what to take off."""
    for node in lowered.placeholders:
        held = node.meta.get("val")
        if isinstance(held, torch.SymInt) and (lowered.expr(held) - symbol).is_Integer:
            return node, None, int(lowered.expr(held) - symbol)
    for node in lowered.placeholders:
        if isinstance(node.meta.get("val"), torch.Tensor):
            for dim, size in enumerate(lowered.shape(node)):
                if (size - symbol).is_Integer:
                    return node, dim, int(size - symbol)
    raise ValueError(f"no input has the size {symbol}")


def express_sizes(lowered: Lowered) -> None:
    """Replace every size that is read off a value by one computed from the inputs' sizes.

    A size then depends on no tensor but inputs, wherever the tensor it was read off is computed.
    """
    graph = lowered.graph
    last = lowered.placeholders[-1] if lowered.placeholders else graph._root
    known: dict[Any, fx.Node] = {}

    def new(function: Callable, *args: Any) -> fx.Node:
        nonlocal last  # not "before the body": its first node may be one that is replaced
        key = (function, *args)
        if key not in known:
            with graph.inserting_after(last):
                last = known[key] = graph.call_function(function, args)
            values = fx.node.map_arg(args, lambda n: n.meta["val"])
            known[key].meta = {"val": function(*values), "region": Region()}
        return known[key]

    def symbol(wanted: sympy.Symbol) -> fx.Node:
        node, dim, surplus = symbol_source(lowered, wanted)
        value = node if dim is None else new(aten.sym_size.int, node, dim)
        return new(operator.sub, value, surplus) if surplus else value

    for node in list(graph.nodes):
        held = node.meta.get("val")
        ours = node in known.values()
        if ours or node.op != "call_function" or not isinstance(held, torch.SymInt):
            continue
        try:
            value = write_expression(lowered.expr(held), symbol, new)
        except ValueError:
            continue  # a size that depends on the data stays where it is
        if isinstance(value, fx.Node):
            node.replace_all_uses_with(value)
        else:
            _put(node, value)
        graph.erase_node(node)


def _put(node: fx.Node, value: int) -> None:
    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg(
            (user.args, user.kwargs), lambda n: value if n is node else n
        )
