"""A tracker that watches storages, through the ops that make and use them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from seqsplit.memory.log import Block, Event

__all__ = ["StorageTracker", "mark", "tensors_of"]

# Ops whose input was allocated out of sight a moment earlier (`torch.tensor`, `as_tensor`): their
# first input is new, not something from before the block.
_FRESH_INPUT = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


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


class StorageTracker(Block):
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
        self._existing = list(tensors_of(existing))

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


def mark(name: str) -> None:
    """Tell the open trackers of storages that a new stretch of work begins."""
    for tracker in StorageTracker._open_trackers:
        tracker.mark(name)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of ``existing``: parameters, buffers, tensors and their gradients."""
    if isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from tensors_of(tensor)
    elif isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
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
