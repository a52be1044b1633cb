"""Demand: what a segment has to compute, and from what.

Starting from the values a segment gives, requests are pushed from users to operands through the
rule rows, in reverse graph order. A request is a node with a placement; its *recipe* says how it
is met:

``Input``     the value is there whole (outer, or materialised before): take that part of it
``Compute``   run the op on operands of these placements
``ReadKeys``  a value of the stream is wanted along keys: compute the chunk's own rows, write them
              to a cache and read the range from it
``Narrow``    give all positions along a dim, and take a range of them
``Attend``    fused attention of the chunk's queries to a range of keys
``AttendByKernel``  the same by a kernel that others have written
``Stencil``   a shift, a causal convolution or a piece in blocks, of a window
``Scan``      a cumulative op or a recurrent function, whose state is carried

The cached read is put at the narrowest place above free ops: below a projection, but above
``expand`` for heads that share a key.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from seqsplit.ir.placement import Chunk, Kind, Placement, Prefix, Span, Whole
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.rewrite.stencils import STENCILS, reach_of, sequence_dim_of, windowed_of
from seqsplit.passes.rules.attention import SDPA, SOFTMAX, kernel_of
from seqsplit.passes.rules.registry import Unsplittable, arguments_of, contracted, operands_of, pull
from seqsplit.passes.rules.scans import SCANS, final_state_of, recurrence_of, scanned_dim
from seqsplit.passes.split.attend import Read, Reads
from seqsplit.passes.split.cut import summing_row

__all__ = [
    "AddedLater",
    "Attend",
    "AttendByKernel",
    "Compute",
    "Demands",
    "Input",
    "Narrow",
    "NeededWhole",
    "ReadKeys",
    "Recipe",
    "Scan",
    "Stencil",
    "demand",
]

aten = torch.ops.aten

# Ops that move or repeat values without computing: a cached read may be put above them.
_FREE = {
    aten.alias.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.expand.default,
    aten.flatten.using_ints,
    aten.permute.default,
    aten.repeat_interleave.self_int,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}


# Ops on labels and positions through which a part of a merged dim is taken.
_MERGES = _FREE | {aten.to.dtype, aten.to.dtype_layout, aten.to.device}


class NeededWhole(Exception):
    """A value is needed whole inside the segment that computes it.

    Attributes:
        node: the value.
        user: the first node, in graph order, that needs it so.
    """

    def __init__(self, node: fx.Node, user: fx.Node) -> None:
        super().__init__(f"{user} needs {node} whole")
        self.node = node
        self.user = user


class AddedLater(Exception):
    """A sum over chunks meets one that an earlier segment has completed.

    Attributes:
        node: the op that joins them; the outer graph has to run it.
    """

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"{node} joins sums of different segments")
        self.node = node


@dataclass(frozen=True)
class Input:
    """Take the part of a value that exists whole."""


@dataclass(frozen=True)
class Compute:
    """Run the op; ``operands`` are (node, placement) in the order of the schema."""

    operands: tuple[tuple[fx.Node, Placement], ...]


@dataclass(frozen=True)
class ReadKeys:
    """Read a range along ``dim`` from a cache of the node's own rows."""

    dim: int
    span: Span


@dataclass(frozen=True)
class Attend:
    """Fused attention of a chunk of queries.

    Attributes:
        operands: query, key, value and the mask if it is still needed.
        read: which keys.
        grouped: key and value are given with the heads they have, fewer than the query's.
        parts: key and value come as (before the chunk, the chunk's own).
    """

    operands: tuple[tuple[fx.Node, Placement], ...]
    read: Read
    grouped: bool
    parts: bool


@dataclass(frozen=True)
class AttendByKernel:
    """A chunk of queries for a kernel that others have written, which says itself what it sees."""

    operands: tuple[tuple[fx.Node, Placement], ...]
    read: Read


@dataclass(frozen=True)
class Stencil:
    """Rows that depend on a window of rows: ``operands`` are the windowed one and the weights."""

    operands: tuple[tuple[fx.Node, Placement], ...]


@dataclass(frozen=True)
class Scan:
    """A cumulative op, or a recurrent function, along ``dim``: its state is carried from chunk to
    chunk."""

    operands: tuple[tuple[fx.Node, Placement], ...]
    dim: int


@dataclass(frozen=True)
class Narrow:
    """Take ranges out of what the op gives for all positions along these dims."""

    whole: Placement
    spans: tuple[tuple[int, Span], ...]


Recipe = Input | Compute | ReadKeys | Attend | AttendByKernel | Stencil | Scan | Narrow


