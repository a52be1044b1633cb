"""The loops over chunks that a segment's forward and backward consist of."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from seqsplit.ops.held import own_saved_tensors
from seqsplit.runtime.gradients import Gradients
from seqsplit.runtime.outputs import Outputs
from seqsplit.runtime.segment_run import Caches, SegmentRun
from seqsplit.runtime.slicing import take_part

__all__ = ["ChunkLoop"]


class ChunkLoop:
    """What the runtime does with the chunks of a segment.

    Args:
        run: the segment on its chunks.
    """

    def __init__(self, run: SegmentRun) -> None:
        self.run = run

    def forward(self, operands: Sequence[Tensor], caches: Caches) -> list[Tensor]:
        run = self.run
        gathered = _outputs(run)
        for index, (start, end) in enumerate(run.chunks):
            outputs = run.call(run.segment.body.module, index, run.inputs(index, operands), caches)
            gathered.add(start, end, outputs)
        return gathered.whole()

    def forward_again(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The same outputs as the first time, without gradients."""
        run = self.run
        run.replay.recording = False
        with torch.no_grad(), run.replay.restoring(), run.autocast.restored():
            return self.forward(operands, run.new_caches())

    def forward_with_gradients(
        self, operands: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        run = self.run
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
        operands: Sequence[Tensor],
        wanted: Sequence[bool],
        cotangents: Sequence[Tensor | None],
        own: Collection[int] = (),
    ) -> list[Tensor | None]:
        """The gradients of the operands; those numbered in ``own`` may be overwritten by them."""
        run = self.run
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
