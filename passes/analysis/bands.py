"""Which keys a mask lets through, read from the mask's own expression.

An abstract evaluation of the nodes that build a mask. Each value is known as one of

``Affine``  a number that is a sum of its own indices (``arange`` and arithmetic on it)
``Band``    a boolean (or 0/1) that depends on the key's distance from the query
``Bias``    a number that is -inf (or the dtype's minimum) outside a band

or not at all (``None``). A band is two intervals of ``key - query``: where the mask *may* let a
pair through, and where it *surely* does; combining it with unknown conditions (padding,
documents) only ever shrinks the second. Causality is proved if no key after the query may pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from seqsplit.ir.assumptions import BandedTable, band_of
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.analysis.tables import stored_tables
from seqsplit.passes.rules.registry import arguments_of, rows_of

__all__ = ["Affine", "Band", "Bands", "Bias"]

aten = torch.ops.aten

Interval = tuple[float, float]
EVERYWHERE: Interval = (-math.inf, math.inf)

# A finite fill this low vanishes in any softmax that has one ordinary entry (float32 and wider
# exponents); smaller ones may be legitimate scores.
_ABSORBING = -1e37


@dataclass(frozen=True)
class Affine:
    """``const + sum(coefficient * index of dim)``."""

    coefficients: tuple[tuple[int, float], ...] = ()
    const: float = 0.0

    @property
    def is_const(self) -> bool:
        return not self.coefficients


@dataclass(frozen=True)
class Band:
    """True only for ``key - query`` in ``possible``, and surely in ``certain`` (may be None)."""

    query: int
    key: int
    possible: Interval = EVERYWHERE
    certain: Interval | None = None

    @property
    def exact(self) -> bool:
        return self.possible == self.certain


@dataclass(frozen=True)
class Bias:
    """``fill`` outside the band; inside it, zero if ``pure`` (else anything)."""

    band: Band
    fill: float
    pure: bool = False


class Bands:
    """Evaluates mask expressions of one graph, remembering what it found."""

    def __init__(self, facts: Facts, examples: Sequence[Any] = ()) -> None:
        self._facts = facts
        self._tables = stored_tables(facts.lowered, examples)
        self.assumptions: list[BandedTable] = []  # that what was found rests on
        self._known: dict[fx.Node, Affine | Band | Bias | None] = {}

    def of(self, value: Any) -> Affine | Band | Bias | None:
        """What is known of a node (or of a number that stands in its place)."""
        if isinstance(value, bool):
            return Affine(const=float(value))
        if isinstance(value, (int, float)):
            return Affine(const=float(value))
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
            return None
        stack = [value]
        while stack:  # without recursion: mask expressions hang on long chains
            node = stack[-1]
            if node in self._known:
                stack.pop()
                continue
            pending = [
                i
                for i in node.all_input_nodes
                if i not in self._known and isinstance(i.meta.get("val"), torch.Tensor)
            ]
            if pending and node.target in _TRANSFER:
                stack.extend(pending)
                continue
            transfer = _TRANSFER.get(node.target)
            if node in self._tables:
                known = self._table(node)
            else:
                known = transfer(self, node, arguments_of(node)) if transfer else None
            if isinstance(known, Affine) and known.coefficients and not _counts_exactly(node):
                known = None
            self._known[node] = known
            stack.pop()
        return self._known[value]

    def _table(self, node: fx.Node) -> Band | Bias | None:
        """A mask that the model keeps in a buffer, told by its values."""
        index, value = self._tables[node]
        found = band_of(value)
        if found is None:
            return None
        low, high, outside = found
        if outside != 0.0 and outside > _ABSORBING:
            return None
        if index is not None:  # a constant stays what it is
            self.assumptions.append(BandedTable(index, value, found))
        band = Band(value.dim() - 2, value.dim() - 1, (low, high), (low, high))
        return band if outside == 0.0 else Bias(band, outside, pure=True)

    def may_hide(self, value: Any) -> bool:
        """Whether a term may hold numbers so low that they hide a score, as masks do.

        They come from a constant or from a float input along the sequence; the results of
        contractions, norms and the like are ordinary numbers.
        """
        stack, seen = [value], set()
        while stack:
            node = stack.pop()
            if isinstance(node, (int, float)) and node <= _ABSORBING:
                return True
            if not isinstance(node, fx.Node) or node in seen or node.target in _ORDINARY:
                continue
            seen.add(node)
            held = node.meta.get("val")
            if not isinstance(held, torch.Tensor) or not held.is_floating_point():
                continue  # conditions and counts hide nothing by themselves
            if node.op != "call_function":
                if self._facts.sequence_dims(node):
                    return True
            elif node.target in _PRODUCTS_ADDED:
                stack.append(node.args[0])
            else:
                stack.extend(_leaves(node))
        return False

    def rank(self, node: Any) -> int:
        return node.meta["val"].ndim if isinstance(node, fx.Node) else 0

    def shape(self, node: fx.Node) -> tuple:
        return self._facts.shape(node)

    def through_rows(self, node: fx.Node, source: fx.Node, value: Any) -> Any:
        """Carry what is known through an op that only renames dims."""
        moved = {}
        for row in rows_of(node, self._facts.shape):
            if row.exact_factors or not row.operands or not row.operands[0].spans:
                continue
            moved.setdefault(row.operands[0].spans[0][0], row.out.spans[0][0])
        sizes = self.shape(source)
        return _relabel(value, moved, {dim for dim, size in enumerate(sizes) if size == 1})


# Ops whose results are ordinary numbers, whatever is known of their operands.
_ORDINARY = {
    aten.bmm.default,
    aten.cos.default,
    aten.einsum.default,
    aten.embedding.default,
    aten.layer_norm.default,
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.sigmoid.default,
    aten.sin.default,
    aten.softmax.int,
    aten._softmax.default,
    aten.tanh.default,
}
_PRODUCTS_ADDED = {aten.addmm.default, aten.baddbmm.default}  # ordinary but for the first operand


def _leaves(node: fx.Node) -> list[Any]:
    return torch.utils._pytree.tree_leaves((node.args, node.kwargs))


def _counts_exactly(node: fx.Node) -> bool:
    """Whether a dtype tells neighbouring positions of a long sequence apart."""
    return node.meta["val"].dtype in (torch.int32, torch.int64, torch.float32, torch.float64)


def _relabel(value: Any, moved: dict[int, int], single: set[int]) -> Any:
    if isinstance(value, Affine):
        kept = []
        for dim, coefficient in value.coefficients:
            if dim in moved:
                kept.append((moved[dim], coefficient))
            elif dim not in single:
                return None
        return Affine(tuple(sorted(kept)), value.const)
    if isinstance(value, Band):
        if value.query not in moved or value.key not in moved:
            return None
        return replace(value, query=moved[value.query], key=moved[value.key])
    if isinstance(value, Bias):
        band = _relabel(value.band, moved, single)
        return None if band is None else replace(value, band=band)
    return None


# Transfer functions: (bands, node, arguments by name) -> what is known of the node.

_TRANSFER: dict[Any, Callable[[Bands, fx.Node, dict], Any]] = {}


def _on(*ops: Any) -> Callable:
    def register(function: Callable) -> Callable:
        _TRANSFER.update(dict.fromkeys(ops, function))
        return function

    return register


@_on(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    if not isinstance(start, (int, float)) or not isinstance(step, (int, float)):
        return None
    return Affine(((0, float(step)),), float(start))


@_on(aten.full.default)
def _full(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    value = arguments["fill_value"]
    return Affine(const=float(value)) if isinstance(value, (bool, int, float)) else None


@_on(aten.zeros.default)
def _zeros(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    return Affine(const=0.0)


@_on(aten.ones.default)
def _ones(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    return Affine(const=1.0)


@_on(
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
)
def _cast(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    value = bands.of(arguments["self"])
    if node.meta["val"].dtype == torch.bool and not isinstance(value, Band):
        return value if isinstance(value, Affine) and value.is_const else None
    return value


@_on(
    aten.expand.default,
    aten.unsqueeze.default,
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.squeeze.dim,
    aten.t.default,
)
def _rename(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    source = arguments["self"]
    value = bands.of(source)
    if isinstance(value, Affine) and value.is_const:
        return value
    return bands.through_rows(node, source, value)


@_on(aten.slice.Tensor)
def _slice(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    value, dim = bands.of(arguments["self"]), arguments["dim"] % bands.rank(node)
    start, step = arguments["start"] or 0, arguments["step"]
    if not isinstance(start, int) or start < 0 or step != 1:
        return None
    if isinstance(value, Affine):
        offset = dict(value.coefficients).get(dim, 0.0) * start
        kept = value.coefficients
        if bands.shape(node)[dim] == 1:
            kept = tuple((d, c) for d, c in kept if d != dim)
        return Affine(kept, value.const + offset)
    return value if start == 0 else None


@_on(aten.index.Tensor)
def _index(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    """Looking up a table that is itself a sum of its indices, at known places."""
    table, indices = bands.of(arguments["self"]), arguments["indices"]
    if not isinstance(table, Affine) or len(indices) != bands.rank(arguments["self"]):
        return None
    if table.is_const:
        return table
    total = Affine(const=table.const)
    for dim, coefficient in table.coefficients:
        if indices[dim] is None:
            return None
        place = _aligned(bands, indices[dim], node)
        if not isinstance(place, Affine):
            return None
        total = _plus(total, _times(place, coefficient))
    return total


def _aligned(bands: Bands, value: Any, out: fx.Node) -> Any:
    """What is known of an operand, its dims counted as the broadcast output's."""
    known = bands.of(value)
    shift = bands.rank(out) - bands.rank(value)
    if known is None or shift == 0 or not isinstance(value, fx.Node):
        return known
    moved = {dim: dim + shift for dim in range(bands.rank(value))}
    return _relabel(known, moved, set())