@dataclass
class Demands:
    """All requests of a segment: for each node, in reverse graph order, placement -> recipe."""

    recipes: dict[fx.Node, dict[Placement, Recipe]] = field(default_factory=dict)

    def items(self) -> Iterable[tuple[fx.Node, Placement, Recipe]]:
        """Requests in the order in which they can be met."""
        for node in reversed(self.recipes):  # requests came in reverse graph order
            # rows before what is read of them
            for placement in sorted(self.recipes[node], key=lambda p: p.has_keys):
                yield node, placement, self.recipes[node][placement]


def demand(
    facts: Facts,
    reads: Reads,
    targets: dict[fx.Node, Placement],
    available: set[fx.Node],
) -> Demands:
    """Find the recipes for ``targets``.

    Args:
        facts: of the graph.
        reads: its attentions.
        targets: the values that the segment gives.
        available: values that exist whole when the segment runs.

    Raises:
        Unsplittable: a node cannot give what is asked of it.
        NeededWhole: a value of this very segment is needed whole.
        AddedLater: an op on sums has to wait for an earlier segment's.
    """
    pushing = _Pushing(facts, reads, available)
    for node, placement in targets.items():
        pushing.request(node, placement)
    return pushing.run()


class _Pushing:
    def __init__(self, facts: Facts, reads: Reads, available: set[fx.Node]) -> None:
        self._facts = facts
        self._reads = reads
        self._available = available
        self._open: dict[fx.Node, dict[Placement, fx.Node | None]] = {}
        self._heap: list[tuple[int, fx.Node]] = []  # last node of the graph first

    def request(self, node: fx.Node, placement: Placement, user: fx.Node | None = None) -> None:
        if node not in self._open:
            self._open[node] = {}
            heapq.heappush(self._heap, (-self._facts.position[node], node))
        self._open[node].setdefault(placement, user)

    def run(self) -> Demands:
        demands = Demands()
        while self._heap:
            _, node = heapq.heappop(self._heap)
            recipes = demands.recipes[node] = {}
            waiting = self._open.pop(node)
            while waiting:
                placement, user = waiting.popitem()
                if placement in recipes:
                    continue
                recipes[placement] = recipe = self._recipe(node, placement, user)
                for operand, wanted in self._needs(node, recipe):
                    if operand is node:
                        waiting.setdefault(wanted, node)
                    else:
                        self._check_dims(node, operand, wanted)
                        self.request(operand, wanted, node)
        return demands

    def _needs(self, node: fx.Node, recipe: Recipe) -> list[tuple[fx.Node, Placement]]:
        match recipe:
            case Input():
                return []
            case ReadKeys(dim=dim):
                return [(node, Chunk(dim))]
            case Narrow(whole=whole):
                return [(node, whole)]
            case _:
                return list(recipe.operands)

    def _recipe(self, node: fx.Node, placement: Placement, user: fx.Node | None) -> Recipe:
        facts = self._facts
        if placement.partial and node in self._available:
            raise AddedLater(user)  # taken as a share, every chunk would add all of it
        if not facts.is_active(node) or node in self._available:
            if not any(span.merged for _, span in placement.spans):
                return Input()
            # The sequence inside a merged dim: better to take the part before the merge.
            if node.target not in _MERGES or node in self._available:
                if not all(span.separable for _, span in placement.spans):
                    raise Unsplittable(node, "the sequence lies inside a dim merged of three")
                return Input()
        in_stream = node in facts.stream
        if in_stream and not placement.has_rows and not placement.partial:
            place = self._narrowest(node, placement)
            if place is None and not placement.has_keys:
                pass  # free ops up to a value that is there whole
            elif not placement.has_keys:
                if place is node or place is None:
                    raise NeededWhole(node, user)
            elif place is node:
                (dim, span), *more = [i for i in placement.spans if i[1].kind is Kind.KEYS]
                if more or span.merged:
                    raise Unsplittable(node, "keys along more than one dim, or inside a merged one")
                return ReadKeys(dim, span)
        if node.target is SDPA and placement.has_rows:
            return self._attend(node, placement)
        if kernel_of(node.target) is not None and placement.has_rows:
            return self._kernel(node, placement)
        if node.target in STENCILS:
            dim = sequence_dim_of(node)
            if placement == Chunk(dim):
                window = Placement(((dim, Span(Kind.KEYS, reach_of(node) + 1)),))
                source, *others = operands_of(node)
                return Stencil(((source, window), *((other, Whole) for other in others)))
        if (scanned := _recurrence(node, placement)) is not None:
            operands = operands_of(node)
            return Scan(tuple(zip(operands, scanned.wanted(len(operands)))), scanned.dim)
        if (piece := windowed_of(node.target)) is not None and placement == Chunk(piece.out_dim):
            return Stencil(
                tuple(
                    (operand, Whole if dim is None else Prefix(dim, piece.window))
                    for operand, dim in zip(operands_of(node), piece.operand_dims)
                )
            )
        if node.target in SCANS:
            dim = scanned_dim(node)
            if placement == Chunk(dim):
                return Scan(tuple((operand, Chunk(dim)) for operand in operands_of(node)), dim)
        try:
            operands = self._operands(node, placement)
        except Unsplittable:
            keys = tuple(i for i in placement.spans if i[1].kind is Kind.KEYS and not i[1].merged)
            if not keys or not placement.has_rows:
                raise
            # The chunk's rows of an op that mixes what they are compared with (a selection of
            # keys): for all positions there, of which a range is taken.
            rest = tuple(item for item in placement.spans if item not in keys)
            return Narrow(Placement(rest), keys)
        return Compute(tuple(zip(operands_of(node), operands, strict=True)))

    def _operands(self, node: fx.Node, placement: Placement) -> tuple[Placement, ...]:
        facts, operands = self._facts, operands_of(node)
        if placement.partial:
            row = summing_row(facts, node)
            if row is None:
                raise Unsplittable(node, f"{node.target} is not a sum over chunks")
            return row
        if not placement.spans:
            return (Whole,) * len(operands)
        masked = self._reads.zero_beyond.get(node, {})
        asked, beyond = placement, Whole
        if node.target in SOFTMAX:
            inside = {d: s for d, s in placement.spans if masked.get(d) == s}
            beyond = Placement(tuple(inside.items()))
            asked = Placement(tuple(i for i in placement.spans if i[0] not in inside))
        result = [p | beyond for p in pull(node, asked, facts.shape)]
        span = self._reads.contracted.get(node)
        if span is not None:
            result = [p | q for p, q in zip(result, contracted(node, span, facts.shape))]
        return tuple(result)

    def _check_dims(self, node: fx.Node, operand: fx.Node, wanted: Placement) -> None:
        """A split dim has to be the sequence (or a table that is as long as it likes)."""
        if not self._facts.is_tensor(operand):
            return
        shape = self._facts.shape(operand)
        for dim, span in wanted.spans:
            middle = sympy.cancel(shape[dim] / (span.outer * span.inner))
            if not (middle - self._facts.sequence).is_Integer:
                raise Unsplittable(
                    node, f"{node.target} lines up the sequence with a dim of size {shape[dim]}"
                )

    def _narrowest(self, node: fx.Node, placement: Placement) -> fx.Node | None:
        """Where up a chain of free ops a value is smallest; ``None`` if the chain reaches a
        value that is there whole."""
        facts, best, best_size = self._facts, node, self._numel(node)
        while node not in self._available and (source := self._moved(node)) is not None:
            try:
                pulled = pull(node, placement, facts.shape)
            except Unsplittable:
                return best
            placement = pulled[operands_of(node).index(source)]
            if source in self._available or not facts.is_active(source):
                return None
            if source not in facts.stream or not facts.is_tensor(source):
                return best
            node = source
            merged = any(span.merged for _, span in placement.spans)
            if self._numel(node) < best_size and not merged:
                best, best_size = node, self._numel(node)
        return best

    def _moved(self, node: fx.Node) -> fx.Node | None:
        """What a free op moves: also the only value of the stream in a ``cat`` (keys that learned
        ones are put before)."""
        if node.target in _FREE:
            return node.args[0]
        if node.target is not aten.cat.default:
            return None
        streams = [operand for operand in operands_of(node) if operand in self._facts.stream]
        return streams[0] if len(streams) == 1 else None

    def _numel(self, node: fx.Node) -> float:
        if not self._facts.is_tensor(node):
            return float("inf")
        return self._facts.lowered.numel(node)

    def _attend(self, node: fx.Node, placement: Placement) -> Recipe:
        arguments = arguments_of(node)
        query, key, value = (arguments[name] for name in ("query", "key", "value"))
        rank = node.meta["val"].ndim
        others = [item for item in placement.spans if item[0] != rank - 2]
        if others or placement.dims.get(rank - 2, Span(Kind.KEYS)).kind is not Kind.ROWS:
            return Compute(tuple(zip(operands_of(node), pull(node, placement, self._facts.shape))))
        read = self._reads.fused.get(node, Read(None))
        if self._facts.shape(query)[-2] != self._facts.shape(key)[-2] and arguments["is_causal"]:
            raise Unsplittable(node, "is_causal between sequences of different lengths")
        grouped, key, value = self._ungrouped(query, key, value, arguments["enable_gqa"])
        keys = Placement(((rank - 2, read.span),)) if read.span is not None else Whole
        operands = [(query, Chunk(rank - 2)), (key, keys), (value, keys)]
        mask = arguments["attn_mask"]
        if isinstance(mask, fx.Node) and not read.causal:
            operands.append((mask, self._mask_placement(mask, read)))
        plain = read.causal and read.span.window is None and arguments["dropout_p"] == 0.0
        return Attend(tuple(operands), read, grouped, parts=plain)

    def _kernel(self, node: fx.Node, placement: Placement) -> Recipe:
        kernel, operands = kernel_of(node.target), operands_of(node)
        if placement != Chunk(kernel.dim):
            return Compute(tuple(zip(operands, pull(node, placement, self._facts.shape))))
        read = self._reads.fused.get(node, Read(None))
        if kernel.counts_from_last and read.span is None:
            raise Unsplittable(node, "causal attention between sequences of different lengths")
        keys = Placement(((kernel.dim, read.span),)) if read.span is not None else Whole
        wanted = dict(enumerate([Whole] * len(operands)))
        wanted[kernel.places["query"]] = Chunk(kernel.dim)
        wanted[kernel.places["key"]] = wanted[kernel.places["value"]] = keys
        return AttendByKernel(tuple(zip(operands, wanted.values())), read)

    def _mask_placement(self, mask: fx.Node, read: Read) -> Placement:
        shape = self._facts.shape(mask)
        rank, wanted = len(shape), Whole
        if rank >= 2 and shape[-2] != 1:
            wanted = wanted | Chunk(rank - 2)
        if read.span is not None and shape[-1] != 1:
            wanted = wanted | Placement(((rank - 1, read.span),))
        return wanted

    def _ungrouped(
        self, query: fx.Node, key: fx.Node, value: fx.Node, enable_gqa: bool
    ) -> tuple[bool, fx.Node, fx.Node]:
        """Key and value before their heads were repeated: the kernels share heads themselves."""
        if enable_gqa or query.meta["val"].ndim != 4:
            return enable_gqa, key, value
        plain = [self._before_repeat(node) for node in (key, value)]
        if None in plain or self._facts.shape(plain[0])[1] != self._facts.shape(plain[1])[1]:
            return False, key, value
        return True, *plain

    def _before_repeat(self, node: fx.Node) -> fx.Node | None:
        """``x`` for ``[B, G, T, E] -> [B, G, n, T, E] -> [B, G * n, T, E]``."""
        facts = self._facts
        node = _through(node, _is_copy(facts))
        if node.target is aten.repeat_interleave.self_int:
            source, _, dim = (*node.args, None)[:3]
            return source if dim is not None and dim % 4 == 1 else None
        if node.target not in (aten.reshape.default, aten.view.default):
            return None
        expanded = node.args[0]
        if not isinstance(expanded, fx.Node) or expanded.target is not aten.expand.default:
            return None
        batch, heads, repeats, length, width = (*facts.shape(expanded), *[None] * 5)[:5]
        if expanded.meta["val"].ndim != 5 or facts.shape(node) != (
            batch, heads * repeats, length, width,
        ):  # fmt: skip
            return None
        source = _through(expanded.args[0], _is_copy(facts))
        if facts.shape(source) != (batch, heads, 1, length, width):
            return None
        if source.target is not aten.unsqueeze.default or source.args[1] % 5 != 2:
            return None
        return _through(source.args[0], _is_copy(facts))


def _recurrence(node: fx.Node, placement: Placement) -> Any:
    """The recurrent function of which a node is asked for a chunk's rows, or for its share of the
    final state."""
    if placement.partial:
        return final_state_of(node.target)
    recurrence = recurrence_of(node.target)
    return recurrence if recurrence and placement == Chunk(recurrence.dim) else None


def _is_copy(facts: Facts) -> Callable[[fx.Node], bool]:
    def test(node: fx.Node) -> bool:
        if node.target in (aten.contiguous.default, aten.clone.default, aten.alias.default):
            return True
        return node.target is aten.slice.Tensor and facts.shape(node) == facts.shape(node.args[0])

    return test


def _through(node: fx.Node, test: Callable[[fx.Node], bool]) -> Any:
    while test(node):
        node = node.args[0]
    return node
