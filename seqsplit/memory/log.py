"""What a tracker of memory writes down, and the figures drawn from it."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

__all__ = ["Block", "Event", "MemoryLog"]


class Event(NamedTuple):
    """One change of live memory.

    Attributes:
        seconds: time since entry.
        delta_bytes: change of live bytes (negative when memory is freed).
        storage_bytes: size of the storage concerned after the change.
        op: what made the storage (an op, or a string); ``None`` where unknown.
        storage: a number for the storage within the block, -1 where storages are not told apart.
    """

    seconds: float
    delta_bytes: int
    storage_bytes: int
    op: Any
    storage: int = -1


class MemoryLog:
    """Append-only list of memory events, and the figures drawn from it.

    Appending to a list is atomic, so device threads and finalisers may all write; figures are
    computed when asked for and cached by the length of the log. Live bytes are relative to entry.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._summary: tuple[int, ...] = (0, 0, 0, -1, -1)  # length, live, peak, peak at, largest

    def _read(self) -> list[Event]:
        return self._events

    def _summarise(self) -> tuple[int, ...]:
        events = self._read()
        done, live, peak, peak_at, largest_at = self._summary
        length = len(events)
        for index in range(done, length):
            event = events[index]
            live += event.delta_bytes
            if live > peak:
                peak, peak_at = live, index
            if event.delta_bytes > 0 and (
                largest_at < 0 or event.storage_bytes > events[largest_at].storage_bytes
            ):
                largest_at = index
        self._summary = (length, live, peak, peak_at, largest_at)
        return self._summary

    @property
    def live_bytes(self) -> int:
        """Bytes allocated inside the block and still alive, now or when it was left."""
        return self._summarise()[1]

    @property
    def peak_bytes(self) -> int:
        """Highest value ``live_bytes`` had: bytes above what was alive at entry."""
        return self._summarise()[2]

    @property
    def largest_bytes(self) -> int:
        """Size of the largest single storage allocated inside the block, in bytes."""
        at = self._summarise()[4]
        return 0 if at < 0 else self._read()[at].storage_bytes

    @property
    def largest_op(self) -> str | None:
        """Name of the op that allocated the largest storage."""
        at = self._summarise()[4]
        return None if at < 0 else _name(self._read()[at].op)

    @property
    def timeline(self) -> list[tuple[float, int]]:
        """Every change as (seconds since entry, live bytes after it), in order."""
        points, live = [], 0
        for event in list(self._read()):
            live += event.delta_bytes
            points.append((event.seconds, live))
        return points

    @property
    def peak_breakdown(self) -> dict[str, int]:
        """Bytes alive at the peak by the op that made them, largest first."""
        until = self._summarise()[3]
        by_op: dict[str, int] = {}
        for event in self._read()[: until + 1]:
            name = _name(event.op)
            by_op[name] = by_op.get(name, 0) + event.delta_bytes
        return dict(sorted(((n, b) for n, b in by_op.items() if b), key=lambda item: -item[1]))


def _name(op: Any) -> str:
    return "unknown" if op is None else str(op)


class Block(MemoryLog):
    """What both trackers share: one use as a context manager, and CUDA's own peak."""

    def __init__(self, device: str | None) -> None:
        super().__init__()
        self._device = device
        self._state = "new"
        self._entered_at = 0.0
        self._cuda = _CudaPeak()

    def __enter__(self):
        if self._state != "new":
            raise RuntimeError(
                f"this tracker is {self._state}: its figures belong to one block; "
                "call track_memory() again for another one"
            )
        self._entered_at = time.perf_counter()
        self._start()
        self._cuda.start()
        self._state = "open"
        return self

    def __exit__(self, *error: object) -> None:
        self._state = "closed"
        self._cuda.stop()
        self._stop(error)

    def _start(self) -> None:
        raise NotImplementedError

    def _stop(self, error: tuple[object, ...]) -> None:
        raise NotImplementedError

    @property
    def cuda_peak_bytes(self) -> int | None:
        """Peak of ``torch.cuda.max_memory_allocated`` above the bytes allocated at entry.

        For the device that was current at entry. ``None`` where CUDA is absent or was not used.
        Entering resets CUDA's peak statistics; trackers around this one keep their own peak.
        """
        return self._cuda.read()


class _CudaPeak:
    """The caching allocator's peak during a block, right under nesting.

    There is one peak counter per device and each block wants it reset, so before a reset the
    counter is folded into every block that is open around it.
    """

    _open: list[_CudaPeak] = []

    def __init__(self) -> None:
        self._device: int | None = None
        self._start_bytes = 0
        self._peak: int | None = None

    @staticmethod
    def _usable() -> bool:
        return torch.cuda.is_available() and torch.cuda.is_initialized()

    @classmethod
    def _fold(cls) -> None:
        for block in cls._open:
            if block._device is None:  # CUDA was first used inside the block: it started from 0
                block._device = torch.cuda.current_device()
            peak = torch.cuda.max_memory_allocated(block._device)
            block._peak = peak if block._peak is None else max(block._peak, peak)

    def start(self) -> None:
        if self._usable():
            self._fold()
            self._device = torch.cuda.current_device()
            self._start_bytes = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._open.append(self)

    def stop(self) -> None:
        if self._usable():
            self._fold()
        self._open.remove(self)

    def read(self) -> int | None:
        if self in self._open and self._usable():
            self._fold()
        return None if self._peak is None else self._peak - self._start_bytes
