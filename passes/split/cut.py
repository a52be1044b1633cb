"""Cut: which values are kept whole between segments.

A *cut* is a place in the graph's order. The values that are alive there (computed before, used
after) are materialised: they are the segment's outputs and the checkpoints of the next one. A
good cut is a narrow waist: few bytes per token cross it. One cut is chosen between any two
mixers, so that a segment holds one attention and whatever belongs to it, a decoder layer in
ordinary models. Nothing depends on finding the best cut: a value that was not kept is computed
again from those that were.

Values that something needs *whole* inside a segment (keys of an attention that is not causal, a
sum that feeds back) force a cut before that use. Ops that run whole are a segment border by
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from seqsplit.ir.placement import Chunk, Placement, Span, Sum
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.graph.sizes import quotient
from seqsplit.passes.rules.registry import operands_of, rows_of, sum_rows
from seqsplit.passes.split.attend import Reads

__all__ = ["Cuts", "Group", "choose_cuts"]


@dataclass
class Group:
    """What one segment materialises.

    Attributes:
        position: where in the graph's order the segment runs (after that many nodes).
        values: the materialised nodes with their placements.
    """

    position: int
    values: dict[fx.Node, Placement]


@dataclass
class Cuts:
    """Attributes:
    groups: in the order in which they run.
    tail: ops on sums, run by the outer graph after the last segment.
    whole: nodes that the outer graph runs whole, in their place.
    """

    groups: list[Group] = field(default_factory=list)
    tail: set[fx.Node] = field(default_factory=set)
    whole: set[fx.Node] = field(default_factory=set)


def choose_cuts(
    facts: Facts,
    reads: Reads,
    *,
    whole: Iterable[fx.Node],
    forced: dict[fx.Node, fx.Node],
    segment_layers: int,
    added_later: set[fx.Node] = frozenset(),
) -> Cuts:
    """Choose the cuts.

    Args:
        facts: of the graph.
        reads: its attentions.
        whole: nodes that the outer graph runs whole.
        forced: values that have to be materialised, each with the first node that needs it so.
        segment_layers: how many stretches between mixers make one segment.
        added_later: ops on sums of different segments, for the outer graph.
    """
    order = list(facts.lowered.graph.nodes)
    position = facts.position
    whole, tail = _sort_out_sums(facts, set(whole), added_later)
    last_use = _last_uses(facts, order, position, tail)
    borders = sorted({position[n] for n in reads.mixers if n not in whole})
    light = {position[n] for n in reads.light}
    fixed = set(reads.mixers) | whole
    outside = whole | tail
    costs = _crossing_bytes(facts, order, last_use, outside, lambda n: _kept_as(facts, n, fixed))
    widths = _crossing_bytes(facts, order, last_use, outside, lambda n: n)
    waists = _waists(facts, order, costs, widths, borders, light)
    kept = [w for index, w in enumerate(waists) if index % segment_layers == 0]
    if waists and waists[-1] not in kept:
        kept.append(waists[-1])

    wanted: dict[fx.Node, int] = {}  # value -> the place before which it has to exist
    for node, user in forced.items():
        wanted[node] = min(position[user], wanted.get(node, len(order)))
    for node in whole:
        for operand in operands_of(node):
            if operand in facts.stream:
                wanted[operand] = min(position[node], wanted.get(operand, len(order)))
    for place in kept:
        alive = _alive(facts, order, last_use, place)
        for node in dict.fromkeys(_kept_as(facts, n, fixed) for n in alive):
            wanted[node] = min(place + 1, wanted.get(node, len(order)))
    for node in _ends(facts, order, tail):
        place = _passed_on(facts, node, tail) if _kept_as(facts, node, fixed) is node else None
        wanted[node] = min(len(order) if place is None else place, wanted.get(node, len(order)))
    # What the outer graph computes is no segment's to give.
    wanted = {n: place for n, place in wanted.items() if n not in whole and n not in tail}

    places = sorted(set(wanted.values()))
    groups: dict[int, Group] = {}
    for node in sorted(wanted, key=position.__getitem__):
        place = next(p for p in places if p > position[node])
        group = groups.setdefault(place, Group(place, {}))
        group.values[node] = _placement(facts, node)
    return Cuts([groups[place] for place in sorted(groups)], tail, whole)


def _placement(facts: Facts, node: fx.Node) -> Placement:
    dims = facts.sequence_dims(node)
    if not dims:
        return Sum
    dim = dims[0] if len(dims) == 1 else dims[-2]
    return Chunk(dim, *(merged_factors(facts, node, dim) or ()))


def _last_uses(
    facts: Facts, order: list[fx.Node], position: dict[fx.Node, int], tail: set[fx.Node]
) -> dict[fx.Node, int]:
    """The last place where each value is used; the tail and the outputs are at the end."""
    last = {}
    for node in order:
        places = [
            len(order) if user in tail or user.op == "output" else position[user]
            for user in node.users
        ]
        last[node] = max(places, default=-1)
    return last


def _alive(
    facts: Facts, order: list[fx.Node], last_use: dict[fx.Node, int], place: int
) -> list[fx.Node]:
    return [n for n in order[: place + 1] if n in facts.stream and last_use[n] > place]


def _kept_as(facts: Facts, node: fx.Node, fixed: set[fx.Node]) -> fx.Node:
    """What is kept for a value that crosses a cut: something much narrower, if one projection of
    that gives it (logits that are compared with others' after a whole second model)."""
    size = bytes_per_token(facts, node)
    best, source = node, node
    while source not in fixed:
        operands = [operand for operand in operands_of(source) if operand in facts.stream]
        if len(operands) != 1 or not facts.is_tensor(operands[0]):
            break
        (source,) = operands
        if len(facts.sequence_dims(source)) != 1:
            break
        if 2 * bytes_per_token(facts, source) <= size:
            best, size = source, bytes_per_token(facts, source)
    return best


def _waists(
    facts: Facts,
    order: list[fx.Node],
    costs: list[float],
    widths: list[float],
    borders: list[int],
    light: set[int],
) -> list[int]:
    """The chosen place in each stretch between mixers, the stretch before the first included.

    Beside a light mixer, a stretch without a waist as narrow as others have is not cut.
    """
    if not borders:
        return []
    starts, ends = [0, *borders], [*borders, len(order) - 1]
    chosen: list[int] = []
    beside_light: list[int] = []
    depth: int | None = None  # how far behind its mixer the previous stretch was cut
    for index, (start, end) in enumerate(zip(starts, ends)):
        places = list(range(start, end))
        first, last = index == 0, index == len(starts) - 1
        # Where nothing of the sequence is alive, one model has ended (in its sums) and another,
        # or the tail, begins: cut before that end, and at it.
        empty = [] if first else [p for p in places if costs[p] == 0]
        if empty:
            places = [p for p in places if p < empty[0]]
        # In a head, what is alive counts: there are the logits themselves.
        cost = widths if last or empty else costs
        finite = [p for p in places if cost[p] != math.inf]
        if (last or empty) and finite:
            # A head widens (to the vocabulary) before it narrows to numbers: cut before it does.
            widest = max(finite, key=lambda p: cost[p])
            finite = [p for p in finite if p < widest] or finite
        if finite:
            best = min(cost[p] for p in finite)
            ties = [p for p in finite if cost[p] == best]
            place = ties[-1]
            if (last or empty) and depth is not None:
                # The stretch runs on into a head: cut where the layers before were cut, unless
                # that is much wider, so that the last layer shares their body.
                alike = [p for p in finite if _depth(facts, order, start, p) == depth]
                place = next((p for p in alike if cost[p] <= 2 * best), place)
            elif not first:
                depth = _depth(facts, order, start, place)
            chosen.append(place)
            if start in light or end in light:
                beside_light.append(place)
        if empty and not last:
            chosen.append(empty[-1])
    narrow = min((costs[p] for p in chosen if costs[p] > 0), default=0.0)
    return [p for p in chosen if p not in beside_light or costs[p] <= 1.5 * narrow]


def _depth(facts: Facts, order: list[fx.Node], start: int, place: int) -> int:
    return sum(node in facts.stream for node in order[start : place + 1])


def _crossing_bytes(
    facts: Facts,
    order: list[fx.Node],
    last_use: dict[fx.Node, int],
    outside: set[fx.Node],
    kept_as: Callable[[fx.Node], fx.Node],
) -> list[float]:
    """For every place, the bytes per token of what is kept for the values alive after it."""
    changes = [0.0] * (len(order) + 2)
    blocked = [0] * (len(order) + 2)
    for index, node in enumerate(order):
        if node not in facts.stream or node in outside or last_use[node] <= index:
            continue
        if not isinstance(node.meta.get("val"), torch.Tensor) or len(facts.sequence_dims(node)) > 1:
            blocked[index] += 1
            blocked[last_use[node]] -= 1
            continue
        size = bytes_per_token(facts, kept_as(node))
        changes[index] += size
        changes[last_use[node]] -= size
    costs, alive, barred = [], 0.0, 0
    for index in range(len(order)):
        alive += changes[index]
        barred += blocked[index]
        costs.append(math.inf if barred else round(alive, 3))
    return costs


def bytes_per_token(facts: Facts, node: fx.Node) -> float:
    """The bytes of a value for one position of the sequence (all batch rows together)."""
    dims = facts.sequence_dims(node)
    if not dims:
        return 0.0
    merged = 1.0 if facts.shape(node)[dims[0]] == facts.sequence else 1.0001  # rather unmerged
    length = facts.lowered.hints.get(facts.sequence, 1)
    return facts.lowered.numel(node) / length * node.meta["val"].element_size() * merged


def _sort_out_sums(
    facts: Facts, whole: set[fx.Node], added_later: set[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Stream values without a sequence dim that are no sum over chunks: ops on sums.

    Those that only lead to outputs are the tail and run at the end; those that feed back into the
    stream run whole, in their place.
    """
    summable: set[fx.Node] = set()
    others: list[fx.Node] = []
    for node in facts.lowered.graph.nodes:
        if node not in facts.stream or facts.sequence_dims(node) or node in whole:
            continue
        if node not in added_later and summing_row(facts, node, summable) is not None:
            summable.add(node)
        else:
            others.append(node)
    tail: set[fx.Node] = set()
    for node in reversed(others):
        if all(user.op == "output" or user in tail for user in node.users):
            tail.add(node)
    return whole | (set(others) - tail), tail


def summing_row(
    facts: Facts, node: fx.Node, summable: set[fx.Node] | None = None
) -> tuple[Placement, ...] | None:
    """The row by which a node without a sequence dim is a sum over chunks, if there is one."""
    operands = operands_of(node)
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    for row in sum_rows(node, facts.shape):
        if all(_fits(facts, o, p, summable) for o, p in zip(operands, row, strict=True)):
            return _with_factors(facts, operands, row)
    return None


def _with_factors(
    facts: Facts, operands: list[fx.Node], row: tuple[Placement, ...]
) -> tuple[Placement, ...]:
    """The row, saying how the sequence lies inside the dims where it is merged with others."""
    factors = None
    for operand, placement in zip(operands, row):
        for dim, _ in placement.spans:
            factors = factors or merged_factors(facts, operand, dim)
    if factors is None:
        return row
    return tuple(
        Placement(tuple((dim, span.factored(*factors)) for dim, span in placement.spans))
        for placement in row
    )


def merged_factors(facts: Facts, node: fx.Node, dim: int) -> tuple[sympy.Expr, sympy.Expr] | None:
    """The factors around the sequence in a merged dim: found where it was merged.

    Returns ``None`` for a dim that is the sequence alone, or whose merge is out of sight.
    """
    steps: list[tuple[Span, Span]] = []  # how the dim lies in the output and in the operand
    while not (facts.shape(node)[dim] - facts.sequence).is_Integer:
        onward = [
            (operand, placement.spans[0], row.out.dims[dim])
            for row in rows_of(node, facts.shape)
            if dim in row.out.dims
            for operand, placement in zip(operands_of(node), row.operands)
            if placement.spans
        ]
        onward = [
            step
            for step in onward
            if facts.sequence in facts.shape(step[0])[step[1][0]].free_symbols
        ]
        if not onward:
            return None
        node, (dim, own), given = onward[0]
        steps.append((given, own))
    outer = inner = sympy.S.One
    for given, own in reversed(steps):
        outer, inner = quotient(outer, own.outer), quotient(inner, own.inner)
        if outer is None or inner is None:
            return None
        outer, inner = given.outer * outer, given.inner * inner
    return None if outer == inner == 1 else (outer, inner)


def _fits(
    facts: Facts, operand: fx.Node, placement: Placement, summable: set[fx.Node] | None
) -> bool:
    dims = facts.sequence_dims(operand)
    if placement.partial:
        if operand not in facts.stream or dims:
            return False
        return operand in summable if summable is not None else True
    if placement.spans:
        return dims == [dim for dim, _ in placement.spans]
    return not dims and operand not in facts.stream


def _ends(facts: Facts, order: list[fx.Node], tail: set[fx.Node]) -> list[fx.Node]:
    """Stream values that the tail or the caller receives."""
    return [
        node
        for node in order
        if node in facts.stream and any(user.op == "output" or user in tail for user in node.users)
    ]


def _passed_on(facts: Facts, node: fx.Node, tail: set[fx.Node]) -> int | None:
    """Where a value that the caller receives is used inside, for the first time.

    It exists whole anyway, and who asks for its gradient (``hidden_states[-1].retain_grad()``) is
    to get what comes from there: it has to pass through the value that was handed out.
    """
    if not facts.sequence_dims(node) or not any(user.op == "output" for user in node.users):
        return None
    inside = [u for u in node.users if u in facts.stream and u not in tail]
    return min((facts.position[user] for user in inside), default=None)
