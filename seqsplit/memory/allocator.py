"""A tracker that reads the allocator's own records."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler import profile as _profile

from seqsplit.memory.log import Block, Event

__all__ = ["AllocatorTracker"]

# Allocation helpers: the op that called them is the more telling name.
_ALLOCATION_HELPERS = ("aten::empty", "aten::resize_", "aten::new_empty", "[memory]")


class AllocatorTracker(Block):
    """Live bytes from the allocator's records, kept by torch's profiler.

    Exact allocation sizes on CPU, the caching allocator's rounded ones on CUDA. Memory that
    libraries obtain elsewhere (BLAS packing buffers, threads inside a parallel region) is not
    recorded. Figures are available once the block is left. Only one profiler can run per thread,
    so this cannot be nested in another one, nor used inside ``torch.profiler``. torch itself may
    warn on stderr, once, that memory allocated earlier was freed meanwhile.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__(device)
        self._profile = _profile(use_kineto=True, profile_memory=True)
        self._start_ns = 0

    def _start(self) -> None:
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError(
                "track_memory(allocator=True) needs torch's profiler, which is already running; "
                "leave the other profiler first, or use track_memory() without allocator="
            )
        self._start_ns = time.time_ns()
        with _quiet_profiler():
            self._profile.__enter__()

    def _stop(self, error: tuple[object, ...]) -> None:
        self._profile.__exit__(*error)
        self._events = self._collect(self._profile.kineto_results.experimental_event_tree())
        del self._profile

    def _read(self) -> list[Event]:
        if self._state == "open":
            raise RuntimeError(
                "track_memory(allocator=True) has its figures only after the block; "
                "use track_memory() to read them inside"
            )
        return self._events

    def _collect(self, roots: list[Any]) -> list[Event]:
        changes = []
        for node in _walk(roots):
            fields = node.extra_fields
            if node.name == "[memory]" and self._device in (None, fields.device.type):
                changes.append((node.start_time_ns, fields, node))
        changes.sort(key=lambda change: change[0])

        events, live = [], {}
        for at_ns, fields, node in changes:
            key = (str(fields.device), fields.ptr)
            seconds = max(at_ns - self._start_ns, 0) / 1e9
            if fields.alloc_size > 0:
                op = _allocating_op(node)
                live[key] = (fields.alloc_size, op)
                events.append(Event(seconds, fields.alloc_size, fields.alloc_size, op))
            elif key in live:  # otherwise it is from before the block
                nbytes, op = live.pop(key)
                events.append(Event(seconds, -nbytes, 0, op))
        return events


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the profiler's library from announcing itself on stderr.

    It reads its log level from the environment when first used; one that is set there is kept.
    """
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"  # one above its announcements
    try:
        yield
    finally:
        del os.environ[name]


def _walk(roots: list[Any]) -> Iterator[Any]:
    """All nodes of the profiler's event tree (iteratively: it can be deeper than the stack)."""
    pending = list(roots)
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children)


def _allocating_op(node: Any) -> str | None:
    """Innermost op around an allocation that is not itself just a request for memory."""
    name = None
    while node is not None:
        if not node.name.startswith(_ALLOCATION_HELPERS):
            return node.name
        if node.name != "[memory]":
            name = name or node.name
        node = node.parent
    return name
