"""The ATen graph that passes work on, with what is known about its sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._sympy.functions import FloorDiv

from seqsplit.ir.assumptions import Assumption
from seqsplit.ir.plan import Write

__all__ = ["Lowered", "Region", "attribute_of", "divided", "fake_mode_of"]


@dataclass(frozen=True)
class Region:
    """The Python contexts a node was traced under.

    Attributes:
        grad: whether gradients were recorded.
        autocast: arguments of the ``autocast`` contexts entered inside the model, outermost
            first: ``(device_type, dtype, enabled, cache_enabled)``.
    """

    grad: bool = True
    autocast: tuple[tuple[Any, ...], ...] = ()


@dataclass
class Lowered:
    """The ATen graph with what is known about its sizes.

    Attributes:
        module: the graph; every node has ``meta["val"]`` and ``meta["region"]``, an input also
            ``meta["requires_grad"]`` and ``meta["open_dims"]``, those that Dynamo took to vary.
        shape_env: Dynamo's record of the symbols and of the guards on them.
        writes: which inputs are written to; their new values are the last outputs.
        assumed: symbols taken to be the same as others (see :func:`_align_inputs`).
        assumptions: what is assumed of the inputs of a call.
        fixed_length: the length of the sequence, where the graph holds for no other.
    """

    module: fx.GraphModule
    shape_env: Any
    writes: list[Write] = field(default_factory=list)
    assumed: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    assumptions: list[Assumption] = field(default_factory=list)
    fixed_length: int | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @cached_property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @cached_property
    def hints(self) -> dict[sympy.Symbol, int]:
        """The symbols' values in the call that was captured."""
        found = {}
        for node in self.placeholders:
            value = node.meta.get("val")
            for size in value.shape if isinstance(value, torch.Tensor) else [value]:
                if isinstance(size, torch.SymInt) and size.node.has_hint():
                    expr = self.expr(size)
                    for symbol in expr.free_symbols:
                        if (expr - symbol).is_Integer:
                            found[symbol] = int(size.node.hint) - int(expr - symbol)
        return found

    def rename(self, old: sympy.Symbol, new: sympy.Expr) -> None:
        """Write all sizes in another symbol from now on."""
        self.assumed = {s: expr.xreplace({old: new}) for s, expr in self.assumed.items()}
        self.assumed[old] = new
        self.__dict__.pop("hints", None)
        self.__dict__.pop("_equals", None)
        for node in self.graph.nodes:
            node.meta.pop("shape_exprs", None)
            node.meta.pop("rows", None)

    def expr(self, size: int | torch.SymInt) -> sympy.Expr:
        """A size as an expression in the symbols that are left after Dynamo's equalities."""
        if isinstance(size, torch.SymInt):
            return self.simplified(size.node.expr)
        return sympy.Integer(size)

    def simplified(self, expr: sympy.Expr) -> sympy.Expr:
        """An expression in as few symbols as are known to suffice."""
        return self.renamed(expr).xreplace(self._equals)

    @cached_property
    def _equals(self) -> dict[sympy.Expr, sympy.Expr]:
        """Expressions that are a symbol wherever the captured graph holds: where the model's code
        asks whether a sequence is padded, the padded length is the sequence's."""
        known: dict[sympy.Expr, sympy.Expr] = {}
        for guard in self.shape_env.guards:
            if isinstance(guard.expr, sympy.Eq):
                sides = [self.renamed(side) for side in guard.expr.args]
                for expr, plain in (sides, sides[::-1]):
                    if isinstance(plain, sympy.Symbol) and expr.args:
                        known[expr] = plain
        return known

    def renamed(self, expr: sympy.Expr) -> sympy.Expr:
        """The same without what guards say: a guard itself, which would say of itself that it
        holds."""
        return divided(sympy.sympify(self.shape_env.simplify(expr)).xreplace(self.assumed))

    def numel(self, node: fx.Node) -> float:
        """The number of elements in the captured call."""
        count = 1.0
        for size in self.shape(node):
            if size.is_Integer:
                count *= int(size)
            else:
                hints = {symbol: self.hints.get(symbol, 2) for symbol in size.free_symbols}
                count *= float(size.xreplace(hints))
        return count

    def shape(self, node: fx.Node) -> tuple[sympy.Expr, ...]:
        """The shape of a node's tensor value (a tuple's first), as expressions."""
        cached = node.meta.get("shape_exprs")
        if cached is None:
            value = node.meta["val"]
            value = value[0] if isinstance(value, (tuple, list)) else value
            cached = tuple(self.expr(size) for size in value.shape)
            node.meta["shape_exprs"] = cached
        return cached


def divided(expr: sympy.Expr) -> sympy.Expr:
    """An expression in which divisions without a remainder are made: ``T**2 // T`` is ``T``."""
    if not expr.has(FloorDiv):
        return expr
    return expr.replace(FloorDiv, _quotient)


def _quotient(whole: sympy.Expr, part: sympy.Expr) -> sympy.Expr:
    ratio = sympy.expand(sympy.cancel(whole / part))
    terms = ratio.as_coefficients_dict()
    exact = all(count.is_Integer and term.is_integer for term, count in terms.items())
    return ratio if exact and sympy.fraction(ratio)[1] == 1 else FloorDiv(whole, part)


def attribute_of(module: torch.nn.Module, node: fx.Node) -> Any:
    """The value of a constant (a ``get_attr`` node)."""
    value: Any = module
    for name in node.target.split("."):
        value = getattr(value, name)
    return value


def fake_mode_of(graph: fx.Graph) -> Any:
    """What made a graph's tensors without data. (Not the ambient one of the capture: a graph whose
    length was freed has its own.)"""
    held = (node.meta.get("val") for node in graph.nodes)
    return next(value.fake_mode for value in held if isinstance(value, FakeTensor))
