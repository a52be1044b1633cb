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

from typing import Any

from seqsplit.memory.allocator import AllocatorTracker
from seqsplit.memory.log import Event, MemoryLog
from seqsplit.memory.storages import StorageTracker, tensors_of

__all__ = ["AllocatorTracker", "Event", "MemoryLog", "StorageTracker", "track_memory"]


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
    if list(tensors_of(existing)):
        raise ValueError(
            "existing= cannot be combined with allocator=True: the allocator's records do not "
            "say how large a block from before was; leave one of the two out"
        )
    return AllocatorTracker(device)
