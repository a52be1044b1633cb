"""The runtime: executes a segment chunk by chunk. It decides nothing.

A segment is one node of the autograd graph. Its forward loops over chunks without recording and
keeps only the segment's operands. Its backward fills the caches once, then visits the chunks from
the last to the first: it records one chunk, differentiates it, adds what belongs to the weights,
and forgets it. A segment that ends in one number (the head with its loss) takes its gradients in
the forward instead, so that logits are computed once; the backward only scales them.

Under some schedules a segment does not keep its operands itself but asks for them (chain.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqsplit.ir.plan import Segment
from seqsplit.memory.storages import mark
from seqsplit.ops.held import may_release
from seqsplit.ops.replay import Replay
from seqsplit.runtime.checkpoints import Link
from seqsplit.runtime.chunk_loop import ChunkLoop
from seqsplit.runtime.refusals import check_versions, refuse_second_derivatives
from seqsplit.runtime.segment_run import SegmentRun, chunk_bounds

__all__ = ["run_segment"]


def run_segment(
    segment: Segment,
    length: int,
    sizes: Sequence[int],
    operands: Sequence[Tensor],
    bounds: Sequence[int] | None = None,
    link: Link | None = None,
    new_loop: Callable[[SegmentRun], ChunkLoop] = ChunkLoop,
) -> tuple[Tensor, ...]:
    """Run a segment, differentiably.

    Args:
        segment: what to run.
        length: of the sequence.
        sizes: the values of the body's sizes.
        operands: the segment's tensors, whole.
        bounds: where chunks begin and end, ``[0, ..., length]``; by the segment's options if
            ``None``.
        link: its place in the chain that keeps its operands, ``None`` if it keeps them itself.
        new_loop: makes what goes through the chunks.

    Returns:
        The segment's values, whole.
    """
    if bounds is None:
        device = operands[0].device.type if operands else "cpu"
        bounds = chunk_bounds(length, segment.chunk_rows(length, device))
    replay = Replay(keeps_results=segment.options.schedule.keep_attention)
    run = SegmentRun(segment, length, tuple(sizes), tuple(bounds), replay)
    return _SegmentFunction.apply(new_loop(run), link, *operands)


class _SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loop: ChunkLoop, link: Link | None, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        run = loop.run
        ctx.set_materialize_grads(False)
        mark(f"forward {run.segment.scope}")
        specs = run.segment.body.outputs
        wanted = ctx.needs_input_grad[2:]
        ctx.loop, ctx.link = loop, link if any(wanted) else None
        ctx.scales = any(wanted) and _takes_gradients_forward(run, operands)
        if ctx.scales:
            outputs, grads = loop.forward_with_gradients(operands, wanted)
            ctx.present = [grad is not None for grad in grads]
            ctx.save_for_backward(*(grad for grad in grads if grad is not None))
            if ctx.link is not None:
                ctx.link.pass_by(outputs)
        else:
            caches = run.new_caches()
            outputs = loop.forward(operands, caches)
            if run.segment.options.schedule.keep_keys and any(wanted):
                run.keep_states(caches)
            own = operands
            if ctx.link is not None:
                own = ctx.link.keep(loop, operands, outputs)
            ctx.save_for_backward(*own)
        ctx.weights = [(o, o._version) for o in _weights(run, operands) if o.requires_grad]
        plain = [out for out, spec in zip(outputs, specs) if not spec.needs_grad]
        ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        scope = ctx.loop.run.segment.scope
        mark(f"backward {scope}")
        check_versions(ctx.weights, scope)
        with torch.no_grad():
            if ctx.scales:
                grads = _scale(ctx, cotangents)
            else:
                operands, own = ctx.saved_tensors, set()
                if ctx.link is not None:
                    operands, own = ctx.link.operands(operands)
                wanted = ctx.needs_input_grad[2:]
                grads = ctx.loop.backward(operands, wanted, cotangents, own)
        if may_release():
            ctx.loop.run.release()
            if ctx.link is not None:
                ctx.link.release()
        if torch.is_grad_enabled():
            grads = refuse_second_derivatives(grads, ctx.weights, scope)
        return (None, None, *grads)


def _takes_gradients_forward(run: SegmentRun, operands: Sequence[Tensor]) -> bool:
    """Whether the gradients are taken going forward, and scaled in the backward. What the body
    says of float16 holds of this call's operands and autocast too."""
    in_half = run.autocast.in_half or any(o.dtype == torch.float16 for o in operands)
    return run.segment.body.takes_gradients_forward and not in_half


def _scale(ctx: Any, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    specs = ctx.loop.run.segment.body.outputs
    (cotangent,) = (c for c, spec in zip(cotangents, specs) if spec.needs_grad)
    saved = iter(ctx.saved_tensors)
    grads = [next(saved) if present else None for present in ctx.present]
    if cotangent is None:
        return [None] * len(grads)
    in_place = may_release()  # then nobody else will ask for them: no second copy
    return [
        None if grad is None else _times(grad, cotangent.to(grad.dtype), in_place) for grad in grads
    ]


def _times(grad: Tensor, factor: Tensor, in_place: bool) -> Tensor:
    return grad.mul_(factor) if in_place else grad * factor


def _weights(run: SegmentRun, operands: Sequence[Tensor]) -> list[Tensor]:
    """The operands that every chunk takes whole."""
    used = {spec.operand for spec in run.segment.body.inputs if not spec.placement.spans}
    return [operand for index, operand in enumerate(operands) if index in used]
