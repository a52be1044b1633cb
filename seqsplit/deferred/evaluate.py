"""Compute deferred values, chunk by chunk, several of them at once.

An expression is row-wise, so it is a chunk body as it stands. It runs through the same loop as the
segments of a plan: in the forward the rows of a chunk are computed and forgotten, in the backward
they are computed again, and a total takes its gradients in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqsplit.deferred.expression import Call, Node, Operand, Operation, Source
from seqsplit.ir.placement import Chunk, Placement, Sum
from seqsplit.ir.plan import Body, BodyInput, BodyOutput, Segment
from seqsplit.options import Options
from seqsplit.runtime.segment_function import run_segment
from seqsplit.runtime.segment_run import chunk_bounds

__all__ = ["compute", "compute_total", "fits_one_chunk"]


def compute(nodes: Sequence[Node], options: Options) -> Sequence[Tensor]:
    """The rows of nodes that go over the same rows, differentiable.

    Raises:
        StaleLogitsError: a tensor they depend on has changed since they were recorded.
    """
    program = _Program(nodes, total=False)
    specs = [BodyOutput(Chunk(0), needs_grad=node.requires_grad) for node in nodes]
    return _run(program, specs, options)


def compute_total(node: Node, options: Options) -> Tensor:
    """The sum of everything in a node, in the dtype in which sums are accumulated."""
    program = _Program([node], total=True)
    (total,) = _run(program, [BodyOutput(Sum, needs_grad=node.requires_grad, scalar=True)], options)
    return total


def fits_one_chunk(node: Node, options: Options) -> bool:
    """Whether a node has no more rows than one chunk."""
    return node.num_rows <= options.head_rows(node.width)


def _run(program: _Program, specs: list[BodyOutput], options: Options) -> tuple[Tensor, ...]:
    inputs, outputs = tuple(program.inputs), tuple(specs)
    body = Body(program, None, program, program, inputs, outputs, (), 0, "", program.in_half)
    segment = Segment(body, "values computed from the logits", options, program.width)
    rows = options.head_rows(program.width, program.operands[0].device.type)
    bounds = chunk_bounds(program.num_rows, rows)
    with torch.set_grad_enabled(any(spec.needs_grad for spec in specs)):
        return run_segment(segment, program.num_rows, (), program.take_operands(), bounds)


class _Program:
    """Nodes as the code of a chunk body. Equal parts are computed once."""

    def __init__(self, nodes: Sequence[Node], *, total: bool) -> None:
        self.num_rows, self._total = nodes[0].num_rows, total
        writing = _Writing()
        self._results = [writing.place(node) for node in nodes]
        self._steps, self.width = writing.steps, writing.width
        self.in_half = any(call.autocast.in_half for call, _ in writing.steps)
        self._num_sources, self._constants = len(writing.sources), list(writing.constants)
        self.operands = [*(s.rows() for s in writing.sources), *writing.constants.values()]
        order = [Chunk(0)] * self._num_sources + [Placement()] * len(self._constants)
        self.inputs = [BodyInput(index, placement) for index, placement in enumerate(order)]

    def take_operands(self) -> list[Tensor]:
        """The tensors it is run on, which are then autograd's to keep."""
        operands, self.operands = self.operands, []
        return operands

    def __call__(self, start: int, end: int, length: int, *inputs: Any) -> tuple[Tensor, ...]:
        *inputs, _replay = inputs
        rows = inputs[: self._num_sources]
        constants = dict(zip(self._constants, inputs[self._num_sources :]))
        done: list[list[Tensor]] = []

        def look_up(place: tuple[str, Any]) -> Any:
            kind, which = place
            if kind == "source":
                return rows[which]
            if kind == "constant":
                return constants[which]
            return done[which[0]][which[1]] if kind == "step" else which

        for call, leaves in self._steps:
            done.append(call.run([look_up(leaf) for leaf in leaves], end - start))
        results = [look_up(place) for place in self._results]
        if self._total:
            wide = torch.promote_types(results[0].dtype, torch.float32)
            results = [results[0].to(wide).sum()]
        return tuple(results)


class _Writing:
    """Finds the steps that compute nodes, and what they need."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.constants: dict[tuple[int, bool], Tensor] = {}
        self.steps: list[tuple[Call, list[tuple[str, Any]]]] = []
        self.width = 1
        self._numbers: dict[Any, int] = {}
        self._places: dict[Node, tuple[str, Any]] = {}

    def place(self, node: Node) -> tuple[str, Any]:
        """Where a node's rows are to be found when the code runs."""
        if node not in self._places:
            self._places[node] = self._new_place(node)
            self.width = max(self.width, node.width)
        return self._places[node]

    def _new_place(self, node: Node) -> tuple[str, Any]:
        computed = node.computed
        if isinstance(node, Source) or computed is not None:
            source = node if isinstance(node, Source) else Source(computed)
            source.rows()  # those of a value that has to be computed whole, too
            for index, other in enumerate(self.sources):
                if source.same_rows(other):
                    return "source", index
            self.sources.append(source)
            return "source", len(self.sources) - 1
        return "step", (self._step(node.operation), node.slot)

    def _step(self, operation: Operation) -> int:
        call = operation.call
        leaves = [self._leaf(leaf, operation) for leaf in operation.leaves]
        layouts = tuple(layout and layout.form for layout in call.layouts)
        plain = tuple((kind, repr(which)) for kind, which in leaves)
        key = (call.function, call.structure, call.recorded, call.autocast, layouts, plain)
        if key not in self._numbers:
            self._numbers[key] = len(self.steps)
            self.steps.append((call, leaves))
        return self._numbers[key]

    def _leaf(self, leaf: Any, operation: Operation) -> tuple[str, Any]:
        if isinstance(leaf, Operand):
            return self.place(leaf.node)
        if isinstance(leaf, Tensor):
            seen = operation.seen[id(leaf)]
            key = id(leaf), seen.requires_grad
            now = seen.again(leaf)
            self.constants.setdefault(key, now)
            return "constant", key
        return "plain", leaf
