"""Run decoders of packages outside transformers in eager and under seqsplit, and report.

Each package has a virtual environment of its own, each option set a process of its own with a
limit on memory and time. Both are kept in ``.cache/outside`` (``--fresh`` forgets the results), so
a run that is cut short goes on where it was. The table is written to ``docs/coverage-outside.md``.
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

from .environments import CACHE, ROOT, python_of, set_up, version_of
from .packages import describe, names
from .report import write_report

Case = tuple[str, str]  # package, option set


def main() -> int:
    options = parse()
    packages = options.packages or names()
    columns = (TextColumn("{task.description:<48}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        unusable = set_up_all(packages, progress)
        cases = [
            (package, found.name)
            for package in packages
            if not unusable[package]
            for found in describe(package).option_sets()
        ]
        run_all(cases, options, progress)
    results = [json.loads(path_of(case).read_text()) for case in cases]
    if not options.packages:
        versions = {package: version_of(package) for package in packages}
        write_report(results, versions, unusable, ROOT / "docs" / "coverage-outside.md")
    wrong = [f"{r['package']} {r['name']}" for r in results if r["status"] == "mismatch"]
    if wrong:
        print(f"not exact: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("packages", nargs="*", help="names on the index; all if none is given")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--seconds", type=int, default=240, help="limit for one option set")
    options.add_argument("--gib", type=int, default=6, help="limit of memory for one option set")
    options.add_argument("--fresh", action="store_true", help="run finished ones again")
    return options.parse_args()


def set_up_all(packages: list[str], progress: Progress) -> dict[str, str]:
    """Why each package cannot be used, '' where it can."""
    task = progress.add_task("environments", total=len(packages))
    unusable = {}
    for package in packages:
        progress.update(task, description=f"environments: {package}")
        unusable[package] = set_up(package)
        progress.advance(task)
    return unusable


def run_all(cases: list[Case], options: argparse.Namespace, progress: Progress) -> None:
    """Run the cases that have no result yet, and keep each result as it comes."""
    missing = [case for case in cases if options.fresh or not path_of(case).exists()]
    task = progress.add_task("option sets", total=len(missing))
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        jobs = {pool.submit(run_one, case, options): case for case in missing}
        for job in concurrent.futures.as_completed(jobs):
            case, found = jobs[job], job.result()
            path_of(case).write_text(json.dumps(found))
            progress.update(task, advance=1, description=f"{' '.join(case)}: {found['status']}")


def path_of(case: Case) -> Path:
    return CACHE / case[0] / f"{case[1]}.json"


def run_one(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """What the child process found, or how it ended without finding anything."""

    def limit_memory() -> None:
        limit = options.gib * 2**30
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    package, name = case
    found = {"package": package, "name": name, "status": "error"}
    command = [python_of(package), "-m", "benchmarks.outside.child", package, name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.seconds, cwd=ROOT,
            env=environment, preexec_fn=limit_memory,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return found | {"why": f"over {options.seconds} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return found | {"why": f"exit {done.returncode}: {why}"}
    return json.loads(lines[-1].removeprefix("RESULT "))


if __name__ == "__main__":
    sys.exit(main())
