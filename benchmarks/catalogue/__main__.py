"""Run every causal-LM class of transformers in eager and under seqsplit, and write what came out.

Each class runs in a process of its own with a limit on memory and time. Finished ones are kept in
``.cache/catalogue`` (``--fresh`` forgets them), so a run that is cut short goes on where it was.
The table is written to ``docs/coverage.md``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .report import write_report

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "catalogue"


def main() -> int:
    options = parse()
    types = options.types or causal_types()
    CACHE.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        for name in types:
            path_of(name).unlink(missing_ok=True)
    missing = [name for name in types if not path_of(name).exists()]
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn()) as progress,
        concurrent.futures.ThreadPoolExecutor(options.workers) as pool,
    ):
        task = progress.add_task("catalogue", total=len(missing))
        jobs = {pool.submit(run_one, name, options): name for name in missing}
        for job in concurrent.futures.as_completed(jobs):
            found = job.result()
            path_of(found["type"]).write_text(json.dumps(found))
            progress.update(task, advance=1, description=f"{found['type']}: {found['status']}")
    results = [json.loads(path_of(name).read_text()) for name in types if path_of(name).exists()]
    if not options.types:
        write_report(results, len(types), ROOT / "docs" / "coverage.md")
    wrong = [found["type"] for found in results if found["status"] == "mismatch"]
    if wrong:
        print(f"not exact: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("types", nargs="*", help="model types; all if none is given")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--seconds", type=int, default=240, help="limit for one class")
    options.add_argument("--gib", type=int, default=8, help="limit of memory for one class")
    options.add_argument("--fresh", action="store_true", help="run finished ones again")
    return options.parse_args()


def causal_types() -> list[str]:
    """Every model type that the library maps to a causal LM."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def path_of(model_type: str) -> Path:
    return CACHE / f"{model_type}.json"


def run_one(model_type: str, options: argparse.Namespace) -> dict[str, Any]:
    def limit_memory() -> None:
        limit = options.gib * 2**30
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    command = [sys.executable, "-m", "benchmarks.catalogue.child", model_type]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.seconds, cwd=ROOT,
            env=environment, preexec_fn=limit_memory,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"type": model_type, "status": "error", "why": f"over {options.seconds} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"type": model_type, "status": "error", "why": f"exit {done.returncode}: {why}"}
    return json.loads(lines[-1].removeprefix("RESULT "))


if __name__ == "__main__":
    sys.exit(main())
