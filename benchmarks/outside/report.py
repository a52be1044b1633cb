"""The results as a page of Markdown."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from .options import LENGTH

HEAD = """# Coverage of decoders outside transformers

Written by `make outside`; not by hand. Decoders of packages that do not build on transformers, in
tiny random configurations ({length} tokens, float64 unless said otherwise, chunks of 4 and 7),
eager against seqsplit: the loss and every parameter's gradient. *Exact* means that the largest
difference is at most 1e-9 of the largest entry (1e-4 in float32).
"""

SILENT = "nothing was split, and the report names no reason"

Result = dict[str, Any]


def write_report(
    results: list[Result], versions: dict[str, str], unusable: dict[str, str], path: Path
) -> None:
    """Write the page.

    Args:
        results: of all option sets.
        versions: of the packages, in the order of the page.
        unusable: why a package could not be installed or imported, '' where it could.
        path: of the page.
    """
    lines = [HEAD.format(length=LENGTH), *_summary(results), "", *_reasons(results)]
    for package, version in versions.items():
        lines += ["", f"## {package} {version}".rstrip(), ""]
        own = [found for found in results if found["package"] == package]
        lines += _table(own) if not unusable[package] else [f"Not run: {unusable[package]}"]
    path.write_text("\n".join(lines) + "\n")


def _summary(results: list[Result]) -> list[str]:
    count = Counter(found["status"] for found in results)
    exact = [found for found in results if found["status"] == "exact"]
    ran = len(results) - count["not run"]
    return [
        f"- option sets tried: {len(results)}; run in eager: {ran}",
        f"- exact: {len(exact)} of {ran}",
        f"- nothing whole at all: {sum(found['streamed'] for found in exact)}",
        f"- not exact: {count['mismatch']}; errors: {count['error']}",
    ]


def _reasons(results: list[Result]) -> list[str]:
    """What was left whole, by the number of option sets that it stands in the way of."""
    # The last op of the graph to fail is found first: what it stands for fails with it.
    whole = [whole_of(found) for found in results if "errors" in found]
    reasons = Counter(_plain(entries[0][1]) for entries in whole if entries)
    lines = [f"- {count} × {reason}" for reason, count in reasons.most_common()]
    return ["What stands in the way, by the number of option sets:", "", *lines] if lines else []


def whole_of(found: Result) -> list[list[str]]:
    """What was left whole, each with its reason; also where seqsplit's report does not say."""
    silent = not found["streamed"] and not found["whole"]
    return [["model", SILENT]] if silent else found["whole"]


def _table(results: list[Result]) -> list[str]:
    head = "| options | result | error | layer segments | streamed | left whole, or why not |"
    return [head, "| --- | --- | --- | --- | --- | --- |", *map(_row, results)]


def _row(found: Result) -> str:
    if "errors" not in found:
        return f"| {found['name']} | {found['status']} | | | | {_plain(found.get('why', ''))} |"
    whole = list(dict.fromkeys(f"{scope}: {reason}" for scope, reason in whole_of(found)))
    text = "; ".join(whole[:3]) + (f"; and {len(whole) - 3} more" if len(whole) > 3 else "")
    status = found["status"] + (" (float32)" if found["dtype"] == "float32" else "")
    return (
        f"| {found['name']} | {status} | {max(found['errors']):.0e} "
        f"| {found['layer_segments']} | {'yes' if found['streamed'] else 'no'} "
        f"| {_plain(found.get('why', '') + text)} |"
    )


def _plain(text: str) -> str:
    text = re.sub(r"<function \S+?(\w+) at \w+>", r"\1", text)
    text = text.replace("__closure__.0.cell_contents", "model")  # as the step's function holds it
    return " ".join(text.replace("|", "\\|").split())[:240]
