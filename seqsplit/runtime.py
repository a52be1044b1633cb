"""The runtime: executes a segment chunk by chunk. It decides nothing.

A segment is one node of the autograd graph. Its forward loops over chunks without recording and
keeps only the segment's operands. Its backward fills the caches once, then visits the chunks from
the last to the first: it records one chunk, differentiates it, adds what belongs to the weights,
and forgets it. A segment that ends in one number (the head with its loss) takes its gradients in
the forward instead, so that logits are computed once; the backward only scales them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .autocast import Autocast
from .errors import DoubleBackwardError, format_message
from .placement import Kind, Placement, Span
from .plan import BodyInput, BodyOutput, Segment
from .primitives import Cache, Carry, Replay, keys_start

__all__ = ["chunk_bounds", "own_saved_tensors", "run_segment"]


def run_segment(
    segment: Segment,
    length: int,
    sizes: Sequence[int],
    operands: Sequence[Tensor],
    bounds: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """Run a segment, differentiably.

    Args:
        segment: what to run.
        length: of the sequence.
        sizes: the values of the body's sizes.
        operands: the segment's tensors, whole.
        bounds: where chunks begin and end, ``[0, ..., length]``; by the segment's options if
            ``None``.

    Returns:
        The segment's values, whole.
    """
    if bounds is None:
        bounds = chunk_bounds(length, segment.chunk_rows(length))
    run = _Run(segment, length, tuple(sizes), tuple(bounds), Replay(), Autocast.current())
    return _SegmentFunction.apply(run, *operands)


def chunk_bounds(length: int, rows: int) -> list[int]:
    """``[0, rows, 2 * rows, ..., length]``; one empty chunk for an empty sequence."""
    return [*range(0, max(length, 1), rows), length]


@dataclass
class _Run:
    """One execution of a segment, forward and backward."""

    segment: Segment
    length: int
    sizes: tuple[int, ...]
    bounds: tuple[int, ...]
    replay: Replay
    autocast: Autocast

    @property
    def chunks(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds, self.bounds[1:]))

    @property
    def takes_gradients_forward(self) -> bool:
        body = self.segment.body
        differentiable = [output for output in body.outputs if output.needs_grad]
        return (
            body.is_head
            and not body.caches
            and len(differentiable) == 1
            and differentiable[0].scalar
        )

    def new_caches(self) -> list[Cache | Carry]:
        dtype = self.segment.options.accumulate_dtype
        return [
            Carry(dtype) if spec.carries else Cache(spec.dim, self.length, dtype)
            for spec in self.segment.body.caches
        ]

    def call(
        self,
        index: int,
        inputs: Sequence[Tensor],
        caches: Sequence[Cache | Carry],
        *,
        fill: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run the body (or the part of it that fills the caches) on one chunk."""
        body = self.segment.body
        start, end = self.chunks[index]
        self.replay.chunk = index
        module = body.fill if fill else body.module
        # A deferred value that is looked at runs bodies where torch functions of other classes (a
        # quantised weight's) are switched off.
        with torch._C._EnableTorchFunction():
            return module(start, end, self.length, *self.sizes, *inputs, *caches, self.replay)

    def inputs(self, index: int, operands: Sequence[Tensor]) -> list[Tensor]:
        """The parts of the operands that one chunk takes: views."""
        start, end = self.chunks[index]
        return [
            take_part(
                operands[spec.operand], spec.placement, start, end, self.length + spec.surplus
            )
            for spec in self.segment.body.inputs
        ]


class _SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        specs = run.segment.body.outputs
        wanted = ctx.needs_input_grad[1:]
        ctx.scales = run.takes_gradients_forward and any(wanted)
        if ctx.scales:
            outputs, grads = _forward_with_gradients(run, operands, wanted)
            ctx.present = [grad is not None for grad in grads]
            ctx.save_for_backward(*(grad for grad in grads if grad is not None))
        else:
            outputs = _forward(run, operands)
            ctx.save_for_backward(*operands)
        ctx.weights = [(o, o._version) for o in _weights(run, operands) if o.requires_grad]
        plain = [out for out, spec in zip(outputs, specs) if not spec.needs_grad]
        ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        _check_versions(ctx)
        with torch.no_grad():
            if ctx.scales:
                grads = _scale(ctx, cotangents)
            else:
                operands, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
                grads = _backward(ctx.run, operands, wanted, cotangents)
        if torch.is_grad_enabled():
            grads = _refuse_second_derivatives(ctx, grads)
        return (None, *grads)


def _forward(run: _Run, operands: Sequence[Tensor]) -> list[Tensor]:
    gathered = _Outputs(run)
    caches = run.new_caches()
    for index in range(len(run.chunks)):
        gathered.add(index, run.call(index, run.inputs(index, operands), caches))
    return gathered.whole()


def _forward_with_gradients(
    run: _Run, operands: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor | None]]:
    gathered, accumulated = _Outputs(run), _Gradients(run, operands, wanted)
    for index in range(len(run.chunks)):
        with torch.enable_grad(), own_saved_tensors():
            leaves = accumulated.leaves(index)
            outputs = run.call(index, leaves, ())
        gathered.add(index, [output.detach() for output in outputs])
        cotangents = [
            torch.ones_like(out) if spec.needs_grad else None
            for out, spec in zip(outputs, run.segment.body.outputs)
        ]
        accumulated.add(index, leaves, outputs, cotangents)
    return gathered.whole(), accumulated.whole()


def _backward(
    run: _Run,
    operands: Sequence[Tensor],
    wanted: Sequence[bool],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    accumulated = _Gradients(run, operands, wanted)
    caches = run.new_caches()
    run.replay.recording = False
    with run.replay.restoring(), run.autocast.restored():
        if caches:  # the last chunk fills its own rows when it is visited, first of all
            for index in range(len(run.chunks) - 1):
                run.call(index, run.inputs(index, operands), caches, fill=True)
        for index in reversed(range(len(run.chunks))):
            with torch.enable_grad(), own_saved_tensors():
                leaves = accumulated.leaves(index)
                outputs = run.call(index, leaves, caches)
            start, end = run.chunks[index]
            parts = [
                None
                if whole is None
                else take_part(whole, spec.placement, start, end, run.length + spec.surplus)
                for whole, spec in zip(cotangents, run.segment.body.outputs)
            ]
            accumulated.add(index, leaves, outputs, parts)
            del leaves, outputs, parts
    return accumulated.whole()


def own_saved_tensors() -> contextlib.AbstractContextManager:
    """A context in which hooks on saved tensors (offloading, say) do not see what is saved: a
    chunk's graph is differentiated at once, and fake tensors are nothing to hand out."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _scale(ctx: Any, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    specs = ctx.run.segment.body.outputs
    (cotangent,) = (c for c, spec in zip(cotangents, specs) if spec.needs_grad)
    saved = iter(ctx.saved_tensors)
    grads = [next(saved) if present else None for present in ctx.present]
    if cotangent is None:
        return [None] * len(grads)
    return [grad if grad is None else grad * cotangent.to(grad.dtype) for grad in grads]


class _Outputs:
    """Gathers the chunks' outputs: rows side by side, shares added up."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._whole: list[Tensor | None] = [None] * len(run.segment.body.outputs)
        self._dtypes: list[torch.dtype | None] = [None] * len(self._whole)

    def add(self, index: int, outputs: Sequence[Tensor]) -> None:
        for slot, (spec, out) in enumerate(zip(self._run.segment.body.outputs, outputs)):
            if spec.placement.partial:
                self._add_share(slot, out)
            else:
                self._put_rows(slot, spec, index, out)

    def _add_share(self, slot: int, share: Tensor) -> None:
        if self._whole[slot] is None:
            self._dtypes[slot] = share.dtype
            wide = share.dtype
            if share.is_floating_point() or share.is_complex():
                wide = torch.promote_types(wide, self._run.segment.options.accumulate_dtype)
            self._whole[slot] = share.to(wide, copy=True)
        else:
            self._whole[slot] += share

    def _put_rows(self, slot: int, spec: BodyOutput, index: int, out: Tensor) -> None:
        if len(self._run.chunks) == 1:
            # A body may hand back what it was given; an autograd function may not.
            self._whole[slot] = out.clone() if out._is_view() else out
            return
        start, end = self._run.chunks[index]
        length = self._run.length + spec.surplus
        if self._whole[slot] is None:
            shape, dim = list(out.shape), spec.placement.rows_dim
            shape[dim] = shape[dim] // max(min(end, length) - start, 1) * length
            self._whole[slot] = out.new_empty(shape)
        part = part_view(self._whole[slot], spec.placement, start, end, length)
        part.copy_(out.view(part.shape))

    def whole(self) -> list[Tensor]:
        return [
            whole if dtype is None else whole.to(dtype)
            for whole, dtype in zip(self._whole, self._dtypes)
        ]


class _Gradients:
    """Adds up the gradients of a segment's operands over its chunks.

    Rows of the chunk itself are written once and keep the operand's dtype; everything that
    several chunks add to is kept in a wider one, so that the error does not grow with their
    number.
    """

    def __init__(self, run: _Run, operands: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self._run = run
        self._operands = operands
        self._wanted = list(wanted)
        self._sums: list[Tensor | None] = [None] * len(operands)
        self._shared: dict[int, Tensor] = {}
        self._uses = [0] * len(operands)
        for spec in run.segment.body.inputs:
            self._uses[spec.operand] += 1

    def leaves(self, index: int) -> list[Tensor]:
        """The chunk's inputs, those that need a gradient as leaves of a graph of their own."""
        leaves = []
        for spec, part in zip(
            self._run.segment.body.inputs, self._run.inputs(index, self._operands)
        ):
            if not self._wanted[spec.operand]:
                leaves.append(part.detach())
            elif spec.placement.spans:
                leaves.append(part.detach().requires_grad_())
            else:  # one alias of a weight for all chunks, so that autocast casts it once
                if spec.operand not in self._shared:
                    self._shared[spec.operand] = part.detach().requires_grad_()
                leaves.append(self._shared[spec.operand])
        return leaves

    def add(
        self,
        index: int,
        leaves: Sequence[Tensor],
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
    ) -> None:
        """Differentiate one chunk and add what it gives."""
        roots = [
            (out, cotangent)
            for out, cotangent in zip(outputs, cotangents)
            if cotangent is not None and out.requires_grad
        ]
        slots = [slot for slot, leaf in enumerate(leaves) if leaf.requires_grad]
        if not roots or not slots:
            return
        grads = torch.autograd.grad(
            [out for out, _ in roots],
            [leaves[slot] for slot in slots],
            [cotangent for _, cotangent in roots],
            allow_unused=True,
        )
        start, end = self._run.chunks[index]
        for slot, grad in zip(slots, grads):
            if grad is not None:
                spec = self._run.segment.body.inputs[slot]
                self._add_one(spec, grad, start, end)

    def _add_one(self, spec: BodyInput, grad: Tensor, start: int, end: int) -> None:
        operand, placement = spec.operand, spec.placement
        like, total = self._operands[operand], self._sums[operand]
        once = placement.has_rows and self._uses[operand] == 1
        if total is None:
            dtype = like.dtype
            if not once:
                dtype = torch.promote_types(dtype, self._run.segment.options.accumulate_dtype)
            if not placement.spans:
                self._sums[operand] = grad.to(dtype, copy=len(self._run.chunks) > 1)
                return
            total = self._sums[operand] = torch.zeros_like(like, dtype=dtype)
        part = part_view(total, placement, start, end, self._run.length + spec.surplus)
        if once:
            part.copy_(grad.reshape(part.shape))
        else:
            part.add_(grad.reshape(part.shape))

    def whole(self) -> list[Tensor | None]:
        return [
            None if total is None else total.to(like.dtype)
            for total, like in zip(self._sums, self._operands)
        ]


def take_part(
    value: Tensor, placement: Placement, start: int, end: int, length: int | None = None
) -> Tensor:
    """The part of a whole value that a chunk ``[start, end)`` holds under a placement.

    Args:
        length: of the sequence in this value, needed only where it sits inside a merged dim.

    Returns:
        A view, but for merged dims, whose factors a view cannot join again.
    """
    part = part_view(value, placement, start, end, length)
    for dim, span in placement.spans:
        if span.merged:
            part = part.flatten(dim, dim + len(_factors(span, -1)) - 1)
    return part


def part_view(
    value: Tensor, placement: Placement, start: int, end: int, length: int | None = None
) -> Tensor:
    """The same, with merged dims (one more dim each) left apart."""
    for dim, span in reversed(placement.spans):
        if span.merged:
            value = value.unflatten(dim, _factors(span, length))
            dim += int(span.outer != 1)
        first, last = min(_first(span, start), value.shape[dim]), min(end, value.shape[dim])
        value = value.narrow(dim, first, last - first)
    return value


def _factors(span: Span, length: int) -> tuple[int, ...]:
    """The sizes that a merged dim is made of, one of them left open."""
    if span.outer == 1:
        return (length, -1)
    return (-1, length) if span.inner == 1 else (-1, length, int(span.inner))


def _first(span: Span, start: int) -> int:
    return start if span.kind is Kind.ROWS else keys_start(start, span.window)


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


def _refuse_second_derivatives(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    present = [grad for grad in grads if grad is not None]
    weights = [weight for weight, _ in ctx.weights]
    hook = torch.zeros((), requires_grad=True)
    scope = ctx.run.segment.scope
    refusing = iter(_Refuse.apply(scope, len(present), *present, hook, *weights))
    return [None if grad is None else next(refusing) for grad in grads]


def _weights(run: _Run, operands: Sequence[Tensor]) -> list[Tensor]:
    """The operands that every chunk takes whole."""
    used = {spec.operand for spec in run.segment.body.inputs if not spec.placement.spans}
    return [operand for index, operand in enumerate(operands) if index in used]


def _check_versions(ctx: Any) -> None:
    """Refuse, as eager does, to differentiate with weights that are not those of the forward."""
    for weight, version in ctx.weights:
        if weight._version != version:
            raise RuntimeError(
                format_message(
                    "one of the variables needed for gradient computation has been modified by "
                    "an inplace operation",
                    at=ctx.run.segment.scope,
                    got=f"a weight of shape {list(weight.shape)} at version {weight._version}, "
                    f"expected version {version}",
                    fix="step the optimizer after the backward",
                )
            )
