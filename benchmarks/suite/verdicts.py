"""The limits that the project holds itself to, and whether they are met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..floor import floor
from ..models import SHAPES
from ..names import CHECKPOINTED, CHUNKED, KEPT, OURS, OURS_THIRDS
from .cases import DECODER, LLAMA, STREAMBP, STREAMBP_THIRDS
from .figures import head_flops, slopes, units
from .results import Group, RaceResult, Results

_LONG = 16_384
# With the same chunks.
_AGAINST_STREAMBP = ((OURS, STREAMBP), (OURS_THIRDS, STREAMBP_THIRDS))


@dataclass(frozen=True)
class Verdict:
    """A figure and its limit.

    Attributes:
        what: in words.
        found: the figure.
        limit: which it may not exceed (or fall below).
        met: whether it does not.
        timed: whether it is of time, which a busy machine makes worthless.
    """

    what: str
    found: float
    limit: float
    met: bool
    timed: bool = False


def verdicts(results: Results) -> list[Verdict]:
    """All that can be told from what was measured."""
    found: list[Verdict] = []
    group = results.group(DECODER, "small")
    if group is not None:
        found += [*_memory(group), *_flops(group)]
    for race in results.races:
        case = race.cases[0]
        if (case.family, case.shape, case.dtype) == (DECODER, "small", "float32"):
            found += _time(race)
        if case.family == LLAMA:
            found += _streambp_time(race)
    for group in results.groups:
        if group.example.family == LLAMA:
            found += _streambp_memory(group)
    return found


def _memory(group: Group) -> Iterator[Verdict]:
    least = floor(SHAPES[group.example.shape], getattr(torch, group.example.dtype)).total
    grown = slopes(group.points(OURS))
    if grown:
        yield _at_most("growth of memory by the floor", max(grown) / least, 1.05)
    for method, limit in ((CHECKPOINTED, 5.0), (CHUNKED, 2.5)):
        ratio = group.ratio(method, OURS, _LONG)
        if ratio is not None:
            yield _at_least(f"peak of {method} by ours, T={_LONG:,}", ratio, limit)


def _flops(group: Group) -> Iterator[Verdict]:
    shape = SHAPES[group.example.shape]
    for method, attention_share in ((OURS, 4.5), (KEPT, 3.5)):
        for length, run in sorted(group.runs.get(method, {}).items()):
            linear, attention = units(shape, length)
            allowed = 4 * linear + attention_share * attention + head_flops(shape, length)
            what = f"FLOPs of {method} by 4 F + {attention_share} A and the head's, T={length:,}"
            yield _at_most(what, run["flops"]["total"] / allowed, 1.03)
    for length, run in sorted(group.runs.get(CHECKPOINTED, {}).items()):
        if length in group.runs.get(OURS, {}):
            ours = group.runs[OURS][length]["flops"]["total"]
            what = f"FLOPs by those of {CHECKPOINTED}, T={length:,}"
            yield _at_most(what, ours / run["flops"]["total"], 1.01)


def _time(race: RaceResult) -> Iterator[Verdict]:
    length = race.cases[0].length
    for method, limit in ((OURS, 1.05), (KEPT, 0.97 if length >= _LONG else 1.05)):
        if method in race.seconds:
            what = f"time of {method} by {race.against}, T={length:,}"
            yield _at_most(what, race.ratios(method).median, limit, timed=True)


def _streambp_memory(group: Group) -> Iterator[Verdict]:
    for ours, method in _AGAINST_STREAMBP:
        for length in group.lengths:
            ratio = group.ratio(ours, method, length)
            if ratio is not None:
                yield _at_most(f"peak by that of {method}, T={length:,}", ratio, 1.0)


def _streambp_time(race: RaceResult) -> Iterator[Verdict]:
    for ours, method in _AGAINST_STREAMBP:
        if ours in race.seconds and method in race.seconds:
            pairs = zip(race.seconds[ours], race.seconds[method], strict=True)
            ratios = sorted(a / b for a, b in pairs)
            what = f"time by that of {method}, T={race.cases[0].length:,}"
            yield _at_most(what, ratios[len(ratios) // 2], 1.0, timed=True)


def _at_most(what: str, found: float, limit: float, timed: bool = False) -> Verdict:
    return Verdict(f"{what}: at most", found, limit, found <= limit, timed)


def _at_least(what: str, found: float, limit: float) -> Verdict:
    return Verdict(f"{what}: at least", found, limit, found >= limit)
