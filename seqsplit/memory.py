"""Measure how many bytes of tensors a piece of code keeps alive: peak, largest, timeline.

Two ways to see memory, behind one entry point, :func:`track_memory`:

* :class:`StorageTracker` (the default) watches storages. A ``TorchDispatchMode`` looks at the
  inputs and outputs of every op, in forward, in autograd's backward and inside custom autograd
  functions; a weak reference on each storage tells when it dies. Live numbers can be read at any
  moment, and every byte has the name of the op that made it.
* :class:`AllocatorTracker` (``allocator=True``) reads the allocator's own records from torch's
  profiler. It also sees the scratch buffers kernels allocate below the dispatcher and generated
  code that calls the allocator directly, and it does not disturb autograd (see NOTE); its
  numbers exist only once the block is left.

What counts: bytes allocated inside the block. Whatever was alive at entry is the baseline, live
bytes start at 0, and the death of something from before the block does not lower them, unless it
was passed in ``existing``.

NOTE [watching costs one gradient buffer]
Autograd adds gradients in place only into a tensor that nothing else refers to. Any dispatch mode
gives each tensor a Python object, which is one more reference, so sums of gradients are made out
of place while watched: where a value has several consumers the storage tracker's peak can be
one gradient buffer above an unwatched run. ``allocator=True`` does not have this effect.

NOTE [device threads]
A mode belongs to a thread. The autograd engine stores the thread-local state (modes included)
with each backward call and restores it in whichever worker thread runs a node, so backward on a
GPU's device thread and reentrant backward in pool threads are watched as well. Threads started by
the caller's own Python code are not.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile as _profile
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Ops whose input was allocated out of sight a moment earlier (`torch.tensor`, `as_tensor`): their
# first input is new, not something from before the block.
_FRESH_INPUT = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)

# Allocation helpers: the op that called them is the more telling name.
_ALLOCATION_HELPERS = ("aten::empty", "aten::resize_", "aten::new_empty", "[memory]")


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


class _Block(MemoryLog):
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


class _Record:
    """What is known about one storage: its size, and how much of it is baseline."""

    __slots__ = ("base_bytes", "nbytes", "number", "op", "ref")

    def __init__(self, number: int, nbytes: int, base_bytes: int, op: Any) -> None:
        self.number = number
        self.nbytes = nbytes
        self.base_bytes = base_bytes
        self.op = op
        self.ref: weakref.ref | None = None

    @property
    def counted(self) -> int:
        return max(self.nbytes - self.base_bytes, 0)


class StorageTracker(_Block):
    """Live tensor bytes by storage, as seen by the dispatcher. See the module's docstring.

    A storage shared by views, aliases or subclass wrappers counts once. A storage first met as an
    op's *input* is taken to be from before the block; one first met as an output, or as a bare
    storage (``set_`` while loading or copying), as made inside. Tensors on the meta device (fake
    ones among them) count only if that is the device asked for.
    """

    _open_trackers: list[StorageTracker] = []

    def __init__(self, existing: Any = (), device: str | None = None) -> None:
        super().__init__(device)
        self._records: dict[int, _Record] = {}
        self._num_met = 0
        self._marks: list[tuple[int, str]] = []
        self._mode = _WatchOps(self)
        self._existing = list(_tensors_of(existing))

    def _start(self) -> None:
        for tensor in self._existing:
            for storage in _storages(tensor):
                # Base 0: all of it is subtracted again when it dies. No event: it is at entry.
                self._meet(storage, base_bytes=0, op="existing", log=False)
        self._existing.clear()  # do not keep alive what may die inside
        self._open_trackers.append(self)
        _ResizeWatch.update()
        self._mode.__enter__()
        torch.empty(0)  # the first op under a mode imports the compiler: seconds, not the block's
        self._entered_at = time.perf_counter()

    def _stop(self, error: tuple[object, ...]) -> None:
        try:
            self._mode.__exit__(*error)
        finally:
            self._open_trackers.remove(self)
            _ResizeWatch.update()
            self._records.clear()  # with the weak references go their callbacks

    # --- storages ---------------------------------------------------------------------------

    def see(self, storage: torch.UntypedStorage, op: Any, *, is_new: bool) -> None:
        """Take note of a storage: of its existence the first time, of its size each time."""
        record = self._records.get(storage._cdata)
        if record is None:
            self._meet(storage, base_bytes=0 if is_new else storage.nbytes(), op=op)
        else:
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the change of a known storage's size, if there is one."""
        record = self._records.get(storage._cdata)
        if record is not None and storage.nbytes() != record.nbytes:
            before, record.nbytes = record.counted, storage.nbytes()
            self._log(record.counted - before, record)

    def _meet(
        self, storage: torch.UntypedStorage, base_bytes: int, op: Any, log: bool = True
    ) -> None:
        kind = storage.device.type
        if kind != self._device if self._device is not None else kind == "meta":
            return
        key = storage._cdata
        if key in self._records:
            return
        self._num_met += 1
        record = _Record(self._num_met, storage.nbytes(), base_bytes, op)
        record.ref = weakref.ref(storage, partial(self._died, key, record))
        self._records[key] = record
        if log:
            self._log(record.counted, record)

    def _died(self, key: int, record: _Record, _ref: weakref.ref) -> None:
        # The address may already belong to a newer storage, so drop only one's own record.
        if self._records.get(key) is record:
            del self._records[key]
            counted, record.nbytes = record.counted, 0
            self._log(-counted, record)

    def _log(self, delta_bytes: int, record: _Record) -> None:
        if delta_bytes:
            seconds = time.perf_counter() - self._entered_at
            event = Event(seconds, delta_bytes, record.nbytes, record.op, record.number)
            self._events.append(event)

    # --- stretches of the block -------------------------------------------------------------

    def mark(self, name: str) -> None:
        """A new stretch of the block begins."""
        self._marks.append((len(self._events), name))

    @property
    def stretches(self) -> list[tuple[str, list[Event]]]:
        """The block's events by the stretches that :func:`mark` has cut it into; what came before
        the first mark is called ``""``."""
        events = list(self._events)
        begins = [(0, ""), *self._marks]
        ends = [at for at, _ in self._marks] + [len(events)]
        return [(name, events[at:end]) for (at, name), end in zip(begins, ends)]


