"""Scans: cumulative ops, and what computes the rows of a chunk from the state before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import scan

__all__ = ["SCANS", "recurrence_of"]

aten = torch.ops.aten

SCANS: dict[Any, Callable] = {
    aten.cumprod.default: scan.cumprod_rows,
    aten.cumsum.default: scan.cumsum_rows,
    aten.logcumsumexp.default: scan.logcumsumexp_rows,
}


def recurrence_of(target: Any) -> Any:
    """The :class:`~.recurrent.Recurrence` that a node's target calls, if it calls one."""
    return getattr(target, "recurs", None)
