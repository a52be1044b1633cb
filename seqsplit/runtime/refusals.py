"""What a segment's backward refuses, as eager would or because it cannot be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqsplit.errors import DoubleBackwardError, format_message

__all__ = ["check_versions", "refuse_second_derivatives"]

Versions = Sequence[tuple[Tensor, int]]


def check_versions(weights: Versions, scope: str) -> None:
    """Refuse, as eager does, to differentiate with weights that are not those of the forward."""
    for weight, version in weights:
        if weight._version != version:
            raise RuntimeError(
                format_message(
                    "one of the variables needed for gradient computation has been modified by "
                    "an inplace operation",
                    at=scope,
                    got=f"a weight of shape {list(weight.shape)} at version {weight._version}, "
                    f"expected version {version}",
                    fix="step the optimizer after the backward",
                )
            )


def refuse_second_derivatives(
    grads: Sequence[Tensor | None], weights: Versions, scope: str
) -> list[Tensor | None]:
    """The same gradients, which raise :class:`DoubleBackwardError` when differentiated again."""
    present = [grad for grad in grads if grad is not None]
    hook = torch.zeros((), requires_grad=True)
    on = [weight for weight, _ in weights]
    refusing = iter(_Refuse.apply(scope, len(present), *present, hook, *on))
    return [None if grad is None else next(refusing) for grad in grads]


class _Refuse(torch.autograd.Function):
    """An identity whose own derivative is an error."""

    @staticmethod
    def forward(ctx: Any, scope: str, num_grads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.scope = scope
        return tuple(grad.view_as(grad) for grad in tensors[:num_grads])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise DoubleBackwardError(
            format_message(
                "gradients of gradients do not go through a streamed segment",
                at=ctx.scope,
                why="its backward is a loop over chunks that keeps nothing to differentiate again",
                fix="run this step inside `with seqsplit.disable():`",
            )
        )
