"""Probe: find the rows of an op that has no rule by running it.

For every dim of the output whose size has a symbol, the candidate row splits that dim, along the
symbol, in every operand that has a dim along it too, and leaves the others whole. It is accepted
if, on small random tensors (in float64, or in the op's own dtypes if it does not take that) and for
uneven chunks, the chunks' outputs side by side are the whole output, and the chunks' gradients
(side by side, or added up for operands left whole) are the whole gradients. An op that cannot be
run like this has no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from seqsplit.ir.placement import Chunk, Placement, Whole
from seqsplit.passes.graph.sizes import quotient
from seqsplit.passes.graph.structure import kind_of
from seqsplit.passes.trials.trial import Shape, Trial, holds

__all__ = ["probe", "takes_double"]

_DRAWS = 2
_SIZES = (7, 3, 4, 5, 2)

Rows = tuple[tuple[Placement, ...], ...]

_FOUND: dict[Any, Rows] = {}
_TAKES_DOUBLE: dict[Any, bool] = {}


def probe(node: fx.Node, operands: Sequence[fx.Node], shape: Shape) -> Rows:
    """The rows that hold for a node, ``(out, *operands)`` each, found by execution."""
    own = not takes_double(node, operands, shape)
    return _once(_FOUND, node, operands, shape, lambda: tuple(_rows(node, operands, shape, own)))


def takes_double(node: fx.Node, operands: Sequence[fx.Node], shape: Shape) -> bool:
    """Whether an op can be tried in float64 (see :mod:`..trials.trial`), found by execution."""
    if hasattr(node.target, "in_double"):
        return node.target.in_double is not None

    def run() -> bool:
        sizes = _sizes([*map(shape, operands), shape(node)])
        return Trial(node, tuple(operands), sizes).takes_double(shape)

    return _once(_TAKES_DOUBLE, node, operands, shape, run)


def _once(
    found: dict, node: fx.Node, operands: Sequence[fx.Node], shape: Shape, run: Callable[[], Any]
) -> Any:
    """The answer for this op on such operands, found at the first question."""
    key = _key(node, operands, shape)
    if key not in found:
        with disable_proxy_modes_tracing(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # the CPU's alone: others were not forked
            found[key] = run()
    return found[key]


def _key(node: fx.Node, operands: Sequence[fx.Node], shape: Shape) -> Any:
    target = getattr(node.target, "fingerprint", node.target)
    plain = fx.node.map_arg((node.args, node.kwargs), lambda n: str(_size_of(n)))
    kinds = [(kind_of(operand.meta["val"]), shape(operand)) for operand in operands]
    return target, str(kinds), repr(plain)


def _size_of(node: fx.Node) -> sympy.Expr | None:
    """A size that is given to the op as a number; a chunk's call is given the chunk's."""
    held = node.meta.get("val")
    return held.node.expr if isinstance(held, torch.SymInt) else None


def _sizes(shapes: Sequence[tuple]) -> dict[sympy.Symbol, int]:
    symbols = sorted({s for dims in shapes for d in dims for s in d.free_symbols}, key=str)
    return {s: _SIZES[min(i, len(_SIZES) - 1)] for i, s in enumerate(symbols)}


def _rows(node: fx.Node, operands: Sequence[fx.Node], shape: Shape, own: bool) -> list:
    shapes = [shape(operand) for operand in operands]
    out_shape = shape(node)
    sizes = _sizes([*shapes, out_shape])
    found = []
    for dim, size in enumerate(out_shape):
        for symbol, factors in _ways(size):
            candidate = [_lined_up(dims, symbol, factors) for dims in shapes]
            if None in candidate or all(p == Whole for p in candidate):
                continue
            row = (Chunk(dim, *factors), *candidate)
            if all(_holds(node, operands, shape, sizes, symbol, row, own) for _ in range(_DRAWS)):
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
    shape: Shape,
    sizes: dict,
    symbol: sympy.Symbol,
    row: tuple[Placement, ...],
    own: bool,
) -> bool:
    length = _SIZES[0]
    swapped = {s: sizes[symbol] for s in sizes if sizes[s] == length}
    sizes = {**sizes, **swapped, symbol: length}  # the symbol that is split gets the largest size
    trial = Trial(node, tuple(operands), sizes, own)
    try:
        return holds(trial, row, _values(trial, shape), symbol, length, (0, 2, 3, length), loud=own)
    except Exception:  # an op that fails on a part, or on such inputs, cannot be split
        return False


def _values(trial: Trial, shape: Shape) -> list[torch.Tensor]:
    """Random operands; positive ones where others give no number, as for a root."""
    values = trial.random(shape)
    outputs, _, _ = trial.run(values)
    if not any(output.isnan().any() for output in outputs):
        return values
    return [value.abs() if value.is_floating_point() else value for value in values]
