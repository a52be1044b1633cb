"""Probe: find the rows of an op that has no rule by running it.

For every dim of the output that has a symbolic size, the one candidate row splits that dim in
every operand that has a dim of the same size, and leaves the others whole. It is accepted if, on
small random tensors in float64 and for uneven chunks, the chunks' outputs side by side are the
whole output, and the chunks' gradients (side by side, or added up for operands left whole) are
the whole gradients. An op that cannot be run like this has no rows.
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
        if not isinstance(size, sympy.Symbol):
            continue
        candidate = [_same_size(dims, size, dim) for dims in shapes]
        if None in candidate or all(p == Whole for p in candidate):
            continue
        if all(_holds(node, operands, shapes, sizes, dim, size, candidate) for _ in range(_DRAWS)):
            found.append((Chunk(dim), *candidate))
    return found


def _same_size(dims: tuple, size: sympy.Symbol, preferred: int) -> Placement | None:
    """Where an operand has this size: nowhere, once, or (if at the same place) unclear."""
    places = [dim for dim, own in enumerate(dims) if own == size]
    if not places:
        return None if any(size in own.free_symbols for own in dims) else Whole
    return Chunk(places[0]) if len(places) == 1 else None


def _holds(
    node: fx.Node,
    operands: Sequence[fx.Node],
    shapes: Sequence[tuple],
    sizes: dict,
    dim: int,
    size: sympy.Symbol,
    candidate: Sequence[Placement],
) -> bool:
    length = sizes[size]
    values = [_random(o.meta["val"], dims, sizes) for o, dims in zip(operands, shapes)]
    try:
        whole, whole_grads, cotangents = _run(node, operands, values, None, sizes)
        outputs, grads = [], [None] * len(values)
        for start, end in ((0, 2), (2, 3), (3, length)):
            parts = [_part(v, p, start, end) for v, p in zip(values, candidate)]
            given = [c.narrow(dim, start, end - start) for c in cotangents]
            here = {**sizes, size: end - start}
            out, part_grads, _ = _run(node, operands, parts, given, here)
            outputs.append(out)
            grads = [_joined(t, g, p) for t, g, p in zip(grads, part_grads, candidate)]
    except Exception:  # an op that fails on a part, or on such inputs, cannot be split
        return False
    joined = [torch.cat(pieces, dim) for pieces in zip(*outputs)]
    pairs = [*zip(joined, whole), *((g, w) for g, w in zip(grads, whole_grads) if w is not None)]
    return all(_close(have, want) for have, want in pairs)


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
    with torch.enable_grad():
        outputs = [o for o in pytree.tree_leaves(node.target(*args, **kwargs)) if o is not None]
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


def _part(value: Tensor, placement: Placement, start: int, end: int) -> Tensor:
    for dim, _ in placement.spans:
        value = value.narrow(dim, start, end - start)
    return value


def _joined(total: Tensor | None, grad: Tensor | None, placement: Placement) -> Tensor | None:
    if grad is None or total is None:
        return grad if total is None else total
    if placement.spans:
        return torch.cat([total, grad], placement.spans[0][0])
    return total + grad


def _close(have: Tensor | None, want: Tensor) -> bool:
    if have is None or have.shape != want.shape:
        return False
    if not want.is_floating_point():
        return torch.equal(have, want)
    return bool((have - want).norm() <= _TOLERANCE * want.norm().clamp_min(1e-30))
