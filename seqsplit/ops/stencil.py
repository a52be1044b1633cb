"""Ops whose row depends on a few rows before it: the shift and the causal convolution.

Each exists twice: for the whole sequence, as the graph says it, and for the rows of one chunk,
given the window of the sequence that they see. What stands before the beginning of the sequence is
a number, or a tensor of as many rows as are seen there (a state, a projection of zeros).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["causal_conv1d", "causal_conv1d_rows", "shift", "shift_rows"]


def shift(x: Tensor, dim: int, by: int, before: Tensor | float = 0.0) -> Tensor:
    """``out[t] = x[t - by]`` along ``dim``, and of ``before`` where that lies before the beginning.

    Args:
        before: a number, or a tensor of ``by`` rows.
    """
    length = x.shape[dim]
    return _preceded(x.narrow(dim, 0, max(length - by, 0)), dim, 0, min(by, length), before)


def shift_rows(
    window: Tensor,
    dim: int,
    by: int,
    before: Tensor | float,
    start: int,
    first: int,
    end: int,
) -> Tensor:
    """Rows ``[start, end)`` of :func:`shift`.

    Args:
        window: rows ``[first, end)`` of the input, ``first`` being at most ``by`` before
            ``start``.
    """
    missing = min(max(by - start, 0), end - start)
    begin = max(start - by, 0) - first
    rows = window.narrow(dim, begin, end - start - missing)
    return _preceded(rows, dim, start, missing, before)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dilation: int = 1,
    groups: int = 1,
    before: Tensor | float = 0.0,
) -> Tensor:
    """A convolution over ``[B, C, T]`` that sees a position and those before it.

    Args:
        weight: ``[C_out, C // groups, kernel]``.
        before: a number, or ``[B, C, (kernel - 1) * dilation]``.
    """
    x = _preceded(x, 2, 0, (weight.shape[-1] - 1) * dilation, before)
    return F.conv1d(x, weight, bias, dilation=dilation, groups=groups)


def causal_conv1d_rows(
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dilation: int,
    groups: int,
    before: Tensor | float,
    start: int,
    first: int,
) -> Tensor:
    """Rows ``[start, end)`` of :func:`causal_conv1d` from a window ``[first, end)``."""
    missing = (weight.shape[-1] - 1) * dilation - (start - first)
    window = _preceded(window, 2, start, missing, before)
    return F.conv1d(window, weight, bias, dilation=dilation, groups=groups)


def _preceded(x: Tensor, dim: int, at: int, rows: int, before: Tensor | float) -> Tensor:
    """``x`` after ``rows`` rows of ``before``, from its row ``at`` on."""
    if rows == 0:
        return x
    if isinstance(before, Tensor):
        return torch.cat([before.narrow(dim, at, rows), x], dim)
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [rows, 0], value=before)
