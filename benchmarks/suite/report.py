"""Writes what was measured: ``performance.md`` and its plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common import Screen
from . import tables
from .cases import DECODER
from .plots import draw
from .results import Group, Results
from .verdicts import Verdict, verdicts

PAGE = "performance.md"

_INTRODUCTION = """\
# Performance

Written by `make bench` (`python -m benchmarks.suite`); not by hand. One training step, forward and
backward, on CPU, batch 1, every measurement in a process of its own.

- *Peak*: tracked bytes above what was alive before the step. Weights and their gradients are: it is
  a later step of gradient accumulation.
- Peaks and FLOPs are those of a step without arithmetic: results are allocated and left as they
  are, which changes neither (`benchmarks/dry.py`).
- *Chunk*: positions per chunk of the layers, and of a tiled MLP. Losses in chunks take an eighth of
  it, with all methods; StreamBP takes 100, as its scripts do.
- *FLOPs*: counted op by op, attention by the pairs of its mask ([measuring.md](measuring.md)). F is
  the layers' matrix products of one forward, A its causal attention.
- *Time*: every method has a process and they take one step each in turn, so that what disturbs the
  machine disturbs all. Ratios are within a round; the first round is dropped.
- *Compiling*: the first step at a short length less the second.
"""
_GROWTH = """\
The floor is what a step must keep that streams one layer at a time: every layer's input, and K, V,
their gradients and the gradients of the residual stream of one layer. The growth is that between
the two longest lengths."""
_LONGEST = """\
The longest sequence within a budget for what a step needs above weights and gradients, by the
growth between the two longest lengths that were measured. It was not tried."""
_STREAMBP = """\
StreamBP is its published package (`streambp` 1.0) with the torch and transformers that it pins, in
an environment of its own (`make streambp`), on the same Llama of transformers with the same
weights. Checkpointing in both environments tells what the older versions do to time."""


def write_report(
    records: dict[str, dict[str, Any]], folder: Path, screen: Screen
) -> tuple[list[Path], bool]:
    """Write the page and the plots.

    Args:
        records: as the runner stored them.
        folder: where they go.

    Returns:
        The files, and whether all limits on memory and FLOPs are met (time is for reading: it is
        only as good as the machine was quiet).
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(records)
    found = verdicts(results)
    written = [folder / PAGE]
    for group in results.groups:
        if _is_main(group):
            written += draw(group, folder, f"performance-{_slug(group)}")
    (folder / PAGE).write_text(page(results, found))
    for verdict in found:
        screen.say(_line(verdict))
    return written, all(verdict.met for verdict in found if not verdict.timed)


def page(results: Results, found: list[Verdict]) -> str:
    """The text of the page."""
    parts = [_INTRODUCTION, _environments(results)]
    if found:
        rows = [
            [v.what, f"{v.limit:g}", f"{v.found:.3f}", "yes" if v.met else "**no**"] for v in found
        ]
        parts += ["## Limits", tables.table(["", "limit", "found", "met"], rows)]
    parts += ["## Memory", _GROWTH]
    for group in results.groups:
        parts += [f"### {_title(group)}", tables.memory(group), tables.peak_ratios(group)]
        if _is_main(group):
            slug = _slug(group)
            parts += [
                f"![memory over a step](performance-{slug}-step.png)",
                f"![peak against length](performance-{slug}-peak.png)",
                _LONGEST,
                tables.longest_sequences(group),
                f"![longest sequence](performance-{slug}-longest.png)",
            ]
    parts.append("## FLOPs")
    parts += [
        f"### {_title(group)}\n\n{tables.flops(group)}"
        for group in results.groups
        if group.example.family == DECODER and group.example.shape in ("small", "tiny")
    ]
    parts.append("## Time")
    for race in results.races:
        case = race.cases[0]
        name = f"{case.family} {case.shape}, {case.dtype}, T={case.length:,}, chunk {case.chunk}"
        parts += [f"### {name}, against {race.against}", tables.race(race)]
    parts += ["## StreamBP", _STREAMBP]
    for record in results.gradients:
        parts += [
            f"Gradients, all parameters together, T={record['length']:,}, float32, the first "
            f"sixteenth of the labels ignored:",
            tables.gradients(record),
        ]
    if results.failed:
        parts.append("## Failed")
        parts += [f"- {key}: `{why.splitlines()[-1]}`" for key, why in results.failed.items()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _environments(results: Results) -> str:
    lines = [", ".join(f"{k} {v}" for k, v in found.items()) for found in results.versions]
    return "Versions: " + "; ".join(lines) + "."


def _is_main(group: Group) -> bool:
    return group.example.dtype == "float32" and group.example.shape in ("small", "tiny")


def _slug(group: Group) -> str:
    return f"{group.example.family}-{group.example.shape}"


def _title(group: Group) -> str:
    case = group.example
    return f"{case.family} {case.shape}, {case.dtype}, chunk {case.chunk}"


def _line(verdict: Verdict) -> str:
    met = "met" if verdict.met else "NOT MET"
    return f"{verdict.what} {verdict.limit:g}: {verdict.found:.3f}, {met}"
