"""The loops over chunks that a segment's forward and backward consist of."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .gather import Outputs
from .gradients import Gradients
from .parts import take_part
from .run import Caches, SegmentRun

__all__ = ["Loops", "own_saved_tensors"]


class Loops:
    """What the runtime does with the chunks of a segment."""

    def forward(self, run: SegmentRun, operands: Sequence[Tensor], caches: Caches) -> list[Tensor]:
        gathered = _outputs(run)
        for index, (start, end) in enumerate(run.chunks):
            outputs = run.call(run.segment.body.module, index, run.inputs(index, operands), caches)
            gathered.add(start, end, outputs)
        return gathered.whole()

    def forward_again(self, run: SegmentRun, operands: Sequence[Tensor]) -> list[Tensor]:
        """The same outputs as the first time, without gradients."""
        run.replay.recording = False
        with torch.no_grad(), run.replay.restoring(), run.autocast.restored():
            return self.forward(run, operands, run.new_caches())

    def forward_with_gradients(
        self, run: SegmentRun, operands: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        gathered, accumulated = _outputs(run), _gradients(run, operands, wanted)
        for index, (start, end) in enumerate(run.chunks):
            with torch.enable_grad(), own_saved_tensors():
                leaves = accumulated.leaves(run.inputs(index, operands))
                outputs = run.call(run.segment.body.module, index, leaves, ())
            gathered.add(start, end, [output.detach() for output in outputs])
            cotangents = [
                torch.ones_like(out) if spec.needs_grad else None
                for out, spec in zip(outputs, run.segment.body.outputs)
            ]
            accumulated.add(start, end, leaves, outputs, cotangents)
            del leaves, outputs, cotangents
        return gathered.whole(), accumulated.take()

    def backward(
        self,
        run: SegmentRun,
        operands: Sequence[Tensor],
        wanted: Sequence[bool],
        cotangents: Sequence[Tensor | None],
        own: Collection[int] = (),
    ) -> list[Tensor | None]:
        """The gradients of the operands; those numbered in ``own`` may be overwritten by them."""
        accumulated = _gradients(run, operands, wanted, own)
        run.replay.recording = False
        with run.replay.restoring(), run.autocast.restored():
            caches = run.filled_caches(operands)
            for index, (start, end) in reversed(list(enumerate(run.chunks))):
                run.fill_window(index, operands, caches)
                with torch.enable_grad(), own_saved_tensors():
                    leaves = accumulated.leaves(run.inputs(index, operands))
                    outputs = run.visit(index, leaves, caches)
                parts = [
                    None
                    if whole is None
                    else take_part(whole, spec.placement, start, end, run.length + spec.surplus)
                    for whole, spec in zip(cotangents, run.segment.body.outputs)
                ]
                accumulated.add(start, end, leaves, outputs, parts)
                del leaves, outputs, parts
        return accumulated.take()


def own_saved_tensors() -> contextlib.AbstractContextManager:
    """A context in which hooks on saved tensors (offloading, say) do not see what is saved: a
    chunk's graph is differentiated at once, and fake tensors are nothing to hand out."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _outputs(run: SegmentRun) -> Outputs:
    dtype = run.segment.options.accumulate_dtype
    return Outputs(run.segment.body.outputs, run.length, len(run.chunks), dtype)


def _gradients(
    run: SegmentRun,
    operands: Sequence[Tensor],
    wanted: Sequence[bool],
    own: Collection[int] = (),
) -> Gradients:
    body, dtype = run.segment.body, run.segment.options.accumulate_dtype
    return Gradients(body, run.length, len(run.chunks), operands, wanted, dtype, own)
