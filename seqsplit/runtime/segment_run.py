"""One execution of a segment: what its forward and its backward share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqsplit.ir.plan import Segment
from seqsplit.ops.autocast import Autocast
from seqsplit.ops.caches import Cache, Carry, keys_start
from seqsplit.ops.held import Held
from seqsplit.ops.replay import Replay
from seqsplit.ops.sliding import SlidingCache
from seqsplit.runtime.slicing import take_part

__all__ = ["SegmentRun", "chunk_bounds"]

Caches = Sequence[Cache | Carry | SlidingCache]


def chunk_bounds(length: int, rows: int) -> list[int]:
    """``[0, rows, 2 * rows, ..., length]``; one empty chunk for an empty sequence."""
    return [*range(0, max(length, 1), rows), length]


@dataclass
class SegmentRun:
    """A segment on the chunks of a sequence.

    Attributes:
        segment: what is run.
        length: of the sequence.
        sizes: the values of the body's sizes.
        bounds: where chunks begin and end.
        replay: what a recomputation takes from the forward.
        autocast: the state around the forward.
        states: of the caches at the end of the forward, where they are kept.
    """

    segment: Segment
    length: int
    sizes: tuple[int, ...]
    bounds: tuple[int, ...]
    replay: Replay
    autocast: Autocast = field(default_factory=Autocast.current)
    states: list[Any] | None = None

    @property
    def chunks(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds, self.bounds[1:]))

    def inputs(self, index: int, operands: Sequence[Tensor]) -> list[Tensor]:
        """The parts of the operands that one chunk takes: views."""
        start, end = self.bounds[index : index + 2]
        return [
            take_part(
                operands[spec.operand], spec.placement, start, end, self.length + spec.surplus
            )
            for spec in self.segment.body.inputs
        ]

    def call(
        self, module: Callable, index: int, inputs: Sequence[Tensor], caches: Caches
    ) -> tuple[Tensor, ...]:
        """Run one of the body's modules on one chunk."""
        start, end = self.bounds[index : index + 2]
        self.replay.chunk = index
        # Past a module's call, which looks for hooks at every chunk.
        call = getattr(module, "forward", module)
        # A deferred value that is looked at runs bodies where torch functions of other classes (a
        # quantised weight's) are switched off.
        with torch._C._EnableTorchFunction():
            return call(start, end, self.length, *self.sizes, *inputs, *caches, self.replay)

    @property
    def slides(self) -> bool:
        """Whether the caches hold a window of the sequence only."""
        window, rows = self.segment.body.window, self.bounds[1]
        kept = self.segment.options.schedule.keep_keys
        return window is not None and not kept and window + 2 * rows < self.length

    def new_caches(self) -> list[Cache | Carry | SlidingCache]:
        dtype, specs = self.segment.options.accumulate_dtype, self.segment.body.caches
        if self.slides:
            window = self.segment.body.window
            return [SlidingCache(spec.dim, window, dtype) for spec in specs]
        return [
            Carry(dtype) if spec.carries else Cache(spec.dim, self.length, dtype) for spec in specs
        ]

    def keep_states(self, caches: Caches) -> None:
        """Keep what the forward has put into the caches."""
        self.states = [pytree.tree_map_only(Tensor, Held, cache.state) for cache in caches]

    def filled_caches(self, operands: Sequence[Tensor]) -> Caches:
        """Caches as the forward left them: from what was kept, or by filling them again."""
        caches = self.new_caches()
        if self.states is not None:
            for cache, state in zip(caches, self.states):
                cache.state = pytree.tree_map_only(Held, Held.get, state)
        elif caches and not self.slides:
            # The last chunk fills its own rows when it is visited, first of all.
            self._fill(range(len(self.bounds) - 2), operands, caches)
        return caches

    def fill_window(self, index: int, operands: Sequence[Tensor], caches: Caches) -> None:
        """Put into sliding caches what the visit of a chunk reads, as far as it is not there."""
        if not self.slides:
            return
        first = keys_start(self.bounds[index], self.segment.body.window)
        seen = [i for i in range(index + 1) if i == index or self.bounds[i + 1] > first]
        self._fill([i for i in seen if not caches[0].holds(self.bounds[i])], operands, caches)

    def _fill(self, indices: Iterable[int], operands: Sequence[Tensor], caches: Caches) -> None:
        for index in indices:
            self.call(self.segment.body.fill, index, self.inputs(index, operands), caches)

    def visit(self, index: int, leaves: Sequence[Tensor], caches: Caches) -> tuple[Tensor, ...]:
        """Run a chunk again, to be differentiated: its outputs' values are left open.

        The last chunk is the first to be visited, and fills the caches' last rows, unless they
        slide or were kept.
        """
        body, is_last = self.segment.body, index == len(self.bounds) - 2
        fills = is_last and not self.slides and self.states is None
        outputs = self.call(body.visit_last if fills else body.visit, index, leaves, caches)
        if is_last:
            for cache in caches:
                cache.close()
        return outputs

    def release(self) -> None:
        """Forget what was kept for the backward."""
        self.states = None
        self.replay.release()
