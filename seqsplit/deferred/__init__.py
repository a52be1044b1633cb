"""Deferred values (logits): what is made of them is recorded, and computed chunk by chunk."""

from seqsplit.deferred.evaluation import defer_logits
from seqsplit.deferred.head import defer
from seqsplit.deferred.tensor import DeferredTensor

__all__ = ["DeferredTensor", "defer", "defer_logits"]
