"""Gradients of a segment's operands, added up over its chunks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from seqsplit.ir.plan import Body, BodyInput
from seqsplit.ops.weights import WeightGradient
from seqsplit.runtime.slicing import part_view

__all__ = ["Gradients"]


class Gradients:
    """Adds up the gradients of operands.

    Rows of the chunk itself are written once and keep the operand's dtype; everything that
    several chunks add to is kept in a wider one, so that the error does not grow with their
    number.

    Args:
        body: what is differentiated.
        length: of the sequence.
        num_chunks: how many chunks there will be.
        operands: the segment's.
        wanted: which of them need a gradient.
        accumulate_dtype: the least precise dtype in which gradients are added up.
        own: numbers of operands that may be overwritten: a chunk's rows of the gradient take the
            place of its rows of the operand, which no other chunk needs.
    """

    def __init__(
        self,
        body: Body,
        length: int,
        num_chunks: int,
        operands: Sequence[Tensor],
        wanted: Sequence[bool],
        accumulate_dtype: torch.dtype,
        own: Collection[int] = (),
    ) -> None:
        self._body, self._length, self._num_chunks = body, length, num_chunks
        self._operands, self._wanted = operands, list(wanted)
        self._accumulate_dtype = accumulate_dtype
        self._own = set(own)
        self._rows: dict[int, Tensor] = {}
        self._weights: dict[int, WeightGradient] = {}
        self._shared: dict[int, Tensor] = {}
        self._uses = [0] * len(operands)
        for spec in body.inputs:
            self._uses[spec.operand] += 1

    def leaves(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """A chunk's inputs, those that need a gradient as leaves of a graph of their own."""
        leaves = []
        for spec, part in zip(self._body.inputs, parts):
            if not self._wanted[spec.operand]:
                leaves.append(part.detach())
            elif spec.placement.spans:
                leaves.append(part.detach().requires_grad_())
            else:
                leaves.append(self._shared_leaf(spec.operand, part))
        return leaves

    def _shared_leaf(self, operand: int, weight: Tensor) -> Tensor:
        """One alias of a weight for all chunks, so that autocast casts it once."""
        if operand not in self._shared:
            leaf = weight.detach().requires_grad_()
            wide = torch.promote_types(weight.dtype, self._accumulate_dtype)
            self._weights[operand] = leaf.seqsplit_gradient = WeightGradient(weight, wide)
            self._shared[operand] = leaf
        return self._shared[operand]

    def add(
        self,
        start: int,
        end: int,
        leaves: Sequence[Tensor],
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
    ) -> None:
        """Differentiate chunk ``[start, end)`` and add what it gives."""
        roots = [
            (out, cotangent)
            for out, cotangent in zip(outputs, cotangents)
            if cotangent is not None and out.requires_grad
        ]
        slots = [slot for slot, leaf in enumerate(leaves) if leaf.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(slots)
        if roots and slots:
            grads = torch.autograd.grad(
                [out for out, _ in roots],
                [leaves[slot] for slot in slots],
                [cotangent for _, cotangent in roots],
                allow_unused=True,
            )
        for slot, grad in zip(slots, grads):
            self._add_one(self._body.inputs[slot], grad, start, end)

    def _add_one(self, spec: BodyInput, grad: Tensor | None, start: int, end: int) -> None:
        operand, placement = spec.operand, spec.placement
        if not placement.spans:
            if grad is not None:
                self._weights[operand].add(grad, last=self._num_chunks == 1)
            return
        once = placement.has_rows and self._uses[operand] == 1
        if grad is None and operand not in self._rows:
            return
        if operand not in self._rows:
            self._rows[operand] = self._new_rows(spec, once, end)
        length = self._length + spec.surplus
        part = part_view(self._rows[operand], placement, start, end, length)
        if grad is None:
            if once:
                part.zero_()
        elif once:
            part.copy_(grad.reshape(part.shape))
        else:
            part.add_(grad.reshape(part.shape))

    def _new_rows(self, spec: BodyInput, once: bool, end: int) -> Tensor:
        """The gradient of an operand with rows, zero from ``end`` on."""
        like = self._operands[spec.operand]
        if not once:
            dtype = torch.promote_types(like.dtype, self._accumulate_dtype)
            return torch.zeros_like(like, dtype=dtype)
        if spec.operand not in self._own:
            return torch.zeros_like(like)
        length = self._length + spec.surplus
        part_view(like, spec.placement, end, length, length).zero_()
        return like

    def take(self) -> list[Tensor | None]:
        """The gradients of the operands, in their order and dtypes, which are then the caller's."""
        grads = []
        for operand, like in enumerate(self._operands):
            grad = self._rows.pop(operand, None)
            if operand in self._weights:
                share = self._weights[operand].take()
                if share is not None:
                    grad = share if grad is None else grad.add_(share)
            grads.append(None if grad is None else grad.to(like.dtype))
        self._shared.clear()
        return grads
