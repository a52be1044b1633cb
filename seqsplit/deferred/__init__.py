"""Deferred values (logits): what is made of them is recorded, and computed chunk by chunk."""

from .head import defer
from .tensor import DeferredTensor

__all__ = ["DeferredTensor", "defer"]
