"""The pipeline: from Dynamo's graph to a plan. It reads as a table of contents.

1. lower      torch-level graph -> functional ATen graph with symbolic sizes; a length that the
              model's code has fixed becomes a symbol again
2. normalize  means become sums over counts, shape-only operands become sizes
   kernels    calls of fused attention that others have written
3. propagate  what each value is: outer or active, which dims grow with the sequence
4. attend     which keys each attention needs
5. cut        which values are kept whole between segments
6. split      each segment's demands -> a chunk body; equal bodies are shared
7. validate   each distinct body against its original subgraph
8. stitch     the outer graph, one node per segment

What cannot be split is found on the way: an op without a row for what is asked of it then runs
whole, in the outer graph, and cutting starts again.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..errors import NotStreamedError, format_message
from ..options import Options
from ..plan import Body, Plan, Segment
from .attend import Reads, attend
from .check import check_plan
from .cut import Cuts, Group, bytes_per_token, choose_cuts
from .demand import AddedLater, Demands, Input, Narrow, NeededWhole, ReadKeys, demand
from .facts import Facts, find_sequence, fixed_length, propagate
from .flex import find_flex
from .free_length import free_length
from .islands import compile_islands
from .kernels import find_kernels
from .lower import lower
from .normalize import normalize, normalize_means
from .recurrences import find_recurrences
from .regions import Regions
from .rules.registry import Unsplittable, operands_of
from .scope import describe, scope_of
from .sizes import express_sizes
from .skews import gather_skews
from .slices import take_off
from .split import draws_random, split
from .stencils import normalize_stencils
from .stitch import Placed, stitch
from .validate import Validator
from .windows import Windows

__all__ = ["Executor", "build_plan"]

aten = torch.ops.aten

_MAX_ROUNDS = 400
_WIDE = 1.5  # times as wide as anything that is kept: logits


@dataclass(frozen=True)
class Executor:
    """The functions of the runtime that a plan calls; handed in, so that passes do not depend on
    it.

    Attributes:
        run: runs a segment.
        defer: makes a value that runs a segment when it is looked at.
        new_chain: makes what the segments of one call keep in common.
        link: a segment's place in it.
    """

    run: Callable
    defer: Callable
    new_chain: Callable
    link: Callable


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Any:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def build_plan(
    captured: fx.GraphModule, examples: Sequence[Any], options: Options, executor: Executor
) -> Plan:
    """Make the plan of a captured graph.

    Args:
        captured: Dynamo's graph.
        examples: the real inputs of the call it was captured from.
        options: of the compilation.
        executor: what executes segments.

    Returns:
        The plan.

    Raises:
        CaptureError: the graph cannot be lowered.
        InvalidOptionError: ``options.seq_dim`` names no sequence.
        NothingToSplit: the graph has no sequence of more than one position.
        NotStreamedError: ``options.strict`` and something would run whole.
    """
    clock = _Clock()
    with clock("lower"):
        as_captured = lower(captured, examples)
        find_recurrences(as_captured)
        lowered = free_length(as_captured, examples, options.seq_dim) or as_captured
    with clock("normalize"):
        normalize(lowered)
        take_off(lowered)
        gather_skews(lowered)
        express_sizes(lowered)
    with clock("kernels"):
        find_kernels(lowered, examples)
        find_flex(lowered)
    with clock("propagate"):
        sequence = find_sequence(lowered, options.seq_dim)
        facts = propagate(lowered, sequence)
        if normalize_means(facts):
            express_sizes(lowered)
            facts = propagate(lowered, sequence)
        while normalize_stencils(facts):
            express_sizes(lowered)
            facts = propagate(lowered, sequence)
    regions, windows = Regions(lowered), Windows(lowered)
    while True:
        with clock("attend"):
            reads = attend(facts, examples)
        validator = Validator(facts, examples, executor.run) if options.validate else None
        planner = _Planner(facts, reads, options, clock, regions, windows)
        try:
            placed, cuts = planner.plan(validator)
            break
        except Regrouped:
            facts = propagate(lowered, sequence)
    if not placed and lowered is not as_captured:  # a width of the model, and not the length
        find_sequence(as_captured, options.seq_dim)
    if not placed and facts.keeps_activations:
        raise fixed_length(lowered.hints.get(sequence, 0))
    if options.strict and planner.entries:
        scope, reason = planner.entries[0]
        raise NotStreamedError(
            format_message(
                "strict=True, and a part of the model would run whole",
                at=scope,
                why=reason,
                fix="register a rule (docs/op-rules.md), or compile with strict=False",
            )
        )

    def finish(options: Options) -> Plan:
        with clock("stitch"):
            own = [_under(options, item) for item in placed]
            own = _with_islands(own, options.inner) if options.inner else own
            module = stitch(facts, cuts, own, executor, options.schedule)
        plan = Plan(
            module,
            [item.segment for item in own if not item.deferred],
            planner.entries,
            _length_at(facts),
            lowered.assumptions + reads.assumptions,
            lowered.writes,
            clock.seconds,
            finish,
            lowered.fixed_length,
            validated=validator is not None and validator.possible,
        )
        check_plan(facts, cuts, own, plan)
        return plan

    return finish(options)


def _under(options: Options, item: Placed) -> Placed:
    return replace(item, segment=replace(item.segment, options=options))


def _with_islands(placed: Sequence[Placed], inner: str) -> list[Placed]:
    """The same segments, their bodies (shared as before) partly compiled."""
    bodies: dict[Body, Body] = {}
    for body in (item.segment.body for item in placed):
        if body not in bodies:
            bodies[body] = compile_islands(body, inner)
    return [
        replace(item, segment=replace(item.segment, body=bodies[item.segment.body]))
        for item in placed
    ]


def _length_at(facts: Facts) -> tuple[int, int, int]:
    """An input, its dim along the sequence, and by how much that is longer."""
    for index, node in enumerate(facts.lowered.placeholders):
        if facts.is_tensor(node):
            for dim, size in enumerate(facts.shape(node)):
                if (size - facts.sequence).is_Integer:
                    return index, dim, int(size - facts.sequence)
    raise AssertionError("the sequence's symbol was taken from an input")


class Regrouped(Exception):
    """Ops were gathered into regions; what is known of the graph has to be found anew."""


class _Planner:
    """Cuts and splits until everything either has a body or runs whole."""

    def __init__(
        self,
        facts: Facts,
        reads: Reads,
        options: Options,
        clock: _Clock,
        regions: Regions,
        windows: Windows,
    ) -> None:
        self._facts, self._reads, self._options, self._clock = facts, reads, options, clock
        self._regions, self._windows = regions, windows
        self._forced: dict[fx.Node, fx.Node] = {}
        self._added_later: set[fx.Node] = set()
        self._bodies: dict[str, Body] = {}
        self._validated: set[str] = set()
        self.reasons: dict[fx.Node, str] = {}
        self.entries: list[tuple[str, str]] = []  # for the report: scope, reason

    def plan(self, validator: Validator | None) -> tuple[list[Placed], Cuts]:
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
        if node in self.reasons:
            raise RuntimeError(f"{node} runs whole already: {reason}")
        if self._is_part(
            node
        ):  # computes nothing: its source is kept, which is no wider than others
            self.reasons[node] = reason
            return
        with self._clock("regions"):
            facts = self._facts
            if (
                self._windows.gather_around(facts, node)
                or self._regions.gather_around(facts, self._reads.mixers, node)
                or self._windows.gather_around(facts, node, token_wise=True)
            ):
                raise Regrouped
        self._leave(node, reason)
        # One that counts in blocks fails, and so will all that do, of whatever layer.
        if any(map(self._facts.is_in_blocks, [node, *operands_of(node)])):
            for other in self._facts.lowered.graph.nodes:
                inside = other in self._facts.stream and self._facts.is_tensor(other)
                if inside and other not in self.reasons and self._facts.is_in_blocks(other):
                    self._leave(other, "it counts the sequence in blocks")

    def _leave(self, node: fx.Node, reason: str) -> None:
        self.reasons.update(dict.fromkeys(_with_items([node]), reason))
        self.entries.append((f"{scope_of([node])}  {describe(node)}", reason))

    def _attempt(self) -> tuple[list[Placed], Cuts]:
        facts, options = self._facts, self._options
        with self._clock("cut"):
            cuts = choose_cuts(
                facts,
                self._reads,
                whole=self.reasons,
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
        facts = self._facts
        return [
            node
            for node in group.values
            if bytes_per_token(facts, node) > _WIDE * self._width_of_features()
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
                    self.reasons.update(dict.fromkeys(_with_items(other.nodes), reason))
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
