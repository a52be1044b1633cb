"""A mixture of experts: each token goes through the two gated MLPs that its router prefers.

torch's own grouped product takes bfloat16 only, so there is one here, for any dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

CHOSEN = 2


class Mixture(nn.Module):
    """Tokens ``[..., d]`` sorted by expert and multiplied in groups, none of them dropped.

    Args:
        d: width of a token.
        ff: width of each expert's gated MLP.
        experts: how many there are.
    """

    def __init__(self, d: int, ff: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(d, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, d, ff))
        self.up = nn.Parameter(torch.empty(experts, d, ff))
        self.down = nn.Parameter(torch.empty(experts, ff, d))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weight, chosen = self.router(tokens).softmax(-1).topk(CHOSEN, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        ends = F.one_hot(chosen.flatten(), self.experts).sum(0).cumsum(0)
        token = order // CHOSEN
        rows = tokens[token]
        hidden = F.silu(grouped_mm(rows, self.gate, ends)) * grouped_mm(rows, self.up, ends)
        shares = grouped_mm(hidden, self.down, ends) * weight.flatten()[order][:, None]
        return torch.zeros_like(tokens).index_add(0, token, shares).view_as(x)


@torch.library.custom_op("benchmarks::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``rows[i] @ weights[g]`` with ``g`` the group that row ``i`` lies in.

    Args:
        rows: ``[n, d]``, group by group.
        weights: ``[groups, d, width]``.
        ends: int64 ``[groups]``, where each group of rows ends.

    Returns:
        ``[n, width]``.
    """
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for group, first, last in _groups(ends):
        torch.mm(rows[first:last], weights[group], out=out[first:last])
    return out


@torch.library.custom_op("benchmarks::grouped_mm_backward", mutates_args=())
def grouped_mm_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``rows`` and of ``weights``, given that of the result ``[n, width]``."""
    d_rows, d_weights = torch.empty_like(rows), torch.zeros_like(weights)
    for group, first, last in _groups(ends):
        torch.mm(grad[first:last], weights[group].T, out=d_rows[first:last])
        torch.mm(rows[first:last].T, grad[first:last], out=d_weights[group])
    return d_rows, d_weights


def _groups(ends: Tensor) -> list[tuple[int, int, int]]:
    """Number, first row and end of each group that has rows."""
    bounds = [0, *ends.tolist()]
    groups = enumerate(zip(bounds, bounds[1:], strict=False))
    return [(group, first, last) for group, (first, last) in groups if last > first]


@grouped_mm.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@grouped_mm_backward.register_fake
def _(grad: Tensor, rows: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *grouped_mm_backward(grad.contiguous(), *ctx.saved_tensors), None


grouped_mm.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.benchmarks.grouped_mm)
def _flops(rows: torch.Size, weights: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weights[1] * weights[2]


@register_flop_formula(torch.ops.benchmarks.grouped_mm_backward)
def _backward_flops(
    grad: torch.Size, rows: torch.Size, weights: torch.Size, *_: Any, **__: Any
) -> int:
    return 2 * _flops(rows, weights)
