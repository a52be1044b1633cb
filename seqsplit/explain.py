"""``seqsplit.explain``: what was made of a model, in words and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from seqsplit.frontend.breaks import GraphBreak
from seqsplit.frontend.handle import Handle, handle_for, handle_of
from seqsplit.frontend.settings import MAX_CAPTURES
from seqsplit.runtime.segment_run import chunk_bounds

__all__ = ["Report", "SegmentReport", "explain"]


_SOMEWHERE = (
    "the place is not known (a break inside of a loop leaves all of it); strict=True names it"
)
_FIXED = (
    "the model's code looks at it in Python: every other length is captured anew "
    f"(at most {MAX_CAPTURES}; pad to few lengths)"
)


@dataclass(frozen=True)
class SegmentReport:
    """One segment.

    Attributes:
        scope: the module path that it covers.
        body: the number of its chunk body, counted from 0 over the report.
        num_chunks: how many chunks it runs in.
        chunk_size: rows of the sequence per chunk.
        num_caches: buffers that its chunks read earlier positions from (two per attention).
        is_head: whether it ends in sums (the loss).
    """

    scope: str
    body: int
    num_chunks: int
    chunk_size: int
    num_caches: int
    is_head: bool


@dataclass(frozen=True)
class Report:
    """What :func:`explain` returns; ``str()`` of it is meant to be read.

    Attributes:
        seq_len: the length of the sequence in the explained call, 0 if none was found.
        segments: in the order in which they run.
        whole: what runs whole: pairs of (scope with the user's line, reason).
        distinct_bodies: how many different chunk bodies the segments share.
        num_chunks: chunks per layer segment.
        num_graphs: graphs that the call was captured in; more than one means graph breaks.
        breaks: where the capture broke, why, and how to remove the break.
        pass_seconds: time spent in each pass of the compiler.
        fixed_length: whether the model's own code fixes the length, so that every other length is
            captured anew.
        unchecked: what was not tried against the original code, and why.
    """

    seq_len: int
    segments: tuple[SegmentReport, ...] = ()
    whole: tuple[tuple[str, str], ...] = ()
    distinct_bodies: int = 0
    num_chunks: int = 0
    num_graphs: int = 1
    breaks: tuple[GraphBreak, ...] = ()
    pass_seconds: dict[str, float] = field(default_factory=dict)
    fixed_length: bool = False
    unchecked: tuple[str, ...] = ()

    @property
    def fully_streamed(self) -> bool:
        """Whether everything that depends on the sequence runs chunk by chunk."""
        return bool(self.segments) and not self.whole

    def __str__(self) -> str:
        layers = [segment for segment in self.segments if not segment.is_head]
        size = (layers or self.segments)[0].chunk_size if self.segments else 0
        reads = sum(segment.num_caches for segment in self.segments)
        bodies = "body" if self.distinct_bodies == 1 else "bodies"
        lines = [
            f"seqsplit: {self.num_chunks} chunks of {size} along T={self.seq_len}"
            f" · {len(self.segments)} segments ({self.distinct_bodies} distinct {bodies})"
            f" · {reads} cached reads"
        ]
        lines += [f"  {line}" for line in self._segment_lines()]
        if self.num_graphs > 1 or self.breaks:
            lines += self._break_lines()
        if self.fixed_length:
            lines.append(f"length  {_FIXED}")
        lines += [f"checks  not done: {reason}" for reason in self.unchecked]
        if not self.whole:
            lines.append("whole   none")
        for (scope, reason), count in Counter(self.whole).items():
            times = f"  ({count} times)" if count > 1 else ""
            lines += [f"whole   {scope}{times}", f"        why: {reason}"]
        return "\n".join(lines)

    def _break_lines(self) -> list[str]:
        lines = [f"graphs  {self.num_graphs}: the capture broke; each was treated alone"]
        for found in self.breaks:
            lines += [f"break   {found.line}", f"        why: {found.why}"]
            lines += [f"        fix: {found.fix}"]
        return lines if self.breaks else [*lines, f"break   {_SOMEWHERE}"]

    def _segment_lines(self) -> list[str]:
        lines = []
        for segment in self.segments:
            kind = "head" if segment.is_head else "layer"
            lines.append(
                f"{segment.scope:<40} {kind:<6} body {segment.body}"
                f"  {segment.num_chunks} x {segment.chunk_size}"
            )
        return lines


def explain(target: Callable, *args: Any, **kwargs: Any) -> Report:
    """Run a forward of ``target`` on these inputs and report how it was split.

    Args:
        target: a module or function, compiled by :func:`seqsplit.compile` or not yet (then it is
            explained with the default options, and left as it is).
        args, kwargs: inputs as in training.

    Returns:
        The :class:`Report`.
    """
    handle = handle_of(target) or handle_for(target)
    with torch.enable_grad():
        handle(*args, **kwargs)
    return _report(handle)


def _report(handle: Handle) -> Report:
    segments: list[SegmentReport] = []
    whole: list[tuple[str, str]] = []
    numbers: dict[int, int] = {}
    seconds: dict[str, float] = {}
    length, fixed_length = 0, False
    unchecked: list[str] = []
    split = any(not isinstance(run.plan, str) for run in handle.log)
    for run in handle.log:
        if isinstance(run.plan, str):
            if run.learns or not split:  # numbers worked out beside what is split keep nothing
                whole.append(("model", run.plan))
            continue
        length = max(length, run.length)
        whole += run.plan.whole
        fixed_length |= run.plan.fixed_length is not None
        unchecked += run.plan.unchecked
        for segment in run.plan.segments:
            rows = segment.chunk_rows(run.length, run.device)
            segments.append(
                SegmentReport(
                    scope=segment.scope,
                    body=numbers.setdefault(id(segment.body), len(numbers)),
                    num_chunks=len(chunk_bounds(run.length, rows)) - 1,
                    chunk_size=rows,
                    num_caches=len(segment.body.caches),
                    is_head=segment.body.is_head,
                )
            )
        for name, value in run.plan.pass_seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
    layers = [segment for segment in segments if not segment.is_head] or segments
    return Report(
        seq_len=length,
        segments=tuple(segments),
        whole=tuple(whole),
        distinct_bodies=len(numbers),
        num_chunks=max((segment.num_chunks for segment in layers), default=0),
        num_graphs=len(handle.log),
        breaks=tuple(dict.fromkeys(run.broke for run in handle.log if run.broke is not None)),
        pass_seconds=seconds,
        fixed_length=fixed_length,
        unchecked=tuple(dict.fromkeys(unchecked)),
    )
