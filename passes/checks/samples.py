"""Samples: a short call, made from the real one, on which code is tried by execution.

Token ids, labels, masks and positions are taken from the real inputs, at evenly spaced places;
the batch is small, and the sequence as short as the model's guards allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.trials.double import as_double

__all__ = ["Samples"]

_LENGTHS = (11, 13, 17, 23, 37, 61, 127, 257, 509)
_BATCH = 2
_LONGEST = 4096  # the original may hold a value of length x length


class Samples:
    """What the sizes and the inputs of a graph are in a short call.

    Args:
        facts: of the graph.
        examples: the real inputs of the captured call, in the graph's order.
        at: a length to take, and all other sizes as they are, instead of short ones.

    Attributes:
        length: of the sequence: the shortest under which the model would have taken the captured
            branches, ``None`` if that is too long to be tried.
    """

    def __init__(self, facts: Facts, examples: Sequence[Any], at: int | None = None) -> None:
        self._facts = facts
        self._examples = dict(zip(facts.lowered.placeholders, examples))
        self._batch: int | None = None  # the most of it, None: as many as there are
        self.length = self._choose_length() if at is None else at

    def input(self, node: fx.Node) -> Any:
        """A real input at evenly spaced places, floating point in double; a size is a number.

        Its memory is its own: some ops (a batch norm) write into what they are given, and no
        schema says so.
        """
        held = node.meta.get("val")
        if isinstance(held, torch.SymInt):
            return self.number(self._facts.lowered.expr(held))
        value = self._examples[node]
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        for dim, size in enumerate(self._facts.shape(node)):
            if size.free_symbols:
                count = self.number(size)
                places = torch.linspace(0, max(value.shape[dim] - 1, 0), count).round().long()
                value = value.index_select(dim, places.to(value.device))
        own = as_double(value)
        if own is value and not is_traceable_wrapper_subclass(value):
            own = value.clone()
        return own

    def number(self, expr: sympy.Expr) -> int:
        """A size."""
        values = {symbol: self.symbol(symbol) for symbol in expr.free_symbols}
        return int(expr.xreplace(values))

    def symbol(self, symbol: sympy.Symbol) -> int:
        """What a symbol stands for."""
        if symbol == self._facts.sequence:
            return self.length
        hint = self._facts.lowered.hints.get(symbol, _BATCH)
        if self._batch is None or symbol not in self._batch_sizes:
            return hint
        return min(hint, self._batch)

    @cached_property
    def _batch_sizes(self) -> set[sympy.Symbol]:
        """Sizes of the first dim of inputs that hold the sequence too; a vocabulary, or a table of
        positions, has entries that others point at."""
        facts = self._facts
        inputs = [n for n in facts.lowered.placeholders if facts.is_tensor(n)]
        shapes = [facts.shape(n) for n in inputs if facts.sequence_dims(n)]
        return {shape[0] for shape in shapes if isinstance(shape[0], sympy.Symbol)} - {
            facts.sequence
        }

    def _choose_length(self) -> int | None:
        real = self._facts.lowered.hints.get(self._facts.sequence)
        for self._batch in (_BATCH, None):
            for length in (*_LENGTHS, real):
                fits = length is not None and (real is None or length <= real)
                if fits and length <= _LONGEST and self._allows(length):
                    return length
        return None

    def _allows(self, length: int) -> bool:
        env, sequence = self._facts.lowered.shape_env, self._facts.sequence
        bounds = env.var_to_range.get(sequence)
        if bounds is not None and not bounds.lower <= length <= bounds.upper:
            return False
        self.length = length
        for guard in env.guards:
            expr = self._facts.lowered.renamed(guard.expr)
            values = {symbol: self.symbol(symbol) for symbol in expr.free_symbols}
            if expr.xreplace(values) == sympy.false:
                return False
        return True
