"""What a compiled graph consists of. The passes make it, the runtime executes it.

A *segment* is a stretch of the model that runs chunk by chunk: one decoder layer, usually, or the
head with the loss. A *chunk body* is the code for one chunk of it; segments of the same structure
share one body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from seqsplit.ir.assumptions import Assumption
from seqsplit.ir.placement import Placement
from seqsplit.options import Options

__all__ = [
    "Again",
    "Body",
    "BodyInput",
    "BodyOutput",
    "CacheSpec",
    "ChainSpec",
    "Plan",
    "Segment",
    "Write",
]


@dataclass(frozen=True)
class BodyInput:
    """A tensor that the body takes.

    Attributes:
        operand: which of the segment's operands it is a part of.
        placement: which part.
        surplus: the sequence is ``T + surplus`` long in that operand.
    """

    operand: int
    placement: Placement
    surplus: int = 0


@dataclass(frozen=True)
class BodyOutput:
    """A tensor that the body gives.

    Attributes:
        placement: ``Chunk(dim)`` or ``Sum``.
        surplus: the whole value's size along that dim is ``T + surplus`` (zero or negative).
        needs_grad: whether a gradient may come back for it.
        scalar: whether it is a single number.
    """

    placement: Placement
    surplus: int = 0
    needs_grad: bool = True
    scalar: bool = False


@dataclass(frozen=True)
class CacheSpec:
    """What chunks hand on along ``dim``: a buffer of rows that later ones read (K or V, usually),
    all of them or those in a ``window`` that ends with their own, or, if it ``carries``, the state
    of a scan."""

    dim: int
    carries: bool = False
    window: int | None = None


@dataclass(frozen=True, eq=False)
class Body:
    """The code of one chunk.

    Attributes:
        module: takes ``start, end, length`` (positions of the chunk and of the sequence's end),
            the segment's sizes, the input tensors, the caches and the replay of random ops;
            returns the outputs.
        fill: the part of it that fills the caches, ``None`` without caches.
        visit: what the backward differentiates, once the caches are filled: the same without
            products whose values nobody reads then.
        visit_last: that for the last chunk, whose rows it puts into the caches.
        inputs, outputs, caches: what these are.
        num_random: how many ops draw random numbers.
        fingerprint: equal for bodies of equal structure.
        in_half: whether something in it is computed in float16.
        fills_alone: whether what a chunk puts into the caches does not depend on what others have
            put there.
    """

    module: Callable
    fill: Callable | None
    visit: Callable
    visit_last: Callable
    inputs: tuple[BodyInput, ...]
    outputs: tuple[BodyOutput, ...]
    caches: tuple[CacheSpec, ...]
    num_random: int
    fingerprint: str
    in_half: bool = False
    fills_alone: bool = False

    def with_code(self, change: Callable[[Callable], Callable]) -> Body:
        """The same body, all of its code changed."""
        changed = {
            code: change(code)
            for code in {self.module, self.fill, self.visit, self.visit_last} - {None}
        }
        return replace(
            self,
            module=changed[self.module],
            fill=changed.get(self.fill),
            visit=changed[self.visit],
            visit_last=changed[self.visit_last],
        )

    @property
    def window(self) -> int | None:
        """The widest window in which chunks read what others hand on; ``None`` if a chunk's part
        in that cannot be forgotten and made again."""
        if not self.caches or not self.fills_alone or any(c.window is None for c in self.caches):
            return None
        return max(cache.window for cache in self.caches)

    @property
    def is_head(self) -> bool:
        """Whether everything it gives is a sum: then it may take its gradients going forward."""
        return all(output.placement.partial for output in self.outputs)

    @property
    def takes_gradients_forward(self) -> bool:
        """Whether it ends in one number, whose gradient is known but for a factor. (Not in
        float16: there a gradient scaler wants the loss scaled before it is differentiated.)"""
        differentiable = [output for output in self.outputs if output.needs_grad]
        return (
            self.is_head
            and not self.caches
            and len(differentiable) == 1
            and differentiable[0].scalar
            and not self.in_half
        )


@dataclass(eq=False)
class Segment:
    """A stretch of the model, and how its inputs are found in the outer graph.

    Attributes:
        body: its code.
        scope: the module path that it covers, for reports.
        options: of the compilation.
        width: elements per row of the sequence of its widest value, for choosing the chunk.
    """

    body: Body
    scope: str
    options: Options
    width: int = 1

    def chunk_rows(self, length: int, device: str = "cpu") -> int:
        """Rows of the sequence per chunk, on a type of device."""
        options = self.options
        automatic = options.automatic_rows(self.width, device)
        asked = options.head_chunk_size if self.body.is_head else options.chunk_size
        if asked is None and self.body.is_head and options.chunk_size is not None:
            asked = min(options.chunk_size, automatic)
        return min(asked or automatic, max(length, 1))


@dataclass(frozen=True)
class Again:
    """How to come to a state that is not stored.

    Attributes:
        first: the stored state to begin with.
        stored: those on the way that are stored.
    """

    first: int
    stored: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class ChainSpec:
    """How the segments of a plan follow each other, and which states between them are stored.

    State number ``n`` is what the segments from number ``n`` on need of those before.

    Attributes:
        sources: for each segment, where its operands come from: ``(segment, output)``, or the
            number of a value from outside of the segments.
        last_use: the last segment that takes an output, by ``(segment, output)``.
        first_use: the first segment that takes a value from outside, by its number.
        stored: the states that are stored going forward.
        again: for each other one, how to come to it in the backward.
        offload: where they are stored, see :class:`~seqsplit.schedule.Schedule`.
    """

    sources: tuple[tuple[tuple[int, int] | int, ...], ...]
    last_use: dict[tuple[int, int], int]
    first_use: dict[int, int]
    stored: frozenset[int]
    again: dict[int, Again]
    offload: str | None = None


@dataclass(frozen=True)
class Write:
    """An input of the graph that the model's code changes.

    Attributes:
        index: which.
        rebinds: it is given another tensor's memory (``x.data = y``) instead of new values.
    """

    index: int
    rebinds: bool = False


@dataclass(eq=False)
class Plan:
    """The result of the passes.

    Attributes:
        module: the outer graph, taking what Dynamo's graph took.
        segments: in the order in which they run.
        whole: scopes that run whole, with the reason.
        length_at: an input, its dim along the sequence, and by how much that is longer.
        assumptions: what has to be true of a call's inputs for the plan to hold.
        writes: which inputs are written to; their new values are the last outputs of ``module``.
        pass_seconds: time spent in each pass.
        with_options: makes the same plan under other chunk sizes or another schedule.
        fixed_length: the only length of the sequence that the plan is for, where the model's code
            fixed it.
        unchecked: what was not tried against the original, and why.
    """

    module: fx.GraphModule
    segments: list[Segment]
    whole: list[tuple[str, str]] = field(default_factory=list)
    length_at: tuple[int, int, int] = (0, 0, 0)
    assumptions: list[Assumption] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    pass_seconds: dict[str, float] = field(default_factory=dict)
    with_options: Callable[[Options], Plan] | None = None
    fixed_length: int | None = None
    unchecked: list[str] = field(default_factory=list)

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """What Dynamo's graph would give for these inputs, its writes into them included."""
        results = self.module(*inputs)
        if not self.writes:
            return results
        kept = len(results) - len(self.writes)
        with torch.no_grad():
            for write, value in zip(self.writes, results[kept:]):
                if write.rebinds:
                    inputs[write.index].data = value
                elif inputs[write.index].requires_grad:  # written to as .data: no version counts it
                    inputs[write.index].data.copy_(value)
                else:
                    inputs[write.index].copy_(value)
        return results[:kept]

    @property
    def bodies(self) -> Sequence[Body]:
        """The distinct chunk bodies."""
        return list({id(segment.body): segment.body for segment in self.segments}.values())

    def holds_for(self, inputs: Sequence[object]) -> bool:
        """Whether these inputs are as the plan assumes."""
        return all(assumption.holds(inputs) for assumption in self.assumptions)

    def length_of(self, inputs: Sequence[object]) -> int:
        """The sequence's length in these inputs."""
        index, dim, surplus = self.length_at
        return int(inputs[index].shape[dim]) - surplus

    def device_of(self, inputs: Sequence[Any]) -> str:
        """The type of the device that the sequence's tensors are on."""
        return inputs[self.length_at[0]].device.type
