"""Segments: cut and split, and begin again with what was learnt, until everything has its place.

An op that cannot be split is gathered with others into a piece that can, or runs whole; a value
that is needed whole is kept; an op on sums waits. Each is found out by trying, and cuts are
chosen anew: one pass with a fixed point inside.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from seqsplit.ir.plan import Body, Segment
from seqsplit.passes.analysis.facts import Facts, draws_random
from seqsplit.passes.checks.samples import Samples
from seqsplit.passes.checks.validate import Validator
from seqsplit.passes.driver import Context
from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.graph.scope import describe, scope_of
from seqsplit.passes.rewrite.regions import Regions
from seqsplit.passes.rewrite.windows import Windows
from seqsplit.passes.rules.registry import Unsplittable, operands_of
from seqsplit.passes.split.attend import attend
from seqsplit.passes.split.body import split
from seqsplit.passes.split.cut import Cuts, Group, bytes_per_token, choose_cuts
from seqsplit.passes.split.demand import (
    AddedLater,
    Demands,
    Input,
    Narrow,
    NeededWhole,
    ReadKeys,
    demand,
)
from seqsplit.passes.split.stitch import Placed

__all__ = ["find_segments"]

aten = torch.ops.aten

_MAX_ROUNDS = 400
_WIDE = 1.5  # times as wide as anything that is kept: logits


def find_segments(graph: Lowered, context: Context) -> None:
    """Put into the context the segments with their bodies, and what is kept between them."""
    regions, windows = Regions(graph), Windows(graph)
    while True:
        facts = context.facts(graph)
        with context.clock("attend"):
            context.reads = attend(facts, context.examples)
        validator = None
        if context.options.validate:
            context.samples = Samples(facts, context.examples)
            validator = Validator(facts, context.samples, context.executor.run)
        rounds = _Rounds(facts, context, regions, windows)
        try:
            context.placed, context.cuts = rounds.run(validator)
        except _Regrouped:
            context.forget_facts()
            continue
        context.entries = rounds.entries
        return


class _Regrouped(Exception):
    """Ops were gathered into regions; what is known of the graph has to be found anew."""


class _Rounds:
    """Cuts and splits until everything either has a body or runs whole.

    Args:
        facts: of the graph.
        context: with the reads of its attentions, the options and the clock.
        regions, windows: what gathers ops that cannot be split one by one.

    Attributes:
        entries: what runs whole, by scope, and why.
    """

    def __init__(self, facts: Facts, context: Context, regions: Regions, windows: Windows) -> None:
        self._facts, self._reads = facts, context.reads
        self._options, self._clock = context.options, context.clock
        self._regions, self._windows = regions, windows
        self._forced: dict[fx.Node, fx.Node] = {}
        self._added_later: set[fx.Node] = set()
        self._bodies: dict[str, Body] = {}
        self._validated: set[str] = set()
        self._reasons: dict[fx.Node, str] = {}
        self.entries: list[tuple[str, str]] = []  # for the report: scope, reason

    def run(self, validator: Validator | None) -> tuple[list[Placed], Cuts]:
        """The segments with their bodies, tried out, and what is kept between them.

        Raises:
            _Regrouped: the graph was changed.
        """
        for _ in range(_MAX_ROUNDS):
            try:
                placed, cuts = self._attempt()
            except Unsplittable as error:
                self._run_whole(error.node, error.reason)
                continue
            except AddedLater as error:
                self._added_later.add(error.node)
                continue
            except NeededWhole as error:
                self._forced[error.node] = error.user
                continue
            failed = self._validate(validator, placed)
            if failed is None:
                return placed, cuts
        raise RuntimeError(f"no plan was found in {_MAX_ROUNDS} rounds")

    def _run_whole(self, node: fx.Node, reason: str) -> None:
        if node in self._reasons:
            raise RuntimeError(f"{node} runs whole already: {reason}")
        if self._is_part(node):  # its source is kept, which is no wider than others
            self._reasons[node] = reason
            return
        with self._clock("regions"):
            facts = self._facts
            if (
                self._windows.gather_around(facts, node)
                or self._regions.gather_around(facts, self._reads.mixers, node)
                or self._windows.gather_around(facts, node, token_wise=True)
            ):
                raise _Regrouped
        self._leave(node, reason)
        # One that counts in blocks fails, and so will all that do, of whatever layer.
        if any(map(self._facts.is_in_blocks, [node, *operands_of(node)])):
            for other in self._facts.lowered.graph.nodes:
                inside = other in self._facts.stream and self._facts.is_tensor(other)
                if inside and other not in self._reasons and self._facts.is_in_blocks(other):
                    self._leave(other, "it counts the sequence in blocks")

    def _leave(self, node: fx.Node, reason: str) -> None:
        self._reasons.update(dict.fromkeys(_with_items([node]), reason))
        self.entries.append((f"{scope_of([node])}  {describe(node)}", reason))

    def _attempt(self) -> tuple[list[Placed], Cuts]:
        facts, options = self._facts, self._options
        with self._clock("cut"):
            cuts = choose_cuts(
                facts,
                self._reads,
                whole=self._reasons,
                forced=self._forced,
                segment_layers=options.segment_layers,
                added_later=self._added_later,
            )
        available = set(facts.outer) | cuts.whole
        drawn: dict[fx.Node, int] = {}
        placed: list[Placed] = []
        for group in cuts.groups:
            deferred = self._deferrable(group) if group is cuts.groups[-1] else []
            now = {node: p for node, p in group.values.items() if node not in deferred}
            placed.append(self._segment(group.position, now, available, drawn, deferred=False))
            for node in deferred:
                only = {node: group.values[node]}
                placed.append(self._segment(group.position, only, available, {}, deferred=True))
            available |= set(group.values)
        return placed, cuts

    def _segment(
        self,
        position: int,
        targets: dict[fx.Node, Any],
        available: set[fx.Node],
        drawn: dict[fx.Node, int],
        *,
        deferred: bool,
    ) -> Placed:
        facts = self._facts
        with self._clock("demand"):
            demands = demand(facts, self._reads, targets, available)
            self._draw_once(demands, position, drawn)
        with self._clock("split"):
            result = split(facts, demands, targets)
        shared = self._bodies.setdefault(result.body.fingerprint, result.body)
        nodes = [node for node in demands.recipes if node in facts.stream]
        segment = Segment(shared, scope_of(nodes), self._options, _width(facts, nodes, available))
        result = type(result)(shared, result.operands, result.sizes)
        computed = tuple(node for node in nodes if node not in available)
        return Placed(segment, result, position, tuple(targets), computed, deferred)

    def _draw_once(self, demands: Demands, position: int, drawn: dict[fx.Node, int]) -> None:
        """A random op must not be run by two segments, or at two placements: they would differ."""
        for node, recipes in demands.recipes.items():
            computed = [r for r in recipes.values() if not isinstance(r, (Input, Narrow, ReadKeys))]
            if not computed or not draws_random(node):
                continue
            if len(computed) > 1 or drawn.setdefault(node, position) != position:
                raise NeededWhole(node, node.next)

    def _is_part(self, node: fx.Node) -> bool:
        """Whether a node only drops the first rows of something narrow: of tokens that the model
        itself has put before the others."""
        facts = self._facts
        if node.target is not aten.slice.Tensor or len(facts.sequence_dims(node)) != 1:
            return False
        (source,) = operands_of(node)
        (dim,) = facts.sequence_dims(node)
        dropped = facts.shape(source)[dim] - facts.shape(node)[dim]
        narrow = bytes_per_token(facts, source) <= self._width_of_features()
        return facts.sequence_dims(source) == [dim] and dropped.is_Integer and narrow

    def _width_of_features(self) -> float:
        """Bytes per token of the widest value that enters the model's layers."""
        facts = self._facts
        kept = [n for n in facts.outer | facts.stream if n in facts.features]
        return max((bytes_per_token(facts, n) for n in kept), default=0.0)

    def _deferrable(self, group: Group) -> list[fx.Node]:
        """Wide outputs (logits): most callers never look at them, or at little of them."""
        facts, widest = self._facts, _WIDE * self._width_of_features()
        return [
            node
            for node in group.values
            if bytes_per_token(facts, node) > widest
            and all(user.op == "output" or facts.is_active(user) for user in node.users)
            and any(user.op == "output" for user in node.users)
        ]

    def _validate(self, validator: Validator | None, placed: list[Placed]) -> str | None:
        if validator is None:
            return None
        for item in placed:
            fingerprint = item.split.body.fingerprint
            if fingerprint in self._validated:
                continue
            with self._clock("validate"):
                difference = _try(validator, item)
            if difference is not None:
                reason = f"its chunked form does not equal the original: {difference}"
                alike = [other for other in placed if other.split.body is item.split.body]
                for other in alike:
                    self.entries.append((other.segment.scope, reason))
                    self._reasons.update(dict.fromkeys(_with_items(other.nodes), reason))
                return reason
            self._validated.add(fingerprint)
        return None


def _try(validator: Validator, item: Placed) -> str | None:
    try:
        return validator.check(item.segment, item.split, item.values)
    except Exception as error:  # whatever a wrong body may do, it must not run
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _with_items(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes, and the items of those that are tuples: a tuple does not cross a border."""
    items = [u for node in nodes for u in node.users if u.target is operator.getitem]
    return [*nodes, *items]


def _width(facts: Facts, nodes: Sequence[fx.Node], available: set[fx.Node]) -> int:
    """Elements per row of the sequence of the widest value among ``nodes``."""
    length = facts.lowered.hints.get(facts.sequence, 1)
    return max(
        (
            int(facts.lowered.numel(node) / length)
            for node in nodes
            if node not in available and facts.is_tensor(node) and facts.sequence_dims(node)
        ),
        default=1,
    )
