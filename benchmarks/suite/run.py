"""Runs the cases of a plan, each in a process of its own, and keeps what they answer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ..common import Screen
from ..methods import METHODS
from .cases import ELSEWHERE, Case, Plan, Race
from .figures import Point, expected_bytes
from .process import Worker, WorkerError, python_for
from .serve import WARM_UP
from .store import Store

GRADIENTS = "gradients"


class Runner:
    """Args:
    store: where results go; cases found there are not run again.
    limit_bytes: cases that are expected to need more are left out.
    """

    def __init__(self, screen: Screen, store: Store, limit_bytes: float) -> None:
        self._screen, self._store, self._limit = screen, store, limit_bytes
        self._said: set[str] = set()

    def run(self, plan: Plan) -> None:
        """Everything of a plan that can be run here and was not run yet."""
        measures = self._by_method([case for case in plan.measures if self._can_run(case)])
        gradients = [case for case in plan.gradients if self._can_run(case)]
        races = [
            Race(cases, race.rounds)
            for race in plan.races
            if len(cases := tuple(case for case in race.cases if self._can_run(case))) > 1
        ]
        steps = sum(map(len, measures)) + bool(gradients) + sum(r.rounds + 1 for r in races)
        with self._screen.progress("steps", steps) as begin:
            for cases in measures:
                self._measure(cases, begin)
            if gradients:
                begin(key := f"{GRADIENTS} | {gradients[0].group}")
                self._guarded(key, lambda: self._compared(gradients))
            for race in races:
                self._guarded(race.key, lambda race=race: self._raced(race, begin))

    @staticmethod
    def _by_method(cases: list[Case]) -> list[list[Case]]:
        """Cases that differ in their length only, the shortest first: one process takes them."""
        found: dict[tuple[str, str], list[Case]] = {}
        for case in sorted(cases, key=lambda case: case.length):
            found.setdefault((case.group, case.method), []).append(case)
        return list(found.values())

    def _can_run(self, case: Case) -> bool:
        if case.method not in METHODS and case.method not in ELSEWHERE:
            return False  # a schedule that this version does not have
        if python_for(case) is None:
            if case.method not in self._said:
                self._screen.say(f"left out: {case.method}: `make streambp` installs it")
                self._said.add(case.method)
            return False
        return True

    def _guarded(self, key: str, run: Callable[[], dict[str, Any]]) -> bool:
        """Run something unless it was; that one thing fails does not end everything.

        Returns:
            Whether it did not fail.
        """
        if key not in self._store:
            try:
                self._store.put(key, run())
            except WorkerError as error:
                self._screen.say(f"failed: {key}: {error}")
                self._store.put(key, {"failed": str(error)})
        return "failed" not in self._store.records[key]

    def _measure(self, cases: list[Case], begin: Callable[[str], None]) -> None:
        points: list[Point] = []
        with ExitStack() as stack:
            started: list[Worker] = []

            def measured(case: Case) -> dict[str, Any]:
                if not started:
                    started.append(stack.enter_context(Worker(case, python_for(case))))
                answer = started[0].ask("measure", case.length)
                return {"case": vars(case), **started[0].ready, **answer}

            for case in cases:
                begin(case.key)
                expected = expected_bytes(points, case.length)
                if expected > self._limit:
                    gib = expected / 2**30
                    self._screen.say(f"left out: {case.key}: expected to need {gib:.0f} GiB")
                    break
                if not self._guarded(case.key, lambda case=case: measured(case)):
                    break
                points.append((case.length, self._store.records[case.key]["peak_bytes"]))

    def _compared(self, cases: list[Case]) -> dict[str, Any]:
        """Relative error of all gradients together, against those of the first case."""
        found: dict[str, Any] = {"length": cases[0].length, "against": cases[0].method}
        found["errors"], found["losses"] = {}, {}
        reference: list[torch.Tensor] = []
        with tempfile.TemporaryDirectory() as folder:
            for case in cases:
                path = f"{folder}/gradients.pt"
                with Worker(case, python_for(case)) as worker:
                    found["losses"][case.method] = worker.ask("gradients", case.length, path)[
                        "loss"
                    ]
                grads = torch.load(path)
                if not reference:
                    reference = grads
                    continue
                off = sum(float((a - b).double().square().sum()) for a, b in zip(grads, reference))
                norm = sum(float(b.double().square().sum()) for b in reference)
                found["errors"][case.method] = (off / norm) ** 0.5
        return found

    def _raced(self, race: Race, begin: Callable[[str], None]) -> dict[str, Any]:
        """Rounds in which every method takes one step, in turning order; the first is dropped."""
        begin(f"{race.key}, start")
        seconds: dict[str, list[dict[str, float]]] = {case.method: [] for case in race.cases}
        with ExitStack() as stack:
            workers = {
                case.method: stack.enter_context(Worker(case, python_for(case)))
                for case in race.cases
            }
            # What compiling takes: the first step less another like it.
            compile_s = {
                method: worker.ready["first"]["seconds"] - worker.ask("time", WARM_UP)["seconds"]
                for method, worker in workers.items()
            }
            methods = list(workers)
            for number in range(race.rounds + 1):
                if number:
                    begin(f"{race.key}, round {number} of {race.rounds}")
                turn = number % len(methods)
                for method in methods[turn:] + methods[:turn]:
                    answer = workers[method].ask("time", race.cases[0].length)
                    if number:
                        seconds[method].append(answer)
        return {
            "cases": [vars(case) for case in race.cases],
            "against": race.cases[-1].method,
            "compile_s": compile_s,
            "times": seconds,
        }
