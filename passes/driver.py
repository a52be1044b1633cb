"""The driver: runs passes in their order, times them, and shows what each has made to who asks.

A pass takes the graph and the context, and gives the graph: the same one, changed, or a new one.
What passes find out about the graph, and later ones build on, stands in the context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from seqsplit.options import Options
from seqsplit.passes.analysis.facts import Facts, propagate
from seqsplit.passes.checks.samples import Samples
from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.split.attend import Reads
from seqsplit.passes.split.cut import Cuts
from seqsplit.passes.split.stitch import Placed

__all__ = ["Clock", "Context", "Executor", "Pass", "run_passes", "watching"]


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


class Clock:
    """The seconds spent in each pass, without those in passes that run inside of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = 0.0  # of the pass that is running: seconds of those that ran inside of it

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began, around = time.perf_counter(), self._inside
        self._inside = 0.0
        try:
            yield
        finally:
            elapsed = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inside
            self._inside = around + elapsed


@dataclass
class Context:
    """What passes share beside the graph.

    Attributes:
        captured: Dynamo's graph.
        examples: the real inputs of the call it was captured from.
        options: of the compilation.
        executor: what executes segments.
        clock: of the passes.
        as_captured: the lowered graph before a length that the model's code fixed was freed.
        sequence: the symbol of the sequence's length.
        reads: which keys each attention needs.
        samples: a short call to try code on, ``None`` without validation.
        placed: the segments with their bodies.
        cuts: what is kept whole between them.
        entries: what runs whole, by scope, and why.
        unchecked: what was not tried against the original, and why.
    """

    captured: fx.GraphModule
    examples: Sequence[Any]
    options: Options
    executor: Executor
    clock: Clock = field(default_factory=Clock)
    as_captured: Lowered | None = None
    sequence: sympy.Symbol | None = None
    reads: Reads | None = None
    samples: Samples | None = None
    placed: list[Placed] = field(default_factory=list)
    cuts: Cuts | None = None
    entries: list[tuple[str, str]] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    _facts: Facts | None = None

    def facts(self, graph: Lowered) -> Facts:
        """What is known of every value, found when it is first asked for."""
        if self._facts is None:
            self._facts = propagate(graph, self.sequence)
        return self._facts

    def forget_facts(self) -> None:
        """The graph was changed: what is known of it has to be found anew."""
        self._facts = None


@dataclass(frozen=True)
class Pass:
    """One step from Dynamo's graph to the outer graph of a plan.

    Attributes:
        name: for timings, reports and dumps.
        apply: ``(graph, context) -> graph``; leaves a graph in which every node has its shape.
    """

    name: str
    apply: Callable[[Any, Context], Any]


Watcher = Callable[[str, Any, Context], None]
_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("seqsplit_watchers", default=())


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher(name, graph, context)`` after each pass that is run inside the block.

    Example:
        >>> with watching(lambda name, graph, context: print(name)):
        ...     seqsplit.explain(model, ids)
    """
    token = _WATCHERS.set((*_WATCHERS.get(), watcher))
    try:
        yield
    finally:
        _WATCHERS.reset(token)


def run_passes(passes: Sequence[Pass], context: Context) -> Any:
    """Run the passes on the captured graph.

    Returns:
        What the last one gives.
    """
    graph: Any = context.captured
    for step in passes:
        with context.clock(step.name):
            graph = step.apply(graph, context)
        for watcher in _WATCHERS.get():
            watcher(step.name, graph, context)
    return graph
