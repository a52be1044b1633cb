"""Schedule: which states between segments are stored, and how to come to the others.

Storing fewer states than there are segments costs forwards: to differentiate a segment whose state
was not stored, the segments since the last stored one are run again. Which states to store, going
forward and again on the way back, so that a given memory costs the fewest forwards, is a dynamic
program over stretches of the chain. For equal segments it gives binomial checkpointing (Griewank
and Walther, ACM TOMS 26, 2000); for unequal ones see Beaumont et al., arXiv 1911.13214.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from seqsplit.ir.plan import Again, ChainSpec
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.split.cut import bytes_per_token
from seqsplit.schedule import Schedule

__all__ = ["Reversal", "chain_of", "reverse_chain"]

_MAX_UNITS = 128


@dataclass(frozen=True)
class Reversal:
    """The order in which a chain is differentiated.

    Attributes:
        stored: the states stored going forward, the last one among them.
        again: for each other state, how to come to it.
        cost: of all forwards that are run again.
    """

    stored: frozenset[int]
    again: dict[int, Again]
    cost: float


def chain_of(facts: Facts, placed: Sequence[Any], schedule: Schedule) -> ChainSpec:
    """Describe the segments as a chain and choose the states that it stores.

    Args:
        facts: of the lowered graph.
        placed: the segments, in the order in which they run.
        schedule: what the user asks for.
    """
    given = {
        node: (step, slot)
        for step, item in enumerate(placed)
        for slot, node in enumerate(item.values)
    }
    numbers: dict[fx.Node, int] = {}
    last_use: dict[tuple[int, int], int] = {}
    first_use: dict[int, int] = {}
    sources = []
    for step, item in enumerate(placed):
        found: list[tuple[int, int] | int] = []
        for node in item.split.operands:
            if node in given and given[node][0] < step:
                last_use[given[node]] = step
                found.append(given[node])
            else:
                number = numbers.setdefault(node, len(numbers))
                first_use.setdefault(number, step)
                found.append(number)
        sources.append(tuple(found))
    backward = [not item.segment.body.takes_gradients_forward for item in placed]
    count = max((step + 1 for step, again in enumerate(backward) if again), default=0)
    sizes = [_state_bytes(facts, given, last_use, place) for place in range(count)]
    costs = [_work(facts, item) for item in placed[:count]]
    reversal = reverse_chain(costs, sizes, schedule.forwards)
    return ChainSpec(
        tuple(sources), last_use, first_use, reversal.stored, reversal.again, schedule.offload
    )


def reverse_chain(costs: Sequence[float], sizes: Sequence[float], forwards: int) -> Reversal:
    """The least memory with which a chain is differentiated in a given number of forwards.

    Args:
        costs: of each segment's forward.
        sizes: of each state, in bytes; the first is there in any case.
        forwards: how often each forward may run on average: once going forward, once within its
            own backward, and ``forwards - 2`` times to come to a state again.
    """
    count = len(costs)
    if count == 0 or forwards == 2:
        return Reversal(frozenset(range(1, count)), {}, 0.0)
    unit = max(max(sizes) / 16, sum(sizes) / _MAX_UNITS, min((s for s in sizes if s), default=1.0))
    units = [0, *(max(1, math.ceil(size / unit - 1e-6)) for size in sizes[1:])]
    program = _Program(costs, units)
    allowed = (forwards - 2) * sum(costs) + program.between(0, count - 1)
    room = next(m for m, cost in enumerate(program.best[0][count - 1]) if cost <= allowed)
    again: dict[int, Again] = {}
    program.schedule(0, count - 1, room, again)
    first = again.pop(count - 1, Again(0))
    stored = first.stored | {count - 1} if count > 1 else frozenset()
    cost = float(program.best[0][count - 1][room]) - program.between(0, count - 1)
    return Reversal(frozenset(stored), again, cost)


class _Program:
    """``best[s][t][m]``: the cost of all forwards that are run to differentiate segments ``s`` to
    ``t``, beginning with state ``s``, with room for ``m`` units of states besides."""

    def __init__(self, costs: Sequence[float], units: Sequence[int]) -> None:
        self._units = units
        self._sums = np.concatenate([[0.0], np.cumsum(costs)])
        count, room = len(costs), sum(units) + 1
        self.best = [[np.zeros(room) for _ in range(count)] for _ in range(count)]
        self._choice = [[np.zeros(room, int) for _ in range(count)] for _ in range(count)]
        for distance in range(1, count):
            for first in range(count - distance):
                self._solve(first, first + distance, room)

    def between(self, first: int, last: int) -> float:
        """The cost of going from state ``first`` to state ``last``."""
        return float(self._sums[last] - self._sums[first])

    def _solve(self, first: int, last: int, room: int) -> None:
        # Straight to the last state, which is used at once and not stored ...
        best = self.between(first, last) + self.best[first][last - 1]
        choice = np.full(room, last)
        for place in range(first + 1, last):  # ... or storing one on the way
            units = self._units[place]
            if units >= room:
                continue
            cost = np.full(room, np.inf)
            cost[units:] = self.best[place][last][: room - units]
            cost += self.between(first, place) + self.best[first][place - 1]
            better = cost < best - 1e-9 * best
            best, choice = np.where(better, cost, best), np.where(better, place, choice)
        self.best[first][last], self._choice[first][last] = best, choice

    def schedule(self, first: int, last: int, room: int, again: dict[int, Again]) -> None:
        """Write down how states ``first`` to ``last`` are come to, the last one first."""
        begin, stored, rest = first, set(), []
        while first < last:
            place = int(self._choice[first][last][room])
            if place == last:
                rest.append((first, last - 1, room))
                break
            rest.append((first, place - 1, room))
            stored.add(place)
            first, room = place, room - self._units[place]
        again[last] = Again(begin, frozenset(stored))
        for stretch in reversed(rest):
            self.schedule(*stretch, again)


def _state_bytes(
    facts: Facts,
    given: dict[fx.Node, tuple[int, int]],
    last_use: dict[tuple[int, int], int],
    place: int,
) -> float:
    return sum(
        bytes_per_token(facts, node)
        for node, value in given.items()
        if value[0] < place <= last_use.get(value, -1)
    )


def _work(facts: Facts, item: Any) -> float:
    """Multiply-adds per token of a segment's forward, in proportion: those of its weights."""
    body = item.split.body
    whole = {spec.operand for spec in body.inputs if not spec.placement.spans}
    return 1.0 + sum(facts.lowered.numel(item.split.operands[operand]) for operand in whole)
