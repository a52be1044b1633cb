"""Scans: cumulative ops, and what computes the rows of a chunk from the state before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from seqsplit.ops import linear_attention, linear_scan, scan

__all__ = ["SCANS", "final_state_of", "recurrence_of", "scanned_dim"]

aten = torch.ops.aten

SCANS: dict[Any, Callable] = {
    aten.cumprod.default: scan.cumprod_rows,
    aten.cumsum.default: scan.cumsum_rows,
    aten.logcumsumexp.default: scan.logcumsumexp_rows,
    linear_attention.linear_attention: linear_attention.linear_attention_rows,
    linear_scan.linear_scan: linear_scan.linear_scan_rows,
}


def recurrence_of(target: Any) -> Any:
    """The :class:`~.recurrent.Recurrence` whose output a node gives, if it gives one."""
    return None if getattr(target, "gives", 0) else getattr(target, "recurs", None)


def final_state_of(target: Any) -> Any:
    """The :class:`~.recurrent.Recurrence` whose final state a node gives, if it gives one."""
    return getattr(target, "recurs", None) if getattr(target, "gives", 0) else None


def scanned_dim(node: fx.Node) -> int:
    """The dim along which a scan runs."""
    if node.target is linear_attention.linear_attention:
        return 1
    dim = node.args[2] if node.target is linear_scan.linear_scan else node.args[1]
    return dim % node.meta["val"].ndim
