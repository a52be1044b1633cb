"""Tables of the report, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..floor import floor
from ..methods import OPTIONS
from ..models import SHAPES
from ..names import CHECKPOINTED_FULL, COMPILED, OURS
from .cases import DECODER
from .figures import head_flops, longest, slopes, units
from .results import Group, RaceResult

BUDGETS_GIB = (1, 2, 4, 8)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table whose first column is aligned left, the others right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def memory(group: Group) -> str:
    """Peaks by method and length, and their growth."""
    lengths = group.lengths
    rows = [_memory_row(group, method, lengths) for method in group.methods]
    columns = ["MiB", *(f"T={length:,}" for length in lengths), "bytes per token"]
    if group.example.family == DECODER:
        columns.append("× floor")
        least = floor(SHAPES[group.example.shape], getattr(torch, group.example.dtype)).total
        cells = [f"{least * length / 2**20:,.0f}" for length in lengths]
        rows.append(["floor", *cells, f"{least:,}", "1.0"])
        for row, method in zip(rows, group.methods):
            grown = slopes(group.points(method))
            row.append(f"{grown[-1] / least:.1f}" if grown else "")
    return table(columns, rows)


def _memory_row(group: Group, method: str, lengths: list[int]) -> list[str]:
    runs = group.runs[method]
    cells = [f"{runs[n]['peak_bytes'] / 2**20:,.0f}" if n in runs else "" for n in lengths]
    grown = slopes(group.points(method))
    return [method, *cells, f"{grown[-1]:,.0f}" if grown else ""]


def longest_sequences(group: Group) -> str:
    """The longest sequence by method and budget."""
    rows = []
    for method in group.methods:
        points = group.points(method)
        found = [longest(points, budget * 2**30) for budget in BUDGETS_GIB]
        if None not in found:
            rows.append([method, *(f"{length / 1000:,.1f}k" for length in found)])
    return table(["", *(f"{budget} GiB" for budget in BUDGETS_GIB)], rows)


def flops(group: Group) -> str:
    """Counted FLOPs in F and A, at the longest length that most methods share."""
    shape = SHAPES[group.example.shape]
    rows = []
    for length in group.lengths:
        linear, attention = units(shape, length)
        full = group.runs.get(CHECKPOINTED_FULL, {}).get(length)
        for method, runs in group.runs.items():
            counted = runs.get(length, {}).get("flops")
            if counted is None:
                continue
            layers = (counted["products"] - head_flops(shape, length)) / linear
            against = f"{counted['total'] / full['flops']['total']:.3f}" if full else ""
            rows.append(
                [
                    f"{length:,}",
                    method,
                    f"{counted['total'] / 1e9:,.0f}",
                    f"{layers:.2f} F + {counted['attention'] / attention:.2f} A",
                    against,
                ]
            )
    return table(["T", "", "GFLOP", "layers", "× 4 F + 4.5 A"], rows)


def race(found: RaceResult) -> str:
    """Times, and the ratios to the method raced against."""
    rows = []
    for method, seconds in found.seconds.items():
        wall, cpu = found.ratios(method), found.ratios(method, cpu=True)
        low, high = wall.quartiles
        compiled = method in (*OPTIONS, COMPILED)
        rows.append(
            [
                method,
                f"{sorted(seconds)[len(seconds) // 2]:.2f} s",
                f"{wall.median:.3f}",
                f"{low:.3f}–{high:.3f}",
                f"{wall.range[0]:.3f}–{wall.range[1]:.3f}",
                f"{cpu.median:.3f}",
                f"{found.compile_s[method]:.1f} s" if compiled else "",
            ]
        )
    columns = ["", "step", "ratio", "quartiles", "range", "ratio of CPU time", "compiling"]
    return table(columns, rows)


def gradients(record: dict[str, Any]) -> str:
    """Losses, and errors of the gradients."""
    rows = [
        [
            method,
            f"{loss:.6f}",
            f"{record['errors'][method]:.1e}" if method in record["errors"] else "compared with",
        ]
        for method, loss in record["losses"].items()
    ]
    return table(["", "loss", "relative error"], rows)


def peak_ratios(group: Group) -> str:
    """Peaks of the others by ours."""
    rows = []
    for method in group.methods:
        cells = [group.ratio(method, OURS, length) for length in group.lengths]
        rows.append([method, *("" if cell is None else f"{cell:.1f}" for cell in cells)])
    return table(["× seqsplit", *(f"T={length:,}" for length in group.lengths)], rows)
