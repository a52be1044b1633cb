"""Gradients of weights, added up over chunks where they are made.

Autograd would give a chunk's share of a weight's gradient as a tensor of its own, as large as the
weight, to be added to the sum. A linear map adds its share into the sum at once, as the product
that it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqsplit.ops.autocast import is_autocast_on

__all__ = ["UNREAD", "WeightGradient", "linear", "product", "with_values"]

_BLOCK_ELEMENTS = 2**22


class WeightGradient:
    """The sum over chunks of the gradient of a tensor that every chunk takes whole.

    Args:
        like: the tensor.
        dtype: of the sum, the tensor's own or a wider one, so that the error does not grow with
            the number of chunks.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._sum: Tensor | None = None
        self._cast = like

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """The tensor in the dtype of a product, under autocast: cast once for all chunks."""
        if self._cast.dtype != dtype:
            self._cast = self._like.to(dtype)
        return self._cast

    def add(self, share: Tensor, *, last: bool = False) -> None:
        """Add a share; ``last`` if nothing will be added to it."""
        if self._sum is None:
            self._sum = share.to(self._dtype, copy=not last)
        else:
            self._sum.add_(share)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``, ``[n, p]`` and ``[n, q]``."""
        if left.dtype == right.dtype == self._dtype:
            if self._sum is None:
                self._sum = left.t() @ right
            else:
                self._sum.addmm_(left.t(), right)
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=self._dtype)
        # No product accumulates into a wider dtype everywhere: a few rows at a time.
        rows = max(1, _BLOCK_ELEMENTS // max(right.shape[1], 1))
        for first in range(0, left.shape[1], rows):
            self._sum[first : first + rows].add_(left[:, first : first + rows].t() @ right)

    def take(self) -> Tensor | None:
        """The sum, in the tensor's own dtype, and forget it."""
        total, self._sum = self._sum, None
        return None if total is None else total.to(self._like.dtype)


class _Product(torch.autograd.Function):
    """``x @ weight + bias`` in the dtype of ``x``; the weight is cast to it. Of a ``turned`` one,
    ``x @ weight.T + bias``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        turned: bool,
        gradient: WeightGradient | None,
        unread: bool,
    ) -> Tensor:
        weight = weight.to(x.dtype) if gradient is None else gradient.weight_in(x.dtype)
        weight = weight if turned else weight.t()
        ctx.save_for_backward(None if gradient is None else x, weight)
        ctx.gradient, ctx.turned = gradient, turned
        if unread:
            return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.gradient is not None:
            pair = rows, x.reshape(-1, x.shape[-1])
            ctx.gradient.add_product(*(pair if ctx.turned else reversed(pair)))
        for_x = grad @ weight if ctx.needs_input_grad[0] else None
        for_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return for_x, None, for_bias, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; the weight's gradient goes to ``weight.seqsplit_gradient`` if there
    is one."""
    return _product(x, weight, bias, turned=True)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight + bias``, likewise."""
    return _product(x, weight, bias, turned=False)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool, unread: bool = False
) -> Tensor:
    gradient = getattr(weight, "seqsplit_gradient", None)
    plain = type(weight) in (Tensor, torch.nn.Parameter)  # other classes do their products
    ours = gradient is not None or (unread and not weight.requires_grad)
    if plain and ours and is_autocast_on(x.device):
        # ... which leaves float64 as it is.
        if ours := torch.float64 not in (x.dtype, weight.dtype):
            x = x.to(torch.get_autocast_dtype(x.device.type))
    elif x.dtype != weight.dtype:  # PyTorch says what is wrong with it
        ours = False
    if plain and ours:
        return _Product.apply(x, weight, bias, turned, gradient, unread)
    return F.linear(x, weight if turned else weight.t(), bias)


def unread_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same as :func:`linear` where only gradients are wanted: its value may be left open, that
    is, zeros."""
    return _product(x, weight, bias, turned=True, unread=True)


def unread_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same for :func:`product`."""
    return _product(x, weight, bias, turned=False, unread=True)


UNREAD = {linear: unread_linear, product: unread_product}


class _WithValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """``x`` after ``x.data.copy_(values)``: other values, and the gradient goes where it went."""
    return _WithValues.apply(x, values)
