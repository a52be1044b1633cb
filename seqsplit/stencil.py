"""Ops whose row depends on a few rows before it: the shift and the causal convolution.

Each exists twice: for the whole sequence, as the graph says it, and for the rows of one chunk,
given the window of the sequence that they see.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["causal_conv1d", "causal_conv1d_rows", "shift", "shift_rows"]


def shift(x: Tensor, dim: int, by: int, value: float = 0.0) -> Tensor:
    """``out[t] = x[t - by]`` along ``dim``, and ``value`` where that lies before the beginning."""
    return _padded(x.narrow(dim, 0, max(x.shape[dim] - by, 0)), dim, min(by, x.shape[dim]), value)


def shift_rows(
    window: Tensor, dim: int, by: int, value: float, start: int, first: int, end: int
) -> Tensor:
    """Rows ``[start, end)`` of :func:`shift`.

    Args:
        window: rows ``[first, end)`` of the input, ``first`` being at most ``by`` before
            ``start``.
    """
    missing = min(max(by - start, 0), end - start)
    begin = max(start - by, 0) - first
    return _padded(window.narrow(dim, begin, end - start - missing), dim, missing, value)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int = 1, groups: int = 1
) -> Tensor:
    """A convolution over ``[B, C, T]`` that sees a position and those before it.

    Args:
        weight: ``[C_out, C // groups, kernel]``.
    """
    x = _padded(x, 2, (weight.shape[-1] - 1) * dilation, 0.0)
    return F.conv1d(x, weight, bias, dilation=dilation, groups=groups)


def causal_conv1d_rows(
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dilation: int,
    groups: int,
    start: int,
    first: int,
) -> Tensor:
    """Rows ``[start, end)`` of :func:`causal_conv1d` from a window ``[first, end)``."""
    reach = (weight.shape[-1] - 1) * dilation
    window = _padded(window, 2, reach - (start - first), 0.0)
    return F.conv1d(window, weight, bias, dilation=dilation, groups=groups)


def _padded(x: Tensor, dim: int, rows: int, value: float) -> Tensor:
    if rows == 0:
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [rows, 0], value=value)