class _WatchOps(TorchDispatchMode):
    """Shows a tracker every storage that goes into or comes out of an op."""

    supports_higher_order_operators = True

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()
        self._tracker = weakref.ref(tracker)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Let Dynamo compile under this mode (it would skip the frame otherwise); what the compiled
        # code runs is watched, what the compiler runs is not.
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tracker = self._tracker()
        kwargs = kwargs or {}
        if tracker is None:
            return func(*args, **kwargs)
        is_new = func in _FRESH_INPUT
        for value in _leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                for storage in _storages(value):
                    tracker.see(storage, func, is_new=is_new)
            else:
                tracker.see(value, func, is_new=True)
        result = func(*args, **kwargs)
        for value in _leaves(result):
            if isinstance(value, torch.Tensor):
                for storage in _storages(value):
                    tracker.see(storage, func, is_new=True)
        schema = getattr(func, "_schema", None)
        if schema is None or schema.is_mutable:  # `out=` and `resize_` change an input's storage
            for value in _leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    for storage in _storages(value):
                        tracker.see(storage, func, is_new=True)
        return result


class _ResizeWatch:
    """Reports ``UntypedStorage.resize_``, which is a method of the storage and not an op.

    Sharded data parallelism frees and refills parameters this way. The method is wrapped only
    while some tracker is open.
    """

    _original: Any = None  # what the class itself defined before, if anything
    _installed = False

    @classmethod
    def update(cls) -> None:
        wanted = bool(StorageTracker._open_trackers)
        if wanted and not cls._installed:
            cls._original = vars(torch.UntypedStorage).get("resize_")
            torch.UntypedStorage.resize_ = cls._resize_
        elif cls._installed and not wanted:
            if cls._original is None:
                del torch.UntypedStorage.resize_
            else:
                torch.UntypedStorage.resize_ = cls._original
        cls._installed = wanted

    @staticmethod
    def _resize_(storage: torch.UntypedStorage, size: int) -> Any:
        trackers = list(StorageTracker._open_trackers)
        for tracker in trackers:  # an unknown storage's present size is baseline
            tracker.see(storage, "UntypedStorage.resize_", is_new=False)
        resize = _ResizeWatch._original or torch._C.StorageBase.resize_
        result = resize(storage, size)
        for tracker in trackers:
            tracker.resized(storage)
        return result


