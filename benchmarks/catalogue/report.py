"""The catalogue's results as a page of Markdown."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

HEAD = """# Coverage of the transformers catalogue

Written by `make coverage`; not by hand. Every class that transformers {version} maps to a causal
LM, in a tiny random configuration ({length} tokens, float64, chunks of 4 and 7), eager against
seqsplit: the loss, the outputs and every gradient. *Exact* means a relative error of at most 1e-9.
"""


def write_report(results: list[dict[str, Any]], num_types: int, path: Path) -> None:
    """Write the table and its summary.

    Args:
        results: of the classes that were tried, out of ``num_types``.
        path: of the page.
    """
    import transformers

    from .child import LENGTH

    runs = [found for found in results if found["status"] in ("exact", "mismatch", "error")]
    exact = [found for found in runs if found["status"] == "exact"]
    streamed = [found for found in exact if found["streamed"]]
    layers = [found for found in exact if found["layers_whole"] == 0]
    lines = [HEAD.format(version=transformers.__version__, length=LENGTH)]
    lines += [
        f"- classes tried: {len(results)} of {num_types}; run in eager: {len(runs)}",
        f"- exact: {len(exact)} of {len(runs)}",
        f"- every layer streamed: {len(layers)}; nothing whole at all: {len(streamed)}",
        f"- not exact: {sum(found['status'] == 'mismatch' for found in runs)}; "
        f"errors: {sum(found['status'] == 'error' for found in runs)}",
        "",
        "What stands in the way, by the number of classes:",
        "",
    ]
    # The last op of the graph to fail is found first: what it stands for fails with it.
    reasons = Counter(_plain(found["whole"][0][1]) for found in exact if found["whole"])
    lines += [f"- {count} × {reason}" for reason, count in reasons.most_common()]
    lines += ["", "| type | result | error | layers whole | bodies | left whole, or why not |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    lines += [_row(found) for found in results]
    path.write_text("\n".join(lines) + "\n")


def _row(found: dict[str, Any]) -> str:
    if "layers" not in found:
        return f"| {found['type']} | {found['status']} | | | | {_plain(found.get('why', ''))} |"
    whole = list(dict.fromkeys(f"{scope}: {reason}" for scope, reason in found["whole"]))
    text = "; ".join(whole[:3]) + (f"; and {len(whole) - 3} more" if len(whole) > 3 else "")
    return (
        f"| {found['type']} | {found['status']} | {max(found['errors']):.0e} "
        f"| {found['layers_whole']} of {found['layers']} | {found['bodies']} "
        f"| {_plain(found.get('why', '') + text)} |"
    )


def _plain(text: str) -> str:
    text = re.sub(r"<function \S+?(\w+) at \w+>", r"\1", text)
    return " ".join(text.replace("|", "\\|").split())[:200]
