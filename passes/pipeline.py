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
   compare    the lowered graph against Dynamo's
8. stitch     the outer graph, one node per segment

Steps 5 to 7 are repeated (:mod:`.rounds`): what cannot be split is found on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from seqsplit.errors import NotStreamedError, format_message
from seqsplit.ir.plan import Body, Plan
from seqsplit.options import Options
from seqsplit.passes.analysis.facts import Facts, find_sequence, fixed_length, propagate
from seqsplit.passes.capture.lower import lower
from seqsplit.passes.checks.compare import Incomparable, compare
from seqsplit.passes.checks.plan import check_plan
from seqsplit.passes.checks.samples import Samples
from seqsplit.passes.checks.validate import Validator
from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.graph.sizes import express_sizes
from seqsplit.passes.rewrite.flex import find_flex
from seqsplit.passes.rewrite.free_length import free_length
from seqsplit.passes.rewrite.kernels import find_kernels
from seqsplit.passes.rewrite.linear_scans import find_linear_scans
from seqsplit.passes.rewrite.normalize import normalize, normalize_means
from seqsplit.passes.rewrite.regions import Regions
from seqsplit.passes.rewrite.skews import gather_skews
from seqsplit.passes.rewrite.slices import take_off
from seqsplit.passes.rewrite.stencils import normalize_stencils
from seqsplit.passes.rewrite.windows import Windows
from seqsplit.passes.split.attend import attend
from seqsplit.passes.split.islands import compile_islands
from seqsplit.passes.split.segments import Clock, Regrouped, Rounds
from seqsplit.passes.split.stitch import Placed, stitch

__all__ = ["Executor", "build_plan"]

_TOO_LONG = "no length short enough takes the model's branches here"
_NOT_COMPARED = "the lowered graph was not compared with the captured one"


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
    clock = Clock()
    with clock("lower"):
        as_captured = lower(captured, examples)
        find_linear_scans(as_captured)
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
        samples = Samples(facts, examples) if options.validate else None
        validator = Validator(facts, samples, executor.run) if samples is not None else None
        rounds = Rounds(facts, reads, options, clock, regions, windows)
        try:
            placed, cuts = rounds.run(validator)
            break
        except Regrouped:
            facts = propagate(lowered, sequence)
    if not placed and lowered is not as_captured:  # a width of the model, and not the length
        find_sequence(as_captured, options.seq_dim)
    if not placed and facts.keeps_activations:
        raise fixed_length(lowered.hints.get(sequence, 0))
    unchecked = []
    if samples is not None:
        if lowered.fixed_length is not None:  # all that the captured graph takes
            samples = Samples(facts, examples, at=lowered.fixed_length)
        with clock("compare"):
            unchecked = _unchecked(captured, lowered, samples)
    if options.strict and rounds.entries:
        scope, reason = rounds.entries[0]
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
            rounds.entries,
            _length_at(facts),
            lowered.assumptions + reads.assumptions,
            lowered.writes,
            clock.seconds,
            finish,
            lowered.fixed_length,
            unchecked=unchecked,
        )
        check_plan(facts, cuts, own, plan)
        return plan

    return finish(options)


def _unchecked(captured: fx.GraphModule, lowered: Lowered, samples: Samples) -> list[str]:
    """What cannot be tried against the original. (What differs from it raises an error.)"""
    if samples.length is None:
        return [_TOO_LONG]
    try:
        compare(captured, lowered, samples)
    except Incomparable as error:
        return [f"{_NOT_COMPARED}: {error}"]
    return []


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
