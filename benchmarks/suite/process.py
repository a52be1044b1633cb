"""The other end of a worker: starts the process of a case, sends commands, reads answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .cases import ELSEWHERE, Case
from .serve import ANSWER

ROOT = Path(__file__).resolve().parents[2]
_LAST_WORDS = 2000  # characters of what a failed process wrote


class WorkerError(RuntimeError):
    """The process ended before it answered; the message has the end of what it wrote."""


def python_for(case: Case) -> str | None:
    """The interpreter that runs a case; ``None`` if its environment is not installed.

    StreamBP's is the one named by ``STREAMBP_PYTHON``, or the one that ``make streambp`` installs.
    """
    if case.method not in ELSEWHERE:
        return sys.executable
    named = os.environ.get("STREAMBP_PYTHON")
    path = Path(named) if named else ROOT / ".cache" / "streambp" / "bin" / "python"
    return str(path) if path.exists() else None


class Worker:
    """The process of a case, at any length.

    A context manager; ``ready`` holds what the process said once it was warm.
    """

    def __init__(self, case: Case, python: str) -> None:
        module = "streambp" if case.method in ELSEWHERE else "worker"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on leaving
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.suite.{module}", case.to_json()],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(case.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> Worker:
        try:
            self.ready = self._read()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def ask(self, command: str, length: int, argument: str = "") -> dict[str, Any]:
        """Send a command for a length, wait for its answer.

        Raises:
            WorkerError: there is none.
        """
        try:
            self._process.stdin.write(f"{command} {length} {argument}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # reading says why
        return self._read()

    def _read(self) -> dict[str, Any]:
        for line in self._process.stdout:  # what else is printed there is not for us
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        self._errors.seek(0)
        status = self._process.wait()
        raise WorkerError(f"status {status}\n{self._errors.read()[-_LAST_WORDS:]}")
