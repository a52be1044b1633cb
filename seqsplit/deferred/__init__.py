"""Deferred values (logits): what is made of them is recorded, and computed chunk by chunk."""

from .evaluation import defer_logits
from .head import defer
from .tensor import DeferredTensor

__all__ = ["DeferredTensor", "defer", "defer_logits"]
