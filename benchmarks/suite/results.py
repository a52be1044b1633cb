"""What was measured, arranged for reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..names import CHECKPOINTED_FULL
from .cases import ORDER, Case
from .figures import Point, Ratios


@dataclass(frozen=True)
class Group:
    """Measurements on one model, by method and length.

    Attributes:
        name: what the cases have in common.
        example: one of the cases.
        runs: by method, then by length; methods in the order of tables.
    """

    name: str
    example: Case
    runs: dict[str, dict[int, dict[str, Any]]]

    @property
    def methods(self) -> list[str]:
        """Those whose memory is of interest: one is there for its FLOPs."""
        return [method for method in self.runs if method != CHECKPOINTED_FULL]

    @property
    def lengths(self) -> list[int]:
        return sorted({length for runs in self.runs.values() for length in runs})

    def points(self, method: str) -> list[Point]:
        """Lengths and peaks of a method."""
        runs = self.runs.get(method, {})
        return [(length, runs[length]["peak_bytes"]) for length in sorted(runs)]

    def ratio(self, method: str, other: str, length: int) -> float | None:
        """Peak of one method by that of another, where both were measured."""
        try:
            return self.runs[method][length]["peak_bytes"] / self.runs[other][length]["peak_bytes"]
        except KeyError:
            return None


@dataclass(frozen=True)
class RaceResult:
    """Times of several methods in turn, seconds by method and round."""

    cases: tuple[Case, ...]
    against: str
    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    compile_s: dict[str, float]

    def ratios(self, method: str, *, cpu: bool = False) -> Ratios:
        """Of a method's time by that of the one raced against, round by round."""
        times = self.cpu_seconds if cpu else self.seconds
        return Ratios.of(list(zip(times[method], times[self.against], strict=True)))


@dataclass(frozen=True)
class Results:
    """Args:
    records: as the runner stored them.
    """

    records: dict[str, dict[str, Any]]

    @property
    def groups(self) -> list[Group]:
        found: dict[str, Group] = {}
        measured = [record for record in self.records.values() if "peak_bytes" in record]
        for record in sorted(measured, key=lambda record: ORDER.index(record["case"]["method"])):
            case = Case(**record["case"])
            group = found.setdefault(case.group, Group(case.group, case, {}))
            group.runs.setdefault(case.method, {})[case.length] = record
        return sorted(found.values(), key=lambda group: group.name)

    def group(self, family: str, shape: str, dtype: str = "float32") -> Group | None:
        for group in self.groups:
            case = group.example
            if (case.family, case.shape, case.dtype) == (family, shape, dtype):
                return group
        return None

    @property
    def races(self) -> Iterator[RaceResult]:
        found = [record for record in self.records.values() if "times" in record]
        for record in sorted(found, key=lambda record: record["cases"][0]["length"]):
            times = record["times"]
            yield RaceResult(
                tuple(Case(**case) for case in record["cases"]),
                record["against"],
                {m: [answer["seconds"] for answer in each] for m, each in times.items()},
                {m: [answer["cpu_seconds"] for answer in each] for m, each in times.items()},
                record["compile_s"],
            )

    @property
    def gradients(self) -> list[dict[str, Any]]:
        return [record for record in self.records.values() if "errors" in record]

    @property
    def failed(self) -> dict[str, str]:
        return {k: r["failed"] for k, r in self.records.items() if "failed" in r}

    @property
    def versions(self) -> list[dict[str, str]]:
        """Each different set of versions that took part."""
        found: list[dict[str, str]] = []
        for record in self.records.values():
            if record.get("versions", None) not in (None, *found):
                found.append(record["versions"])
        return found
