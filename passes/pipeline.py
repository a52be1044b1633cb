"""The pipeline: from Dynamo's graph to a plan. ``PASSES`` reads as a table of contents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from seqsplit.errors import NotStreamedError, format_message
from seqsplit.ir.plan import Body, Plan
from seqsplit.options import Options
from seqsplit.passes.analysis.facts import Facts, find_sequence, fixed_length
from seqsplit.passes.capture.lower import lower
from seqsplit.passes.checks.compare import Incomparable, compare
from seqsplit.passes.checks.plan import check_plan
from seqsplit.passes.checks.samples import Samples
from seqsplit.passes.driver import Context, Executor, Pass, run_passes
from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.graph.sizes import express_sizes
from seqsplit.passes.rewrite.flex import find_flex
from seqsplit.passes.rewrite.free_length import free_length
from seqsplit.passes.rewrite.kernels import find_kernels
from seqsplit.passes.rewrite.linear_scans import find_linear_scans
from seqsplit.passes.rewrite.normalize import normalize, normalize_means
from seqsplit.passes.rewrite.skews import gather_skews
from seqsplit.passes.rewrite.slices import take_off
from seqsplit.passes.rewrite.stencils import normalize_stencils
from seqsplit.passes.segments import find_segments
from seqsplit.passes.split.islands import compile_islands
from seqsplit.passes.split.stitch import Placed, stitch

__all__ = ["PASSES", "build_plan"]

_TOO_LONG = "no length short enough takes the model's branches here"
_NOT_COMPARED = "the lowered graph was not compared with the captured one"


def _rewriting(rewrite: Callable[[Lowered], Any]) -> Callable[[Lowered, Context], Lowered]:
    """A pass that changes the graph in place and needs nothing else."""

    def apply(graph: Lowered, context: Context) -> Lowered:
        rewrite(graph)
        return graph

    return apply


def _with_facts(rewrite: Callable[[Facts], bool]) -> Callable[[Lowered, Context], Lowered]:
    """A pass that is repeated while it changes the graph, by what is known of its values."""

    def apply(graph: Lowered, context: Context) -> Lowered:
        while rewrite(context.facts(graph)):
            express_sizes(graph)
            context.forget_facts()
        return graph

    return apply


def _lower(captured: fx.GraphModule, context: Context) -> Lowered:
    return lower(captured, context.examples)


def _free_length(graph: Lowered, context: Context) -> Lowered:
    context.as_captured = graph
    return free_length(graph, context.examples, context.options.seq_dim) or graph


def _find_kernels(graph: Lowered, context: Context) -> Lowered:
    find_kernels(graph, context.examples)
    return graph


def _find_sequence(graph: Lowered, context: Context) -> Lowered:
    context.sequence = find_sequence(graph, context.options.seq_dim)
    return graph


def _find_segments(graph: Lowered, context: Context) -> Lowered:
    find_segments(graph, context)
    if not context.placed:
        if graph is not context.as_captured:  # a width of the model was freed, and not the length
            find_sequence(context.as_captured, context.options.seq_dim)
        if context.facts(graph).keeps_activations:
            raise fixed_length(graph.hints.get(context.sequence, 0))
    return graph


def _compare(graph: Lowered, context: Context) -> Lowered:
    """Differences raise an error; what cannot be tried is noted."""
    if (samples := context.samples) is None:
        return graph
    if graph.fixed_length is not None:  # all that the captured graph takes
        samples = Samples(context.facts(graph), context.examples, at=graph.fixed_length)
    if samples.length is None:
        context.unchecked.append(_TOO_LONG)
        return graph
    try:
        compare(context.captured, graph, samples)
    except Incomparable as error:
        context.unchecked.append(f"{_NOT_COMPARED}: {error}")
    return graph


PASSES = (
    # One functional graph of ATen ops, taken above autograd, with a symbol for the length.
    Pass("lower", _lower),
    Pass("find linear scans", _rewriting(find_linear_scans)),
    Pass("free length", _free_length),
    # The same in ops that rules split.
    Pass("normalize", _rewriting(normalize)),
    Pass("take off slices", _rewriting(take_off)),
    Pass("gather skews", _rewriting(gather_skews)),
    Pass("express sizes", _rewriting(express_sizes)),
    Pass("find kernels", _find_kernels),
    Pass("find flex", _rewriting(find_flex)),
    # What grows with the sequence, and what is to be said differently once that is known.
    Pass("find sequence", _find_sequence),
    Pass("normalize means", _with_facts(normalize_means)),
    Pass("normalize stencils", _with_facts(normalize_stencils)),
    # Reads of keys, cuts, demands and chunk bodies, each tried against its original.
    Pass("find segments", _find_segments),
    # The whole lowered graph against the captured one.
    Pass("compare", _compare),
)


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
    context = Context(captured, examples, options, executor)
    graph = run_passes(PASSES, context)
    if options.strict and context.entries:
        scope, reason = context.entries[0]
        raise NotStreamedError(
            format_message(
                "strict=True, and a part of the model would run whole",
                at=scope,
                why=reason,
                fix="register a rule (docs/op-rules.md), or compile with strict=False",
            )
        )
    return _stitched(graph, context, options)


def _stitched(graph: Lowered, context: Context, options: Options) -> Plan:
    """The plan under some options: the outer graph, one node per segment."""
    facts, cuts = context.facts(graph), context.cuts
    with context.clock("stitch"):
        placed = [
            replace(item, segment=replace(item.segment, options=options)) for item in context.placed
        ]
        placed = _with_islands(placed, options.inner) if options.inner else placed
        module = stitch(facts, cuts, placed, context.executor, options.schedule)
    plan = Plan(
        module,
        segments=[item.segment for item in placed if not item.deferred],
        whole=context.entries,
        length_at=_length_at(facts),
        assumptions=graph.assumptions + context.reads.assumptions,
        writes=graph.writes,
        pass_seconds=context.clock.seconds,
        with_options=lambda options: _stitched(graph, context, options),
        fixed_length=graph.fixed_length,
        unchecked=context.unchecked,
    )
    check_plan(facts, cuts, placed, plan)
    return plan


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
