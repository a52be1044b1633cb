"""Rehearsal: a training step without data, on tensors that have shapes but no storage.

The real plan runs on the real runtime, on the meta device, and a tracker counts the bytes that
its tensors would take. Only the loops over chunks are shortened: segments of the same body do the
same, so the loop is run for the first of them, and for the others its results are allocated
together with what else it needed at its peak.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqsplit.ir.plan import Segment
from seqsplit.memory import track_memory
from seqsplit.ops.held import Held
from seqsplit.runtime.chunk_loop import ChunkLoop
from seqsplit.runtime.segment_function import run_segment
from seqsplit.runtime.segment_run import Caches, SegmentRun

__all__ = ["rehearse_segment"]


def rehearse_segment() -> Callable[..., tuple[Tensor, ...]]:
    """The runtime's :func:`run_segment` with loops that are shortened."""
    known: dict[Any, tuple[Any, int]] = {}

    def run(
        segment: Segment,
        length: int,
        sizes: Sequence[int],
        operands: Sequence[Tensor],
        bounds: Sequence[int] | None = None,
        link: Any = None,
    ) -> tuple[Tensor, ...]:
        return run_segment(
            segment, length, sizes, operands, bounds, link, partial(_RehearsedLoop, known=known)
        )

    return run


class _RehearsedLoop(ChunkLoop):
    """A loop that is run once for each body and each kind of operands.

    Args:
        run: the segment on its chunks.
        known: what was found so far, for all loops of a rehearsal.
    """

    def __init__(self, run: SegmentRun, known: dict[Any, tuple[Any, int]]) -> None:
        super().__init__(run)
        self._known = known

    def forward(self, operands: Sequence[Tensor], caches: Caches) -> list[Tensor]:
        run = self.run

        def left_behind() -> Any:
            results = pytree.tree_map_only(Held, Held.get, run.replay.results)
            return [cache.state for cache in caches], results

        def compute() -> Any:
            return super(_RehearsedLoop, self).forward(operands, caches), left_behind()

        keeps = run.segment.options.schedule
        key = ("forward", keeps.keep_keys, run.replay.recording and keeps.keep_attention)
        outputs, (states, results) = self._once((key, self._kind(operands)), compute)
        for cache, state in zip(caches, states):
            cache.state = state
        run.replay.results = pytree.tree_map_only(Tensor, Held, results)
        return outputs

    def forward_with_gradients(
        self, operands: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        def compute() -> Any:
            return super(_RehearsedLoop, self).forward_with_gradients(operands, wanted)

        return self._once(("gradients", tuple(wanted), self._kind(operands)), compute)

    def backward(
        self,
        operands: Sequence[Tensor],
        wanted: Sequence[bool],
        cotangents: Sequence[Tensor | None],
        own: Collection[int] = (),
    ) -> list[Tensor | None]:
        def compute() -> Any:
            return super(_RehearsedLoop, self).backward(operands, wanted, cotangents, own)

        given = tuple(cotangent is not None for cotangent in cotangents)
        kept = self.run.states is not None
        key = ("backward", kept, tuple(wanted), given, self._kind(operands))
        return self._once(key, compute, operands)

    def _kind(self, operands: Sequence[Tensor]) -> Any:
        run = self.run
        shapes = tuple((tuple(operand.shape), operand.dtype) for operand in operands)
        return id(run.segment.body), run.bounds, shapes, run.segment.options.schedule

    def _once(self, key: Any, compute: Callable[[], Any], operands: Sequence[Tensor] = ()) -> Any:
        """What ``compute`` gives, and from the second time on tensors like it. A result that is
        one of ``operands`` (overwritten) will be that again."""
        if key not in self._known:
            with track_memory(device="meta") as memory:
                results = compute()
                live = memory.live_bytes
            places = {operand.untyped_storage()._cdata: i for i, operand in enumerate(operands)}

            def shape(tensor: Tensor) -> _Like:
                return _Like(tensor, places.get(tensor.untyped_storage()._cdata))

            shapes = pytree.tree_map_only(Tensor, shape, results)
            self._known[key] = shapes, max(memory.peak_bytes - live, 0)
            return results
        shapes, besides = self._known[key]
        results = pytree.tree_map_only(_Like, lambda like: like.make(operands), shapes)
        torch.empty(besides, dtype=torch.uint8, device="meta")  # for a moment
        return results


class _Like:
    """What is needed to allocate a tensor like another one, or to take the operand that it was."""

    def __init__(self, tensor: Tensor, operand: int | None) -> None:
        self._shape, self._dtype, self._operand = tensor.shape, tensor.dtype, operand

    def make(self, operands: Sequence[Tensor]) -> Tensor:
        if self._operand is not None:
            return operands[self._operand].detach()
        return torch.empty(self._shape, dtype=self._dtype, device="meta")
