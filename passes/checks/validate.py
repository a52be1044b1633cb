"""Validate: run each distinct body against its original subgraph before it is ever used.

Both run in float64 on a short sequence cut into uneven chunks, with random activations and
random cotangents; whatever else they need comes from a short call (samples.py). Random ops are
silenced on both sides. An op that does not take float64 runs in its own dtypes, on the same chunks
on both sides. Outputs and the gradients of every operand have to agree to 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from seqsplit.ir.plan import Segment
from seqsplit.ops import attention
from seqsplit.passes.analysis.facts import Facts, draws_random
from seqsplit.passes.checks.samples import Samples
from seqsplit.passes.graph.lowered import attribute_of
from seqsplit.passes.rules.attention import SDPA
from seqsplit.passes.rules.registry import Row, operands_of, rows_of, takes_double
from seqsplit.passes.split.body import SplitSegment
from seqsplit.passes.trials.double import as_double, double_call, double_graph
from seqsplit.passes.trials.trial import Part, Trial, holds

__all__ = ["TOLERANCE", "Validator", "relative_error", "uneven_bounds", "without_history"]

aten = torch.ops.aten

TOLERANCE = 1e-9

RunSegment = Callable[..., tuple[Tensor, ...]]


def uneven_bounds(length: int) -> list[int]:
    """Chunks of different sizes, one of them a single row."""
    return sorted(
        {0, length // 3 + 1, length // 3 + 2, length - 2, length} & set(range(length + 1))
    )


class Validator:
    """Tries segments of one captured graph.

    Args:
        facts: of the graph.
        samples: a short call of it.
        run: the runtime's function that runs a segment.
    """

    def __init__(self, facts: Facts, samples: Samples, run: RunSegment) -> None:
        self._facts = facts
        self._samples = samples
        self._run = run
        self._values: dict[fx.Node, Any] = {}
        self._generator = torch.Generator().manual_seed(0)

    def check(self, segment: Segment, split: SplitSegment, values: Sequence[fx.Node]) -> str | None:
        """Compare a segment with the original.

        Returns:
            What differs, in one sentence, or ``None`` if nothing does.
        """
        length = self._samples.length
        if length is None:
            return None
        body = segment.body.with_code(_in_double)
        options = replace(segment.options, accumulate_dtype=torch.float64)
        segment = replace(segment, body=body, options=options)
        sizes = [self._samples.number(symbol) for symbol in split.sizes]
        difference = None
        for positive in (False, True):
            operands = [self._leaf(node, positive) for node in split.operands]
            with torch.enable_grad():
                expected = self._original(split, operands, values)
                got = self._run(segment, length, sizes, operands, bounds=uneven_bounds(length))
                try:
                    return self._compare(split, operands, values, expected, got)
                except _Undefined as undefined:  # the root of a mean square, say
                    difference = undefined.difference
        return difference

    # -- comparing ---------------------------------------------------------------------------

    def _compare(
        self,
        split: SplitSegment,
        operands: Sequence[Tensor],
        values: Sequence[fx.Node],
        expected: Sequence[Tensor],
        got: Sequence[Tensor],
    ) -> str | None:
        undefined = any(want.isnan().any() for want in _detached(expected))
        for node, want, have in zip(values, _detached(expected), _detached(got)):
            if want.shape != have.shape:
                return f"{node} has shape {list(have.shape)} instead of {list(want.shape)}"
            error = relative_error(have, want)
            if not error <= TOLERANCE:
                return f"the value of {node} is off by {error:.1e}"
        wanted = [i for i, operand in enumerate(operands) if operand.requires_grad]
        roots = [i for i, value in enumerate(expected) if value.requires_grad]
        if not wanted or not roots:
            return None
        cotangents = [self._cotangent(expected[i]) for i in roots]
        gradients = [
            torch.autograd.grad(
                [side[i] for i in roots],
                [operands[i] for i in wanted],
                cotangents,
                allow_unused=True,
                retain_graph=True,
            )
            for side in (expected, got)
        ]
        undefined |= any(g.isnan().any() for g in gradients[0] if g is not None)
        scale = max((g.norm() for g in gradients[0] if g is not None), default=torch.zeros(()))
        for index, want, have in zip(wanted, *gradients):
            error = gradient_error(have, want, scale)
            if not error <= TOLERANCE:
                difference = f"the gradient of {split.operands[index]} is off by {error:.1e}"
                if undefined:
                    raise _Undefined(difference)
                return difference
        if undefined:
            raise _Undefined(None)
        return None

    def _original(
        self, split: SplitSegment, operands: Sequence[Tensor], values: Sequence[fx.Node]
    ) -> list[Tensor]:
        known: dict[fx.Node, Any] = dict(zip(split.operands, operands))
        return [self._evaluate(node, known) for node in values]

    def _evaluate(self, wanted: fx.Node, known: dict[fx.Node, Any]) -> Any:
        """Run the lowered graph's own nodes, as far up as ``known`` values."""
        stack = [wanted]
        while stack:
            node = stack[-1]
            if node in known:
                stack.pop()
                continue
            held = node.meta.get("val")
            if isinstance(held, torch.SymInt):
                known[node] = self._samples.number(self._facts.lowered.expr(held))
                continue
            if node.op == "placeholder":
                known[node] = self._samples.input(node)
                continue
            if node.op == "get_attr":
                known[node] = as_double(attribute_of(self._facts.lowered.module, node))
                continue
            missing = [i for i in node.all_input_nodes if i not in known]
            if missing:
                stack.extend(missing)
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            args, kwargs = _silenced(node, args, kwargs)
            with torch.set_grad_enabled(node.meta["region"].grad and torch.is_grad_enabled()):
                if takes_double(node, self._facts.shape):
                    target, args, kwargs = double_call(node.target, args, kwargs)
                    result = target(*args, **kwargs)
                else:
                    result = self._in_own_dtypes(node, known)
            known[node] = result if node.meta["region"].grad else without_history(result)
        return known[wanted]

    def _in_own_dtypes(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        """An op that does not take float64, between float64 values.

        The body runs it on chunks, so here it is run on the same chunks: then both round alike,
        and everything else can be compared as closely as ever. That chunks of it give chunks is
        tried before, as for ops without a rule, but on these very operands.
        """
        facts = self._facts
        operands = tuple(operands_of(node))
        if hasattr(node.target, "recurs"):
            values = [known[operand] for operand in operands]
            dtypes = [operand.meta["val"].dtype for operand in operands]
            bounds = uneven_bounds(self._samples.length)
            return as_double(
                node.target.recurs.in_chunks(values, bounds, dtypes)[node.target.gives]
            )
        symbols = {s for n in (*operands, node) for d in facts.shape(n) for s in d.free_symbols}
        trial = Trial(node, operands, {s: self._samples.symbol(s) for s in symbols}, own=True)
        values = [known[operand] for operand in operands]
        row = self._sequence_row(node)
        if row is None:
            return trial(values)
        ((dim, span),) = row.out.spans
        size = self._samples.number(facts.shape(node)[dim] / (span.outer * span.inner))
        bounds = sorted({min(bound, size) for bound in uneven_bounds(self._samples.length)})
        placements = (row.out, *row.operands)
        plain = [value.detach() for value in values]
        if not holds(trial, placements, plain, facts.sequence, size, bounds):
            raise _Mixes(f"{node} on chunks is not {node} on all")
        out, *parts = [Part(placement, trial.sizes, size) for placement in placements]
        beyond = self._samples.length - size
        results = []
        for start, end in zip(bounds, bounds[1:]):
            pieces = [part.of(value, start, end) for part, value in zip(parts, values)]
            sizes = {**trial.sizes, facts.sequence: end - start + beyond}
            results.append(pytree.tree_flatten(trial(pieces, sizes)))
        joined = [out.join(pieces) for pieces in zip(*(leaves for leaves, _ in results))]
        return pytree.tree_unflatten(joined, results[0][1])

    def _sequence_row(self, node: fx.Node) -> Row | None:
        """The row by which an op is split along the sequence."""
        shape = self._facts.shape
        for row in rows_of(node, shape) if self._facts.is_active(node) else ():
            if len(row.out.spans) == 1:
                ((dim, _),) = row.out.spans
                if self._facts.is_sequence(shape(node)[dim]):
                    return row
        return None

    # -- inputs ------------------------------------------------------------------------------

    def _leaf(self, node: fx.Node, positive: bool) -> Tensor:
        facts = self._facts
        value = facts_value = None
        if node in facts.stream or node in facts.features:
            held = node.meta["val"]
            shape = [self._samples.number(size) for size in facts.shape(node)]
            if held.is_floating_point() or held.is_complex():
                value = self._normal(shape, like=held)
                value = value.abs() if positive and not held.is_complex() else value
        if value is None:
            with torch.no_grad():
                value = facts_value = self._evaluate(node, self._values)
        value = value.detach()
        if node in facts.needs_grad:
            value = (value.clone() if facts_value is not None else value).requires_grad_()
        return value

    def _cotangent(self, like: Tensor) -> Tensor:
        """Random. A single number's is a power of two: a head may scale its gradients by it
        instead of starting from it, which is then the same in any floating-point arithmetic."""
        if like.ndim or like.is_complex():
            return self._normal(like.shape, like)
        power = torch.randint(-3, 4, (), generator=self._generator)
        return torch.exp2(power.to(torch.float64)).to(like.device)

    def _normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        dtype = torch.complex128 if like.is_complex() else torch.float64
        return torch.randn(list(shape), generator=self._generator, dtype=dtype).to(like.device)


class _Mixes(Exception):
    """An op that was taken to be row-wise is not, on the values that it is really given."""


class _Undefined(Exception):
    """The original gives NaN for the inputs that were tried, so that nothing is proved.

    Attributes:
        difference: what was found all the same.
    """

    def __init__(self, difference: str | None) -> None:
        super().__init__(difference)
        self.difference = difference


def relative_error(have: Tensor, want: Tensor) -> float:
    """Norm-wise; equal infinities and NaNs count as equal."""
    if not (want.is_floating_point() or want.is_complex()):
        return float(not torch.equal(have, want))
    same = (have == want) | (have.isnan() & want.isnan())
    have, want = have.masked_fill(same, 0.0), want.masked_fill(want.isinf() | want.isnan(), 0.0)
    return float((have - want.masked_fill(same, 0.0)).norm() / want.norm().clamp_min(1e-30))


def gradient_error(have: Tensor | None, want: Tensor | None, scale: Tensor) -> float:
    """Norm-wise, relative to the gradient itself or to a millionth of the largest one."""
    if have is None or want is None:
        other = have if want is None else want
        return 0.0 if other is None or not other.any() else float("inf")
    return float((have - want).norm() / torch.maximum(want.norm(), 1e-6 * scale).clamp_min(1e-30))


def without_history(result: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, result)


def _detached(values: Sequence[Tensor]) -> list[Tensor]:
    return [value.detach() for value in values]


def _silenced(node: fx.Node, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return _without_chance(node.target, args, kwargs) if draws_random(node) else (args, kwargs)


def _without_chance(target: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Dropout that drops nothing."""
    args = list(args)
    if target is SDPA and len(args) > 4:
        args[4] = 0.0
    elif target is attention.banded_attention:
        args[6] = 0.0
    elif target in (aten.dropout.default, aten.native_dropout.default):
        args[1] = 0.0
    return tuple(args), kwargs


def _in_double(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a body that computes in float64 and draws nothing."""
    graph = double_graph(module.graph)
    for node in graph.nodes:
        target = getattr(node.target, "replays", None)
        if target is not None:
            _, _, *args = node.args
            node.target = target
            node.args, node.kwargs = _without_chance(target, tuple(args), node.kwargs)
    return fx.GraphModule(torch.nn.Module(), graph)