def _plus(left: Affine, right: Affine, sign: float = 1.0) -> Affine:
    coefficients = dict(left.coefficients)
    for dim, coefficient in right.coefficients:
        coefficients[dim] = coefficients.get(dim, 0.0) + sign * coefficient
    kept = tuple(sorted((dim, c) for dim, c in coefficients.items() if c != 0.0))
    return Affine(kept, left.const + sign * right.const)


def _times(value: Affine, factor: float) -> Affine:
    if factor == 0.0:
        return Affine()
    return Affine(tuple((dim, c * factor) for dim, c in value.coefficients), value.const * factor)


def _operands(bands: Bands, node: fx.Node, arguments: dict) -> tuple[Any, Any]:
    return (
        _aligned(bands, arguments["self"], node),
        _aligned(bands, arguments["other"], node),
    )


@_on(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar)
def _add(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    left, right = _operands(bands, node, arguments)
    reverse = node.target is aten.rsub.Scalar
    if reverse:
        left, right = right, left
    sign = -1.0 if reverse or node.target in (aten.sub.Tensor, aten.sub.Scalar) else 1.0
    sign *= float(arguments.get("alpha") or 1)
    if isinstance(left, Affine) and isinstance(right, Affine):
        return _plus(left, right, sign)
    if sign == -1.0 and isinstance(left, Affine) and left == Affine(const=1.0):
        return _complement(right) if isinstance(right, Band) else None  # 1 - mask
    if sign != 1.0:
        return left if isinstance(left, Bias) and not isinstance(right, Bias) else None
    biases = [value for value in (left, right) if isinstance(value, Bias)]
    if len(biases) == 2 and _same_dims(biases[0].band, biases[1].band):
        band = _both(biases[0].band, biases[1].band)
        return Bias(band, max(b.fill for b in biases), all(b.pure for b in biases))
    if not biases:
        return None
    bias, other = biases[0], arguments["other" if biases[0] is left else "self"]
    if bands.may_hide(other):  # what the band lets through may be hidden by the other term
        bias = replace(bias, band=replace(bias.band, certain=None))
    return replace(bias, pure=False)


@_on(aten.mul.Tensor, aten.mul.Scalar)
def _mul(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    left, right = _operands(bands, node, arguments)
    if isinstance(right, Band) or (isinstance(left, Affine) and not isinstance(right, Affine)):
        left, right = right, left
    if isinstance(left, Band) and isinstance(right, Band) and _same_dims(left, right):
        return _both(left, right)
    if not isinstance(right, Affine) or not right.is_const:
        return None
    if isinstance(left, Affine):
        return _times(left, right.const)
    if isinstance(left, Band) and right.const <= _ABSORBING:
        return Bias(_complement(left), right.const, pure=True)  # (1 - mask) * minimum
    return None


@_on(aten.cumsum.default)
def _cumsum(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    value = bands.of(arguments["self"])
    return value if value == Affine() else None


@_on(aten.diff.default)
def _diff(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    """The steps of a ramp; with a first element put before it that continues it."""
    value, dim = bands.of(arguments["self"]), arguments["dim"] % bands.rank(node)
    if not isinstance(value, Affine) or arguments["n"] != 1 or arguments["append"] is not None:
        return None
    step = dict(value.coefficients).get(dim, 0.0)
    if arguments["prepend"] is not None:
        first = bands.of(arguments["prepend"])
        if bands.shape(arguments["prepend"])[dim] != 1 or not isinstance(first, Affine):
            return None
        rest = tuple((d, c) for d, c in value.coefficients if d != dim)
        if first != Affine(rest, value.const - step):
            return None
    return Affine(const=step)


_COMPARISONS = {
    "le": lambda c: (-math.inf, c),
    "lt": lambda c: (-math.inf, math.ceil(c) - 1),
    "ge": lambda c: (c, math.inf),
    "gt": lambda c: (math.floor(c) + 1, math.inf),
    "eq": lambda c: (c, c),
}
_MIRROR = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}


@_on(*(getattr(getattr(aten, n), o) for n in (*_COMPARISONS, "ne") for o in ("Tensor", "Scalar")))
def _compare(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    name = node.target._schema.name.split("::")[1]
    left, right = _operands(bands, node, arguments)
    if isinstance(left, Band) and right in (Affine(), Affine(const=1.0)) and name in ("eq", "ne"):
        return left if (name == "eq") == (right.const == 1.0) else _complement(left)
    if not isinstance(left, Affine) or not isinstance(right, Affine):
        return None
    difference = _plus(left, right, -1.0)
    if difference.is_const:
        holds = {
            "le": difference.const <= 0,
            "lt": difference.const < 0,
            "ge": difference.const >= 0,
            "gt": difference.const > 0,
            "eq": difference.const == 0,
            "ne": difference.const != 0,
        }[name]
        return Affine(const=float(holds))
    if len(difference.coefficients) != 2 or name == "ne":
        return None
    (query, at_query), (key, at_key) = difference.coefficients
    if at_query != -at_key or abs(at_key) != 1.0:
        return None
    if at_key < 0:  # query - key + const compared to 0
        name, const = _MIRROR[name], difference.const
    else:
        const = -difference.const
    interval = _COMPARISONS[name](const)
    return Band(query, key, interval, interval)


@_on(aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
def _and(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    left, right = _operands(bands, node, arguments)
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Affine) and one.is_const:
            return other if one.const else one
    if isinstance(left, Band) and isinstance(right, Band) and _same_dims(left, right):
        return _both(left, right)
    for one in (left, right):
        if isinstance(one, Band):  # with a condition we know nothing of
            return replace(one, certain=None)
    return None


@_on(aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default)
def _or(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    left, right = _operands(bands, node, arguments)
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Affine) and one.is_const:
            return one if one.const else other
    if isinstance(left, Band) and isinstance(right, Band) and _same_dims(left, right):
        return _complement(_both(_complement(left), _complement(right)))
    for one in (left, right):
        if isinstance(one, Band):
            return replace(one, possible=EVERYWHERE)
    return None


@_on(aten.bitwise_not.default, aten.logical_not.default)
def _not(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    value = bands.of(arguments["self"])
    if isinstance(value, Affine) and value.is_const:
        return Affine(const=float(not value.const))
    return _complement(value) if isinstance(value, Band) else None


@_on(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    condition = _aligned(bands, arguments["condition"], node)
    kept, other = _operands(bands, node, arguments)
    if not isinstance(condition, Band):
        return None
    for band, value, fill in ((condition, kept, other), (_complement(condition), other, kept)):
        found = _filled(band, value, fill)
        if found is not None:
            return found
    return None


@_on(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    mask = _aligned(bands, arguments["mask"], node)
    value = bands.of(arguments["self"])
    if isinstance(mask, Band):
        found = _filled(_complement(mask), value, bands.of(arguments["value"]))
        if found is not None:
            return found
    if isinstance(value, Bias):
        # a further mask, by padding say, only ever hides more
        fill = bands.of(arguments["value"])
        if isinstance(fill, Affine) and fill.is_const and fill.const <= _ABSORBING:
            return Bias(replace(value.band, certain=None), max(value.fill, fill.const))
    return None


def _filled(band: Band, value: Any, fill: Any) -> Bias | None:
    if not isinstance(fill, Affine) or not fill.is_const or fill.const > _ABSORBING:
        return None
    if isinstance(value, Bias):
        if not _same_dims(band, value.band):
            return None
        return Bias(_both(band, value.band), max(value.fill, fill.const), value.pure)
    return Bias(band, fill.const, pure=value == Affine())


@_on(aten.tril.default, aten.triu.default)
def _triangle(bands: Bands, node: fx.Node, arguments: dict) -> Any:
    value, diagonal = bands.of(arguments["self"]), arguments["diagonal"]
    if not isinstance(diagonal, int):
        return None
    query, key = bands.rank(node) - 2, bands.rank(node) - 1
    lower = node.target is aten.tril.default
    interval = (-math.inf, float(diagonal)) if lower else (float(diagonal), math.inf)
    band = Band(query, key, interval, interval)
    if isinstance(value, Affine) and value.is_const:
        if value.const == 1.0:
            return band
        if value.const <= _ABSORBING:
            return Bias(_complement(band), value.const, pure=True)
    if isinstance(value, Band) and _same_dims(value, band):
        return _both(value, band)
    return None


def _same_dims(left: Band, right: Band) -> bool:
    return (left.query, left.key) == (right.query, right.key)


def _both(left: Band, right: Band) -> Band:
    certain = None
    if left.certain is not None and right.certain is not None:
        certain = _meet(left.certain, right.certain)
        certain = certain if certain[0] <= certain[1] else None
    return replace(left, possible=_meet(left.possible, right.possible), certain=certain)


def _meet(left: Interval, right: Interval) -> Interval:
    return (max(left[0], right[0]), min(left[1], right[1]))


def _complement(band: Band) -> Band:
    """Outside a half-line is a half-line; outside a bounded interval, nothing simple."""
    possible = _outside(band.certain) if band.certain is not None else None
    return replace(band, possible=possible or EVERYWHERE, certain=_outside(band.possible))


def _outside(interval: Interval) -> Interval | None:
    low, high = interval
    if low == -math.inf and high != math.inf:
        return (high + 1, math.inf)
    if high == math.inf and low != -math.inf:
        return (-math.inf, low - 1)
    return None
