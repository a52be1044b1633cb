"""Sizes as graph code: expressions in the sequence's length and the other symbols."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from seqsplit.passes.graph.lowered import Lowered, Region

__all__ = ["SizeWriter", "express_sizes", "quotient", "symbol_source", "write_expression"]

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
    if (rounded := _rounded(expr)) is not None:
        whole, part, up = rounded
        whole = write_expression(whole, symbol, call)
        return call(operator.floordiv, call(operator.add, whole, part - 1) if up else whole, part)
    function = OPERATORS.get(expr.func.__name__)
    if function is None:
        raise ValueError(f"no way to write the size {expr}")
    result, *rest = (write_expression(arg, symbol, call) for arg in expr.args)
    for value in rest:
        result = call(function, result, value)
    return result


def _rounded(expr: sympy.Expr) -> tuple[sympy.Expr, int, bool] | None:
    """``(size, number, up)`` of a size that was divided by a number and rounded."""
    name = expr.func.__name__
    if name not in ("CeilToInt", "FloorToInt", "TruncToInt"):
        return None
    (ratio,) = expr.args
    if ratio.func.__name__ != "IntTrueDiv" or not ratio.args[1].is_Integer or ratio.args[1] <= 0:
        return None
    return ratio.args[0], int(ratio.args[1]), name == "CeilToInt"


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


def quotient(whole: sympy.Expr, part: sympy.Expr) -> sympy.Expr | None:
    """``whole / part`` where that is a product of sizes again."""
    ratio = sympy.cancel(whole / part)
    if ratio.is_integer is False or sympy.fraction(ratio)[1] != 1:
        return None
    return ratio


class SizeWriter:
    """Writes sizes at the beginning of the lowered graph, each once."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        # After what was written last, not "before the body": its first node may be replaced.
        self._last = lowered.placeholders[-1] if lowered.placeholders else lowered.graph._root
        self._known: dict[Any, fx.Node] = {}

    def write(self, expr: sympy.Expr) -> Any:
        """A node (or a number) that holds the size.

        Raises:
            ValueError: it does not follow from the sizes of the inputs.
        """
        return write_expression(expr, self.symbol, self._call)

    def symbol(self, wanted: sympy.Symbol) -> fx.Node:
        node, dim, surplus = symbol_source(self._lowered, wanted)
        value = node if dim is None else self._call(aten.sym_size.int, node, dim)
        return self._call(operator.sub, value, surplus) if surplus else value

    def wrote(self, node: fx.Node) -> bool:
        return node in self._known.values()

    def take_back(self) -> None:
        """Remove what was written and is not used."""
        for node in reversed(self._known.values()):
            if not node.users:
                self._lowered.graph.erase_node(node)

    def _call(self, function: Callable, *args: Any) -> fx.Node:
        key = (function, *args)
        if key not in self._known:
            graph = self._lowered.graph
            with graph.inserting_after(self._last):
                self._last = self._known[key] = graph.call_function(function, args)
            values = fx.node.map_arg(args, lambda n: n.meta["val"])
            self._last.meta = {"val": function(*values), "region": Region()}
        return self._known[key]


def express_sizes(lowered: Lowered) -> None:
    """Replace every size that is read off a value by one computed from the inputs' sizes.

    A size then depends on no tensor but inputs, wherever the tensor it was read off is computed.
    """
    graph, writer = lowered.graph, SizeWriter(lowered)
    for node in list(graph.nodes):
        held = node.meta.get("val")
        if node.op != "call_function" or not isinstance(held, torch.SymInt) or writer.wrote(node):
            continue
        try:
            value = writer.write(lowered.expr(held))
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
