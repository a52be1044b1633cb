"""What a step needs at any length of the sequence, from what it needs at two.

Within a stretch of a step (one segment's forward, say) everything that is alive either does not
depend on the length or grows in proportion to it. So two rehearsals, stretch by stretch, tell the
peak of each stretch at every length, and the step's peak is the highest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seqsplit.memory import StorageTracker

__all__ = ["Forecast", "Parts", "parts_of_stretches"]


@dataclass(frozen=True)
class Parts:
    """Bytes alive at the peak of a stretch.

    Attributes:
        gradients: what is still there at the end of the step.
        stored: activations made going forward.
        working: the rest: the live set of the segment that runs, and of one of its chunks.
    """

    gradients: float
    stored: float
    working: float

    @property
    def total(self) -> float:
        return self.gradients + self.stored + self.working


def parts_of_stretches(memory: StorageTracker) -> list[Parts]:
    """The parts at the peak of every stretch of a tracked step."""
    sizes: dict[int, int] = {}
    for _, events in memory.stretches:
        for event in events:
            sizes[event.storage] = sizes.get(event.storage, 0) + event.delta_bytes
    remaining = {storage for storage, nbytes in sizes.items() if nbytes > 0}
    forward = set()
    live = {"gradients": 0, "stored": 0, "working": 0}
    found = []
    for name, events in memory.stretches:
        best = dict(live)
        for event in events:
            if not name.startswith("backward") and event.delta_bytes > 0:
                forward.add(event.storage)
            kind = "working"
            if event.storage in remaining:
                kind = "gradients"
            elif event.storage in forward:
                kind = "stored"
            live[kind] += event.delta_bytes
            if sum(live.values()) > sum(best.values()):
                best = dict(live)
        found.append(Parts(**best))
    return found


@dataclass(frozen=True)
class Forecast:
    """Attributes:
    lengths: the two lengths that were rehearsed.
    shorter, longer: the parts of every stretch at each.
    """

    lengths: tuple[int, int]
    shorter: Sequence[Parts]
    longer: Sequence[Parts]

    def at(self, length: int) -> Parts:
        """The parts at the step's peak, at a length."""
        return max(
            (self._stretch(*pair, length) for pair in zip(self.shorter, self.longer)),
            key=lambda parts: parts.total,
        )

    def longest(self, budget_bytes: float) -> int:
        """The longest sequence whose peak is within a budget, 0 if there is none."""
        longest = float("inf")
        for one, other in zip(self.shorter, self.longer):
            growth = (other.total - one.total) / (self.lengths[1] - self.lengths[0])
            room = budget_bytes - one.total + growth * self.lengths[0]
            if growth > 0:
                longest = min(longest, room / growth)
            elif room < 0:
                return 0
        return max(int(longest), 0)

    def growth(self, length: int) -> float:
        """Bytes per token at a length."""
        return (self.at(2 * length).total - self.at(length).total) / length

    def _stretch(self, one: Parts, other: Parts, length: int) -> Parts:
        part = (length - self.lengths[0]) / (self.lengths[1] - self.lengths[0])

        def along(first: float, second: float) -> float:
            return max(first + (second - first) * part, 0.0)

        return Parts(
            along(one.gradients, other.gradients),
            along(one.stored, other.stored),
            along(one.working, other.working),
        )
