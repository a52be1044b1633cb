"""What a compiled graph consists of. The passes make it, the runtime executes it.

A *segment* is a stretch of the model that runs chunk by chunk: one decoder layer, usually, or the
head with the loss. A *chunk body* is the code for one chunk of it; segments of the same structure
share one body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .assumptions import Assumption
from .placement import Placement

_CHUNK_ELEMENTS = 2**24
_MIN_ROWS, _MAX_ROWS, _ROW_STEP = 128, 4096, 64

__all__ = ["Body", "BodyInput", "BodyOutput", "CacheSpec", "Options", "Plan", "Segment"]


@dataclass(frozen=True)
class Options:
    """The options of :func:`seqsplit.compile`, checked.

    Attributes:
        chunk_size: rows of the sequence per chunk of a layer, ``None`` for automatic.
        head_chunk_size: the same for segments that end in sums (the loss).
        segment_layers: stretches between attentions per segment.
        accumulate_dtype: the least precise dtype in which gradients are added up over chunks.
        seq_dim: the dim of the inputs that is the sequence, ``None`` to find it.
        strict: whether parts that would run whole are an error.
        validate: whether each distinct body is tried against the original before it is used.
    """

    chunk_size: int | None = None
    head_chunk_size: int | None = None
    segment_layers: int = 1
    accumulate_dtype: torch.dtype = torch.float32
    seq_dim: int | None = None
    strict: bool = False
    validate: bool = True

    @staticmethod
    def automatic_rows(width: int) -> int:
        """Rows per chunk that keep a value of ``width`` elements per row within some ten million
        elements."""
        rows = _CHUNK_ELEMENTS // max(width, 1)
        return max(_MIN_ROWS, min(_MAX_ROWS, rows // _ROW_STEP * _ROW_STEP))

    def head_rows(self, width: int) -> int:
        """Rows per chunk of a head whose widest value has ``width`` elements per row."""
        return self.head_chunk_size or self.automatic_rows(width)


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
    or, if it ``carries``, the state of a scan."""

    dim: int
    carries: bool = False


@dataclass(frozen=True, eq=False)
class Body:
    """The code of one chunk.

    Attributes:
        module: takes ``start, end, length`` (positions of the chunk and of the sequence's end),
            the segment's sizes, the input tensors, the caches and the replay of random ops;
            returns the outputs.
        fill: the part of it that fills the caches, ``None`` without caches.
        inputs, outputs, caches: what these are.
        num_random: how many ops draw random numbers.
        fingerprint: equal for bodies of equal structure.
    """

    module: Callable
    fill: Callable | None
    inputs: tuple[BodyInput, ...]
    outputs: tuple[BodyOutput, ...]
    caches: tuple[CacheSpec, ...]
    num_random: int
    fingerprint: str

    @property
    def is_head(self) -> bool:
        """Whether everything it gives is a sum: then it may take its gradients going forward."""
        return all(output.placement.partial for output in self.outputs)


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

    def chunk_rows(self, length: int) -> int:
        """Rows of the sequence per chunk."""
        options = self.options
        asked = options.head_chunk_size if self.body.is_head else options.chunk_size
        if asked is None and self.body.is_head and options.chunk_size is not None:
            asked = min(options.chunk_size, options.automatic_rows(self.width))
        return min(asked or options.automatic_rows(self.width), max(length, 1))


@dataclass(eq=False)
class Plan:
    """The result of the passes.

    Attributes:
        module: the outer graph, taking what Dynamo's graph took.
        segments: in the order in which they run.
        whole: scopes that run whole, with the reason.
        length_at: an input, its dim along the sequence, and by how much that is longer.
        assumptions: what has to be true of a call's inputs for the plan to hold.
        writes: numbers of inputs that are written to; their new values are the last outputs of
            ``module``.
        pass_seconds: time spent in each pass.
        fixed_length: the only length of the sequence that the plan is for, where the model's code
            fixed it.
    """

    module: fx.GraphModule
    segments: list[Segment]
    whole: list[tuple[str, str]] = field(default_factory=list)
    length_at: tuple[int, int, int] = (0, 0, 0)
    assumptions: list[Assumption] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    pass_seconds: dict[str, float] = field(default_factory=dict)
    fixed_length: int | None = None

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """What Dynamo's graph would give for these inputs, its writes into them included."""
        results = self.module(*inputs)
        if not self.writes:
            return results
        kept = len(results) - len(self.writes)
        with torch.no_grad():
            for index, value in zip(self.writes, results[kept:]):
                inputs[index].copy_(value)
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