class AllocatorTracker(_Block):
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


def track_memory(
    existing: Any = (), *, device: str | None = None, allocator: bool = False
) -> StorageTracker | AllocatorTracker:
    """Measure the live tensor bytes of a block of code, on CPU and GPU.

    Args:
        existing: a module, a tensor, or a list, tuple or dict of them, alive at entry (with their
            ``.grad``) and to be followed: freeing one of them inside the block lowers live bytes,
            below zero if nothing was allocated. Everything else alive at entry is baseline and
            its death goes unnoticed. Not available with ``allocator=True``, whose records do not
            tell the size of what was allocated before.
        device: count storages of this device type only (``"cpu"``, ``"cuda"``, ``"meta"`` for
            the bytes that tensors without storage would take); all but meta by default.
        allocator: read the allocator's records instead of watching storages. Includes the
            temporaries of kernels and leaves autograd undisturbed; figures only after the block.

    Returns:
        A context manager with ``peak_bytes``, ``live_bytes``, ``largest_bytes``, ``largest_op``,
        ``timeline``, ``peak_breakdown`` and ``cuda_peak_bytes``. All of them are bytes above what
        was alive at entry. A tracker serves one block.

    Raises:
        TypeError: ``existing`` holds something that is neither a module nor a tensor.
        ValueError: ``existing`` together with ``allocator=True``.
        RuntimeError: on entering, a tracker was used before, or a profiler is already running.

    Example:
        >>> with seqsplit.track_memory() as memory:
        ...     model(**batch).loss.backward()
        >>> memory.peak_bytes, memory.largest_op
    """
    if not allocator:
        return StorageTracker(existing, device)
    if list(_tensors_of(existing)):
        raise ValueError(
            "existing= cannot be combined with allocator=True: the allocator's records do not "
            "say how large a block from before was; leave one of the two out"
        )
    return AllocatorTracker(device)


def mark(name: str) -> None:
    """Tell the open trackers of storages that a new stretch of work begins."""
    for tracker in StorageTracker._open_trackers:
        tracker.mark(name)


# --- helpers ------------------------------------------------------------------------------------


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of ``existing``: parameters, buffers, tensors and their gradients."""
    if isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from _tensors_of(tensor)
    elif isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, dict):
        yield from _tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_of(item)
    else:
        raise TypeError(
            "existing= takes modules, tensors, and lists, tuples or dicts of them; "
            f"got {type(value).__name__}"
        )


def _leaves(value: Any) -> Iterator[torch.Tensor | torch.UntypedStorage]:
    """Tensors and bare storages in an op's (nested) arguments or results."""
    if isinstance(value, (torch.Tensor, torch.UntypedStorage)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, torch.storage.TypedStorage):
        yield value._untyped_storage


def _storages(tensor: torch.Tensor) -> Iterable[torch.UntypedStorage]:
    """Storages that hold a tensor's bytes: several for sparse tensors and wrapper subclasses."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        if torch._C._has_storage(tensor):
            yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield from _storages(tensor._indices())
        yield from _storages(tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield from _storages(part)
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            yield from _storages(part)


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
