"""How many bytes of tensors a piece of code keeps alive."""

from seqsplit.memory.log import Event, MemoryLog
from seqsplit.memory.tracking import AllocatorTracker, StorageTracker, track_memory

__all__ = ["AllocatorTracker", "Event", "MemoryLog", "StorageTracker", "track_memory"]
