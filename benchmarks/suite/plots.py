"""Plots of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .figures import longest
from .results import Group
from .tables import BUDGETS_GIB


def draw(group: Group, folder: Path, prefix: str) -> list[Path]:
    """Memory over a step, peak against length, and the longest sequence within a budget.

    Returns:
        The files written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots = {"step": _step, "peak": _peak, "longest": _longest}
    written = []
    colours = {method: f"C{index}" for index, method in enumerate(group.methods)}
    for name, plot in plots.items():
        figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
        plot(axes, group, colours)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        path = folder / f"{prefix}-{name}.png"
        figure.savefig(path, dpi=120, metadata={"Software": None})
        plt.close(figure)
        written.append(path)
    return written


def _step(axes: Any, group: Group, colours: dict[str, str]) -> None:
    """Of the longest length that at least three methods were measured at (or any)."""
    lengths = [n for n in group.lengths if sum(n in runs for runs in group.runs.values()) > 2]
    length = max(lengths or group.lengths)
    for method in group.methods:
        if length in group.runs[method]:
            shares, live = zip(*group.runs[method][length]["timeline"], strict=True)
            mib = [value / 2**20 for value in live]
            axes.plot(shares, mib, label=method, color=colours[method])
    axes.set(
        xlabel="share of the step's allocations",
        ylabel="MiB above weights and gradients",
        title=f"Memory over one step, T={length:,}",
        ylim=(0, None),
    )


def _peak(axes: Any, group: Group, colours: dict[str, str]) -> None:
    for method in group.methods:
        lengths, peaks = zip(*group.points(method), strict=True)
        mib = [peak / 2**20 for peak in peaks]
        axes.loglog(lengths, mib, marker="o", label=method, color=colours[method])
    ticks = group.lengths
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
    axes.minorticks_off()
    axes.set(xlabel="T", ylabel="peak in MiB above weights and gradients", title="Peak of a step")


def _longest(axes: Any, group: Group, colours: dict[str, str]) -> None:
    methods = [m for m in group.methods if longest(group.points(m), 2**30) is not None]
    height = 0.8 / max(len(methods), 1)
    for index, method in enumerate(methods):
        found = [longest(group.points(method), budget * 2**30) for budget in BUDGETS_GIB]
        places = [row + index * height for row in range(len(BUDGETS_GIB))]
        axes.barh(places, found, height, label=method, color=colours[method])
    middle = 0.4 - height / 2
    axes.set_yticks(
        [row + middle for row in range(len(BUDGETS_GIB))],
        [f"{budget} GiB" for budget in BUDGETS_GIB],
    )
    axes.set(xlabel="T", xscale="log", title="Longest sequence, by the growth of the peak")
