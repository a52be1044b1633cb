"""Probe: find the rows of an op that has no rule by running it.

For every dim of the output whose size has a symbol, the candidate row splits that dim, along the
symbol, in every operand that has a dim along it too, and leaves the others whole. It is accepted
if, on small random tensors in float64 and for uneven chunks, the chunks' outputs side by side are
the whole output, and the chunks' gradients (side by side, or added up for operands left whole)
are the whole gradients. An op that cannot be run like this has no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from ...placement import Chunk, Placement, Whole
from ..double import double_call
from ..sizes import quotient

__all__ = ["probe"]

_TOLERANCE = 1e-10
_DRAWS = 2
_SIZES = (7, 3, 4, 5, 2)

Rows = tuple[tuple[Placement, ...], ...]

_FOUND: dict[Any, Rows] = {}


def probe(
    node: fx.Node,
    operands: Sequence[fx.Node],
    shape: Callable[[fx.Node], tuple[sympy.Expr, ...]],
) -> Rows:
    """The rows that hold for a node, ``(out, *operands)`` each, found by execution."""
    key = _key(node, operands, shape)
    if key not in _FOUND:
        with disable_proxy_modes_tracing(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _FOUND[key] = tuple(_rows(node, operands, shape))
    return _FOUND[key]


def _key(node: fx.Node, operands: Sequence[fx.Node], shape: Callable) -> Any:
    target = getattr(node.target, "fingerprint", node.target)
    plain = fx.node.map_arg((node.args, node.kwargs), lambda n: str(_size_of(n)))
    return target, str([shape(operand) for operand in operands]), repr(plain)


def _size_of(node: fx.Node) -> sympy.Expr | None:
    """A size that is given to the op as a number; a chunk's call is given the chunk's."""
    held = node.meta.get("val")
    return held.node.expr if isinstance(held, torch.SymInt) else None


def _rows(node: fx.Node, operands: Sequence[fx.Node], shape: Callable) -> list:
    shapes = [shape(operand) for operand in operands]
    out_shape = shape(node)
    symbols = sorted(
        {s for dims in (*shapes, out_shape) for d in dims for s in d.free_symbols}, key=str
    )
    sizes = {s: _SIZES[min(i, len(_SIZES) - 1)] for i, s in enumerate(symbols)}
    found = []
    for dim, size in enumerate(out_shape):
        for symbol, factors in _ways(size):
            candidate = [_lined_up(dims, symbol, factors) for dims in shapes]
            if None in candidate or all(p == Whole for p in candidate):
                continue
            row = (Chunk(dim, *factors), *candidate)
            if all(_holds(node, operands, shapes, sizes, symbol, row) for _ in range(_DRAWS)):
                found.append(row)
    return found


def _ways(size: sympy.Expr) -> list[tuple[sympy.Symbol, tuple[sympy.Expr, sympy.Expr]]]:
    """The symbols that a dim may be split along, each with the factors around it."""
    found = []
    for symbol in sorted(size.free_symbols, key=str):
        rest = quotient(size, symbol)
        if rest is None or symbol in rest.free_symbols:
            continue
        found.append((symbol, (rest, sympy.S.One)))
        if rest != 1:
            found.append((symbol, (sympy.S.One, rest)))
    return found


def _lined_up(
    dims: tuple, symbol: sympy.Symbol, factors: tuple[sympy.Expr, sympy.Expr]
) -> Placement | None:
    """Where an operand has the symbol: nowhere, in one dim, or (if in several) unclear.

    What its dim has beyond the output's factors lies inside: several entries per token.
    """
    places = [dim for dim, own in enumerate(dims) if symbol in own.free_symbols]
    if not places:
        return Whole
    outer, inner = factors
    rest = quotient(dims[places[0]], symbol)
    if len(places) > 1 or rest is None or symbol in rest.free_symbols:
        return None
    if rest == 1:
        return Chunk(places[0])
    more = quotient(rest, outer * inner)
    if more is None or more.free_symbols:
        return None
    return Chunk(places[0], outer, inner * more)


def _holds(
    node: fx.Node,
    operands: Sequence[fx.Node],
    shapes: Sequence[tuple],
    sizes: dict,
    symbol: sympy.Symbol,
    row: tuple[Placement, ...],
) -> bool:
    length = _SIZES[0]
    swapped = {s: sizes[symbol] for s in sizes if sizes[s] == length}
    sizes = {**sizes, **swapped, symbol: length}  # the symbol that is split gets the largest size
    out, *candidate = [_Part(placement, sizes, length) for placement in row]
    try:
        values = [_random(o.meta["val"], dims, sizes) for o, dims in zip(operands, shapes)]
        whole, whole_grads, cotangents = _run(node, operands, values, None, sizes)
        outputs, grads = [], [[] for _ in values]
        for start, end in ((0, 2), (2, 3), (3, length)):
            parts = [part.of(v, start, end) for v, part in zip(values, candidate)]
            given = [out.of(c, start, end) for c in cotangents]
            here = {**sizes, symbol: end - start}
            results, part_grads, _ = _run(node, operands, parts, given, here)
            outputs.append(results)
            for pieces, grad in zip(grads, part_grads):
                pieces.append(grad)
        joined = [out.join(pieces) for pieces in zip(*outputs)]
        joined_grads = [part.join(pieces) for part, pieces in zip(candidate, grads)]
    except Exception:  # an op that fails on a part, or on such inputs, cannot be split
        return False
    pairs = [
        *zip(joined, whole),
        *((g, w) for g, w in zip(joined_grads, whole_grads) if w is not None),
    ]
    return all(_close(have, want) for have, want in pairs)


class _Part:
    """Takes chunks of a value and puts chunks together, under a placement with factors."""

    def __init__(self, placement: Placement, sizes: dict, length: int) -> None:
        self._dim, self._factors = None, (1, 1)
        self._length = length
        for dim, span in placement.spans:
            self._dim = dim
            self._factors = tuple(int(f.xreplace(sizes)) for f in (span.outer, span.inner))

    def of(self, value: Tensor, start: int, end: int) -> Tensor:
        if self._dim is None:
            return value
        part = self._apart(value, self._length).narrow(self._dim + 1, start, end - start)
        return part.flatten(self._dim, self._dim + 2)

    def join(self, pieces: Sequence[Tensor | None]) -> Tensor | None:
        """Side by side; what was given whole gets the sum of its gradients."""
        pieces = [piece for piece in pieces if piece is not None]
        if not pieces:
            return None
        if self._dim is None:
            return sum(pieces)
        outer, inner = self._factors
        apart = [self._apart(p, p.shape[self._dim] // (outer * inner)) for p in pieces]
        return torch.cat(apart, self._dim + 1).flatten(self._dim, self._dim + 2)

    def _apart(self, value: Tensor, length: int) -> Tensor:
        outer, inner = self._factors
        return value.unflatten(self._dim, (outer, length, inner))


def _run(
    node: fx.Node,
    operands: Sequence[fx.Node],
    values: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None,
    sizes: dict[sympy.Symbol, int],
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    leaves = [v.detach().requires_grad_(v.is_floating_point()) for v in values]
    known: dict[fx.Node, Any] = dict(zip(operands, leaves))
    for other in node.all_input_nodes:
        if (expr := _size_of(other)) is not None:
            known[other] = int(expr.xreplace(sizes))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    target, args, kwargs = double_call(node.target, args, kwargs)
    with torch.enable_grad():
        outputs = [o for o in pytree.tree_leaves(target(*args, **kwargs)) if o is not None]
        if cotangents is None:
            cotangents = [
                torch.randn(o.shape, dtype=torch.float64, device=o.device) for o in outputs
            ]
        roots = [(o, c.to(o.dtype)) for o, c in zip(outputs, cotangents) if o.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads = iter(())
        if roots and wanted:
            grads = iter(
                torch.autograd.grad(
                    [o for o, _ in roots], wanted, [c for _, c in roots], allow_unused=True
                )
            )
    each = [next(grads, None) if leaf.requires_grad else None for leaf in leaves]
    return [o.detach() for o in outputs], each, list(cotangents)


def _random(like: Any, dims: tuple, sizes: dict) -> Tensor:
    shape = [int(dim.xreplace(sizes)) for dim in dims]
    if like.is_floating_point():
        return torch.randn(shape, dtype=torch.float64, device=like.device)
    return torch.randint(0, 2, shape, device=like.device).to(like.dtype)


def _close(have: Tensor | None, want: Tensor) -> bool:
    if have is None or have.shape != want.shape:
        return False
    if not want.is_floating_point():
        return torch.equal(have, want)
    return bool((have - want).norm() <= _TOLERANCE * want.norm().clamp_min(1e-30))
