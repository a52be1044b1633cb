"""Split: write the chunk body of a segment from its demands.

Requests are met in graph order, each by one node of the body's graph. Sizes are written anew: the
sequence's length becomes the chunk's on a dim of rows and the prefix's on a dim of keys.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from seqsplit.ir.placement import Kind, Placement, Span
from seqsplit.ir.plan import Body, BodyInput, BodyOutput, CacheSpec
from seqsplit.ops import attention, caches, replay, stencil, views, weights
from seqsplit.passes.analysis.facts import Facts, draws_random
from seqsplit.passes.graph.lowered import Region
from seqsplit.passes.graph.sizes import OPERATORS, write_expression
from seqsplit.passes.rewrite.stencils import windowed_of
from seqsplit.passes.rules.registry import (
    Unsplittable,
    arguments_of,
    operands_of,
    rewrite_arguments,
    takes_double,
)
from seqsplit.passes.rules.scans import SCANS
from seqsplit.passes.split.demand import (
    Attend,
    AttendByKernel,
    Compute,
    Demands,
    Input,
    Narrow,
    ReadKeys,
    Recipe,
    Scan,
    Stencil,
)
from seqsplit.passes.split.unread import without_unread
from seqsplit.passes.stateful.calls import on_chunk

__all__ = ["SplitSegment", "split"]

aten = torch.ops.aten

# Where products have their first factor, their second, which may be a weight, and what is added.
_FACTORS = {
    aten.matmul.default: (0, 1),
    aten.mm.default: (0, 1),
    aten.addmm.default: (1, 2, 0),
}


@dataclass(frozen=True)
class SplitSegment:
    """A chunk body with where its inputs come from.

    Attributes:
        body: the code.
        operands: nodes of the lowered graph that are the segment's tensor operands.
        sizes: symbols whose values the body takes.
    """

    body: Body
    operands: tuple[fx.Node, ...]
    sizes: tuple[sympy.Symbol, ...]


def split(facts: Facts, demands: Demands, targets: dict[fx.Node, Placement]) -> SplitSegment:
    """Write the body that gives ``targets``."""
    return _Writer(facts).write(demands, targets)


class _Writer:
    """Builds one body. Also the ``chunk`` that rules see when they rewrite arguments."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._graph = fx.Graph()
        self._start = self._graph.placeholder("start")
        self._end = self._graph.placeholder("end")
        self._length = self._graph.placeholder("length")
        self._last_placeholder = self._length
        self._sizes: dict[sympy.Symbol, fx.Node] = {}
        self._inputs: dict[tuple[fx.Node, Placement], fx.Node] = {}
        self._weights: set[fx.Node] = set()  # inputs that every chunk takes whole
        self._caches: list[tuple[CacheSpec, fx.Node]] = []
        self._reads: list[fx.Node] = []
        self._replay: fx.Node | None = None
        self._num_random = self._num_attentions = 0
        self._in_half = False
        self._values: dict[tuple[fx.Node, Placement], fx.Node] = {}
        self._parts: dict[tuple[fx.Node, Placement], tuple[fx.Node, fx.Node]] = {}
        self._memo: dict[tuple, Any] = {}
        self._wanted_in_parts: set[tuple[fx.Node, Placement]] = set()
        self._trace: list[str] = []

    # -- what rules may ask ------------------------------------------------------------------

    def shape(self, node: fx.Node) -> tuple[sympy.Expr, ...]:
        return self._facts.shape(node)

    def is_sequence(self, size: sympy.Expr) -> bool:
        return self._facts.is_sequence(size)

    def add(self, left: Any, right: Any) -> Any:
        return self._arithmetic(operator.add, left, right)

    def subtract(self, left: Any, right: Any) -> Any:
        return self._arithmetic(operator.sub, left, right)

    def first(self, span: Span) -> Any:
        """The position at which a span begins."""
        if span.kind is Kind.ROWS:
            return self._start
        if span.window is None:
            return 0
        return self._call(caches.keys_start, self._start, span.window)

    def size(self, size: sympy.Expr, span: Span | None = None) -> Any:
        """A size of the chunk's own tensor, as a number or a node."""
        if span is None:
            return self._expression(size)
        surplus = sympy.cancel(size / (span.outer * span.inner)) - self._facts.sequence
        if not surplus.is_Integer:
            raise ValueError("a length that does not grow with the sequence alone")
        surplus = int(surplus)
        first, last = self.first(span), self._end
        if surplus < 0:  # the last chunk ends earlier
            bound = self.add(self._length, surplus)
            first, last = self._call(min, first, bound), self._call(min, last, bound)
        elif surplus > 0:
            raise ValueError("a value longer than the sequence cannot be cut into its chunks")
        length = self.subtract(last, first)
        factors = self._expression(span.outer * span.inner)
        return self._arithmetic(operator.mul, length, factors)

    def sizes(self, node: fx.Node, placement: Placement) -> list[Any]:
        """The shape of the chunk's own tensor."""
        spans = placement.dims
        return [self.size(size, spans.get(dim)) for dim, size in enumerate(self.shape(node))]

    # -- writing -----------------------------------------------------------------------------

    def write(self, demands: Demands, targets: dict[fx.Node, Placement]) -> SplitSegment:
        """Write every request, then close the graph."""
        requests = list(demands.items())
        users = [r for _, _, r in requests if not isinstance(r, (Input, ReadKeys, Narrow))]
        in_parts = {i for r in users if _takes_parts(r) for i in r.operands[1:3]}
        in_one = {i for r in users for i in r.operands if not _takes_parts(r)}
        self._wanted_in_parts = in_parts - in_one
        for node, placement, recipe in requests:
            match recipe:
                case Input():
                    self._values[node, placement] = self._input(node, placement)
                case ReadKeys():
                    self._read(node, placement, recipe)
                case Compute():
                    self._values[node, placement] = self._compute(node, placement, recipe)
                case Attend():
                    self._values[node, placement] = self._attend(node, recipe)
                case AttendByKernel():
                    self._values[node, placement] = self._kernel(node, recipe)
                case Narrow():
                    value = self._values[node, recipe.whole]
                    for dim, span in recipe.spans:
                        first = self.first(span)
                        value = self._call(aten.slice.Tensor, value, dim, first, self._end)
                    self._values[node, placement] = value
                case Stencil():
                    self._values[node, placement] = self._stencil(node, recipe)
                case Scan():
                    self._values[node, placement] = self._scan(node, recipe)
        outputs = tuple(self._values[item] for item in targets.items())
        return self._close(targets, outputs)

    def _close(self, targets: dict[fx.Node, Placement], outputs: tuple) -> SplitSegment:
        """Make the modules. Inputs are numbered by first use, so that equal layers look equal."""
        self._replay = self._replay or self._placeholder("replay")
        first_use: dict[fx.Node, int] = {}
        for index, node in enumerate(self._graph.nodes):
            for operand in node.all_input_nodes:
                first_use.setdefault(operand, index)
        for index, node in enumerate(outputs):
            first_use.setdefault(node, len(first_use) + index)
        sizes = sorted(self._sizes, key=lambda symbol: first_use[self._sizes[symbol]])
        inputs = sorted(self._inputs, key=lambda item: first_use[self._inputs[item]])
        operands = list(dict.fromkeys(node for node, _ in inputs))
        placeholders = {
            self._start: "start",
            self._end: "end",
            self._length: "length",
            **{self._sizes[symbol]: f"size_{i}" for i, symbol in enumerate(sizes)},
            **{self._inputs[item]: f"in_{i}" for i, item in enumerate(inputs)},
            **{node: f"cache_{i}" for i, (_, node) in enumerate(self._caches)},
            self._replay: "replay",
        }
        module = _finish(self._graph, placeholders, outputs)
        fill = _finish(self._graph, placeholders, tuple(self._reads)) if self._reads else None
        specs = tuple(
            BodyInput(operands.index(node), placement, self._surplus(node, placement))
            for node, placement in inputs
        )
        body = Body(
            module=module,
            fill=fill,
            visit=without_unread(module, caches_filled=True),
            visit_last=without_unread(module, caches_filled=False),
            inputs=specs,
            outputs=tuple(self._output(node, p) for node, p in targets.items()),
            caches=tuple(spec for spec, _ in self._caches),
            num_random=self._num_random,
            fingerprint=self._fingerprint(module, specs, (*operands, *targets)),
            in_half=self._in_half,
            fills_alone=self._fills_alone(),
        )
        return SplitSegment(body, tuple(operands), tuple(sizes))

    def _fills_alone(self) -> bool:
        reads = set(self._reads)
        return not any(reads & _ancestors(tuple(node.all_input_nodes)) for node in reads)

    def _surplus(self, node: fx.Node, placement: Placement) -> int:
        for dim, span in placement.spans:
            size = self.shape(node)[dim]
            surplus = sympy.cancel(size / (span.outer * span.inner)) - self._facts.sequence
            if not surplus.is_Integer:
                raise Unsplittable(node, f"a value of length {size} enters the segment")
            return int(surplus)
        return 0

    def _output(self, node: fx.Node, placement: Placement) -> BodyOutput:
        needs_grad = node in self._facts.needs_grad
        if placement.partial:
            return BodyOutput(placement, 0, needs_grad, scalar=not self.shape(node))
        span = placement.dims[placement.rows_dim]
        size = self.shape(node)[placement.rows_dim]
        surplus = sympy.cancel(size / (span.outer * span.inner)) - self._facts.sequence
        if not surplus.is_Integer or surplus > 0 or not span.separable:
            raise Unsplittable(node, f"a value of length {size} leaves the segment")
        return BodyOutput(placement, int(surplus), needs_grad)

    def _fingerprint(
        self, module: fx.GraphModule, specs: tuple[BodyInput, ...], values: tuple[fx.Node, ...]
    ) -> str:
        shapes = [
            f"{self.shape(node)} {node.meta['val'].dtype} {node in self._facts.needs_grad}"
            for node in values
        ]
        text = "\n".join([module.code, repr(specs), *shapes, *self._trace])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _input(self, node: fx.Node, placement: Placement) -> fx.Node:
        if (node, placement) not in self._inputs:
            new = self._placeholder(f"in_{len(self._inputs)}")
            new.meta["constant"] = node not in self._facts.needs_grad
            self._inputs[node, placement] = new
            if not placement.spans:
                self._weights.add(new)
        return self._inputs[node, placement]

    def _read(self, node: fx.Node, placement: Placement, recipe: ReadKeys) -> None:
        rows = Placement(((recipe.dim, Span()),))
        cache = self._new_cache(CacheSpec(recipe.dim, window=recipe.span.window))
        x, first = self._values[node, rows], self.first(recipe.span)
        if (node, placement) in self._wanted_in_parts:
            both = self._call(
                caches.cached_parts, x, cache, first, self._start, self._end, once=False
            )
            self._reads.append(both)
            self._parts[node, placement] = (
                self._call(operator.getitem, both, 0),
                self._call(operator.getitem, both, 1),
            )
        else:
            read = self._call(
                caches.cached_read, x, cache, first, self._start, self._end, once=False
            )
            self._reads.append(read)
            self._values[node, placement] = read

    def _compute(self, node: fx.Node, placement: Placement, recipe: Compute) -> fx.Node:
        given = iter([self._values[item] for item in recipe.operands])
        probed = not isinstance(node.target, torch._ops.OpOverload)
        arguments = {
            name: self._own(value, given, chunk_sizes=probed)
            for name, value in arguments_of(node).items()
        }
        if isinstance(node.target, torch._ops.OpOverload):
            try:
                arguments = rewrite_arguments(node, placement, arguments, self)
            except ValueError as error:
                raise Unsplittable(node, f"{node.target} takes {error}") from None
            args, kwargs = _as_call(node.target, arguments)
        else:
            args, kwargs = tuple(arguments.values()), {}
        target = views.sliced if node.target is aten.slice.Tensor else node.target
        if not kwargs and (by_weight := self._by_weight(node, args)) is not None:
            target, args = by_weight
        new = self._op(node, target, args, kwargs)
        if not takes_double(node, self.shape):
            new.meta["own"] = [operand.meta["val"] for operand in operands_of(node)]
        return new

    def _by_weight(self, node: fx.Node, args: tuple) -> tuple[Callable, tuple] | None:
        """The call of a product with a weight that adds that one's gradient where the sum is."""
        if node.target is aten.linear.default and args[1] in self._weights:
            return weights.linear, args
        places = _FACTORS.get(node.target)
        if places is None or args[places[1]] not in self._weights:
            return None
        given = list(arguments_of(node).values())
        rank, *others = (len(self.shape(given[place])) for place in places)
        if rank < 2 or others not in ([2], [2, 1]):
            return None
        return weights.product, tuple(args[place] for place in places)

    def _attend(self, node: fx.Node, recipe: Attend) -> fx.Node:
        arguments = arguments_of(node)
        scale, dropout_p = arguments["scale"], arguments["dropout_p"]
        query, *rest = recipe.operands
        q = self._values[query]
        if recipe.parts:
            (kb, k), (vb, v) = (self._in_parts(item) for item in rest[:2])
            self._replay = self._replay or self._placeholder("replay")
            slot, self._num_attentions = self._num_attentions, self._num_attentions + 1
            args = (q, kb, k, vb, v, scale, recipe.grouped, self._replay, slot)
            return self._op(node, attention.causal_attention, args, {})
        k, v = (self._values[item] for item in rest[:2])
        if recipe.read.causal:
            first = self.first(recipe.read.span)
            args = (q, k, v, self._start, first, recipe.read.span.window, dropout_p, scale)
            return self._op(node, attention.banded_attention, (*args, recipe.grouped), {})
        mask = self._values[rest[2]] if len(rest) > 2 else None
        kwargs = {"scale": scale, "enable_gqa": recipe.grouped}
        return self._op(node, node.target, (q, k, v, mask, dropout_p), kwargs)

    def _kernel(self, node: fx.Node, recipe: AttendByKernel) -> fx.Node:
        given = iter([self._values[item] for item in recipe.operands])
        operands = [self._own(value, given) for value in node.args]
        first = self.first(recipe.read.span) if recipe.read.span is not None else 0
        return self._op(node, node.target.rows, (self._start, first, self._end, *operands), {})

    def _stencil(self, node: fx.Node, recipe: Stencil) -> fx.Node:
        if (piece := windowed_of(node.target)) is not None:
            return self._windowed(node, recipe, piece.window)
        given = iter([self._values[item] for item in recipe.operands])
        args = [self._own(value, given) for value in node.args]
        (_, span), *_ = recipe.operands[0][1].spans
        if node.target is stencil.shift:
            args += [self._start, self.first(span), self._end]
            return self._op(node, stencil.shift_rows, tuple(args), {})
        args += [self._start, self.first(span)]
        return self._op(node, stencil.causal_conv1d_rows, tuple(args), {})

    def _windowed(self, node: fx.Node, recipe: Stencil, window: int) -> fx.Node:
        given = iter([self._values[item] for item in recipe.operands])
        operands = [self._own(value, given) for value in node.args]
        first = self.first(Span(Kind.KEYS, window))
        return self._op(node, node.target.rows, (self._start, first, self._end, *operands), {})

    def _scan(self, node: fx.Node, recipe: Scan) -> fx.Node:
        if node.target not in SCANS:
            return self._recurrent(node, recipe)
        operands = [self._values[item] for item in recipe.operands]
        dtype = node.meta["val"].dtype
        for index, (operand, _) in enumerate(recipe.operands):
            if operand.meta["val"].dtype != dtype:
                operands[index] = self._op(node, aten.to.dtype, (operands[index], dtype), {})
        carry = self._new_cache(CacheSpec(recipe.dim, carries=True))
        out = self._op(node, SCANS[node.target], (*operands, carry, recipe.dim, self._start), {})
        self._reads.append(out)
        return out

    def _recurrent(self, node: fx.Node, recipe: Scan) -> fx.Node:
        """The output or the final state, from one call for both."""
        recurrence, given = node.target.recurs, iter([self._values[i] for i in recipe.operands])
        operands = [self._own(value, given) for value in node.args]
        key = (id(recurrence), *operands)
        if key not in self._memo:
            carry = self._new_cache(CacheSpec(recipe.dim, carries=True))
            args = (carry, self._start, self._end, self._length, *operands)
            both = self._memo[key] = self._op(node, on_chunk(recurrence), args, {})
            if not takes_double(node, self.shape):
                both.meta["own"] = [operand.meta["val"] for operand in operands_of(node)]
            self._reads.append(both)
        return self._call(operator.getitem, self._memo[key], node.target.gives)

    def _new_cache(self, spec: CacheSpec) -> fx.Node:
        cache = self._placeholder(f"cache_{len(self._caches)}")
        self._caches.append((spec, cache))
        self._trace.append(repr(spec))
        return cache

    def _in_parts(self, item: tuple[fx.Node, Placement]) -> tuple[fx.Node, fx.Node]:
        """Keys before the chunk and the chunk's own."""
        if item not in self._parts:
            dim = next(iter(item[1].dims))
            value = self._values[item]
            before = self._call(aten.slice.Tensor, value, dim, 0, self._start)
            own = self._call(aten.slice.Tensor, value, dim, self._start, self._end)
            self._parts[item] = (before, own)
        return self._parts[item]

    def _op(self, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> fx.Node:
        """Write one op under the contexts it was traced under."""
        region: Region = node.meta["region"]
        self._in_half |= getattr(node.meta["val"], "dtype", None) == torch.float16
        self._in_half |= any(torch.float16 in context for context in region.autocast)
        if not region.grad and target is not operator.getitem:
            args, kwargs = fx.node.map_arg((args, kwargs), self._detached)
        contexts = [
            self._graph.call_function(torch.amp.autocast_mode._enter_autocast, autocast)
            for autocast in region.autocast
        ]
        if draws_random(node):
            self._replay = self._replay or self._placeholder("replay")
            args = (self._replay, self._num_random, *args)
            target = replay.replayed(target)
            self._num_random += 1
        new = self._graph.call_function(target, args, kwargs)
        new.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")}
        new.meta["constant"] = node not in self._facts.needs_grad
        for context in reversed(contexts):
            self._graph.call_function(torch.amp.autocast_mode._exit_autocast, (context,))
        self._trace.append(
            getattr(node.target, "fingerprint", "") and repr(node.target.fingerprint)
        )
        return new

    def _detached(self, value: fx.Node) -> fx.Node:
        if value in self._plain_values():
            return value
        return self._call(aten.detach.default, value)

    def _plain_values(self) -> set[fx.Node]:
        """Nodes of the body that are no tensors."""
        caches = (node for _, node in self._caches)
        numbers = (self._start, self._end, self._length, *self._sizes.values())
        return {*numbers, *caches, self._replay} | {
            n for n in self._memo.values() if isinstance(n, fx.Node) and n.target in _NUMBERS
        }

    def _own(self, value: Any, given: Any, *, chunk_sizes: bool = False) -> Any:
        """An argument of the chunk's own call.

        Args:
            value: of the original call.
            given: the chunk's tensors, in order.
            chunk_sizes: whether a size that is given as a number is to be the chunk's.
        """
        if isinstance(value, fx.Node):
            held = value.meta.get("val")
            if isinstance(held, (torch.Tensor, tuple, list)):
                return next(given)
            if isinstance(held, torch.SymInt):
                expr = self._facts.lowered.expr(held)
                if chunk_sizes and expr == self._facts.sequence:
                    return self.size(expr, Span())
                return self._expression(expr)
            return held
        if isinstance(value, (list, tuple)):
            return type(value)(self._own(item, given, chunk_sizes=chunk_sizes) for item in value)
        return value

    # -- numbers -----------------------------------------------------------------------------

    def _expression(self, expr: sympy.Expr) -> Any:
        """A size of the whole values, as a number or a node."""
        return write_expression(expr, self._symbol, self._arithmetic)

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        if symbol == self._facts.sequence:
            return self._length
        if symbol not in self._sizes:
            self._sizes[symbol] = self._placeholder(f"size_{len(self._sizes)}")
        return self._sizes[symbol]

    def _arithmetic(self, function: Callable, left: Any, right: Any) -> Any:
        if not isinstance(left, fx.Node) and not isinstance(right, fx.Node):
            return function(left, right)
        neutral = 1 if function is operator.mul else 0
        if right == neutral and function in (operator.add, operator.sub, operator.mul):
            return left
        return self._call(function, left, right)

    def _call(self, function: Callable, *args: Any, once: bool = True) -> fx.Node:
        key = (function, *args)
        if not once or key not in self._memo:
            self._memo[key] = self._graph.call_function(function, args)
        return self._memo[key]

    def _placeholder(self, name: str) -> fx.Node:
        with self._graph.inserting_after(self._last_placeholder):
            self._last_placeholder = self._graph.placeholder(name)
        return self._last_placeholder


def _takes_parts(recipe: Recipe) -> bool:
    return isinstance(recipe, Attend) and recipe.parts


_NUMBERS = {*OPERATORS.values(), operator.sub, caches.keys_start}


def _as_call(target: torch._ops.OpOverload, arguments: dict[str, Any]) -> tuple[tuple, dict]:
    args, kwargs = [], {}
    for argument in target._schema.arguments:
        value = arguments[argument.name]
        if argument.kwarg_only:
            if not argument.has_default_value() or value != argument.default_value:
                kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _finish(graph: fx.Graph, placeholders: dict[fx.Node, str], outputs: tuple) -> fx.GraphModule:
    """A module with exactly these inputs, in this order, and these outputs."""
    new, copies = fx.Graph(), {}
    for node, name in placeholders.items():
        copies[node] = new.placeholder(name)
        copies[node].meta = dict(node.meta)
    needed = _ancestors(outputs)
    for node in graph.nodes:
        context = getattr(node.target, "__name__", "") in ("_enter_autocast", "_exit_autocast")
        if node.op != "placeholder" and (node in needed or context):
            copies[node] = new.node_copy(node, copies.__getitem__)
    new.output(tuple(copies[node] for node in outputs))
    new.lint()
    return fx.GraphModule(torch.nn.Module(), new, class_name="ChunkBody")


def _ancestors(outputs: tuple) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed
