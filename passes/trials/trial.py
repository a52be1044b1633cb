"""Trial: one op run by itself on chosen tensors, whole and in parts, with its gradients.

Float64 shows the slightest mixing of positions, so everything that takes it is tried in it. Some
ops do not: kernels for quantised weights or half-precision attention raise, or hand back memory
that they have not written. Whether an op takes float64 is found by running it, too: what it gives
has to be what it gives in the dtypes it is called with, *its own*, up to their rounding. One that
does not is tried in its own dtypes, between float64 values: it alone rounds.

What is compared in an op's own dtypes
--------------------------------------
Whole and in parts, a row-wise op makes the same sums of products for each token, at most in
another order, and rounds the same intermediate values. With unit roundings of ``eps``:

- rounding operands, intermediate values and results is an error of a few ``eps``, whatever the
  length of the sums: it is made once per value;
- a sum of ``n`` products whose partial sums are rounded to ``eps_sum`` is off by
  ``n * eps_sum`` at worst, and by ``sqrt(n) * eps_sum`` for roundings that are independent.
  Kernels for half precision add up in float32; one that does not is refused, which is safe.

Hence :func:`tolerance`. It is as wide as rounding, and what is looked for must not hide in it. So
tokens (and their cotangents) are of very different sizes, a factor of 2^8 between the loudest and
the quietest, and they are compared *token by token*: what a quiet token takes from its neighbours
is hundreds of times as large as it would be among equals.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from seqsplit.ir.placement import Placement
from seqsplit.passes.trials.double import double_call, own_call

__all__ = ["Part", "Shape", "Trial", "holds", "tolerance"]

_EXACT = 1e-10  # in float64
_ROUNDINGS = 4  # values rounded on the way from an operand to a result
_LOUD = (0, -4, 4, -2, 2, 3, -3)  # powers of two, token by token: no dtype overflows

Shape = Callable[[fx.Node], tuple[sympy.Expr, ...]]


def tolerance(dtypes: Sequence[torch.dtype], length: int) -> float:
    """How far apart two results of the same op may be.

    Args:
        dtypes: of its floating-point operands and results.
        length: of the longest sum in it.

    Returns:
        A relative error of the norm of one token's values.
    """
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    if eps <= torch.finfo(torch.float64).eps:
        return _EXACT
    added_in = min(eps, torch.finfo(torch.float32).eps)
    return _ROUNDINGS * (eps + math.sqrt(length) * added_in)


@dataclass(frozen=True)
class Trial:
    """An op, ready to be run.

    Attributes:
        node: of the lowered graph.
        operands: its tensors.
        sizes: what the symbols stand for.
        own: whether it is run in its own dtypes instead of float64.
    """

    node: fx.Node
    operands: tuple[fx.Node, ...]
    sizes: dict[sympy.Symbol, int]
    own: bool = False

    def run(
        self,
        values: Sequence[Tensor],
        cotangents: Sequence[Tensor] | None = None,
        sizes: dict[sympy.Symbol, int] | None = None,
        loud: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
        """Outputs, the operands' gradients, and the outputs' cotangents.

        Args:
            values: of the operands, floating point in float64.
            cotangents: of the outputs, random if ``None``.
            sizes: instead of :attr:`sizes`.
            loud: makes random cotangents of different sizes.
        """
        leaves = [v.detach().requires_grad_(_differs(v)) for v in values]
        with torch.enable_grad(), warnings.catch_warnings():
            # An op without a derivative says so when one is asked for; here it always is.
            warnings.simplefilter("ignore")
            outputs = [o for o in pytree.tree_leaves(self(leaves, sizes)) if o is not None]
            if cotangents is None:
                cotangents = [
                    loud(torch.randn(o.shape, dtype=torch.float64, device=o.device))
                    for o in outputs
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

    def __call__(
        self, values: Sequence[Tensor], sizes: dict[sympy.Symbol, int] | None = None
    ) -> Any:
        """The op itself, on these operands."""
        node, sizes = self.node, self.sizes if sizes is None else sizes
        known: dict[fx.Node, Any] = dict(zip(self.operands, values))
        for other in node.all_input_nodes:
            if isinstance(held := other.meta.get("val"), torch.SymInt):
                known[other] = int(held.node.expr.xreplace(sizes))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        if self.own:
            return own_call(node.target, [o.meta["val"] for o in _tensors(node)])(*args, **kwargs)
        target, args, kwargs = double_call(node.target, args, kwargs)
        return target(*args, **kwargs)

    def random(self, shape: Shape) -> list[Tensor]:
        """Random operands, floating point in float64 with values that the own dtypes have.

        A weight of a class of its own stays as it is: it cannot be drawn.
        """
        return [self._random(operand, shape(operand)) for operand in self.operands]

    def _random(self, node: fx.Node, dims: tuple[sympy.Expr, ...]) -> Tensor:
        like = node.meta["val"]
        if "example" in node.meta:
            return node.meta["example"]
        if is_traceable_wrapper_subclass(like):
            raise TypeError(f"{node} is of a class of its own")
        shape = [int(dim.xreplace(self.sizes)) for dim in dims]
        if like.is_floating_point() or like.is_complex():
            dtype = torch.complex128 if like.is_complex() else torch.float64
            drawn = torch.randn(shape, dtype=dtype, device=like.device)
            return drawn.to(like.dtype).to(dtype) if self.own else drawn
        return torch.randint(0, 2, shape, device=like.device).to(like.dtype)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of its floating-point operands and results."""
        if not self.own:
            return [torch.float64]
        held = [o.meta["val"] for o in self.operands]
        held += pytree.tree_leaves(self.node.meta["val"])
        return [v.dtype for v in held if isinstance(v, Tensor) and v.is_floating_point()]

    def takes_double(self, shape: Shape) -> bool:
        """Whether the op gives in float64 what it gives in its own dtypes, up to rounding."""
        rounding = replace(self, own=True)
        if set(rounding.dtypes) <= {torch.float64}:
            return True
        try:
            values = rounding.random(shape)
            want, want_grads, cotangents = rounding.run(values)
        except Exception:  # nothing to compare with
            return True
        try:
            have, have_grads, _ = replace(self, own=False).run(values, cotangents)
        except Exception:  # no kernel for it
            return False
        length = max((value.numel() for value in (*values, *want)), default=1)
        bound = tolerance(rounding.dtypes, length)
        pairs = zip([*have, *have_grads], [*want, *want_grads])
        return all(_agree(h, w, bound) for h, w in pairs if w is not None and _differs(w))


def _agree(have: Tensor | None, want: Tensor, bound: float) -> bool:
    if have is None or have.dtype != want.dtype or have.shape != want.shape:
        return False
    same = have.isnan() & want.isnan()
    have, want = have.masked_fill(same, 0.0), want.masked_fill(same, 0.0)
    return bool((have - want).norm() <= bound * want.norm().clamp_min(1e-30))


def _differs(value: Tensor) -> bool:
    """Whether a gradient may be taken with respect to a value."""
    return value.is_floating_point() and not is_traceable_wrapper_subclass(value)


def _tensors(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors of a call in the order in which it has them."""
    for leaf in pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), Tensor):
            yield leaf


class Part:
    """Takes chunks of a value and puts chunks together, under a placement with factors.

    Args:
        placement: which dim is cut, if any.
        sizes: what the symbols in its factors stand for.
        length: of what is cut.
    """

    def __init__(self, placement: Placement, sizes: dict, length: int) -> None:
        self._dim, self._factors = None, (1, 1)
        self._length = length
        for dim, span in placement.spans:
            self._dim = dim
            self._factors = tuple(int(f.xreplace(sizes)) for f in (span.outer, span.inner))

    def of(self, value: Tensor, start: int, end: int) -> Tensor:
        """The chunk ``[start, end)`` of a whole value."""
        if self._dim is None:
            return value
        part = self._apart(value, self._length).narrow(self._dim + 1, start, end - start)
        # A body's ops mostly get what another op has just made; some kernels take nothing else.
        return part.flatten(self._dim, self._dim + 2).contiguous()

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

    def loud(self, value: Tensor) -> Tensor:
        """A value whose tokens are of very different sizes."""
        if self._dim is None or not _differs(value):
            return value
        powers = torch.tensor([_LOUD[i % len(_LOUD)] for i in range(self._length)])
        factors = torch.exp2(powers.to(value)).view(-1, *[1] * (value.ndim - self._dim))
        apart = self._apart(value, self._length) * factors
        return apart.flatten(self._dim, self._dim + 2)

    def token_norms(self, value: Tensor) -> Tensor:
        """One number per token; a single one for a value that is not cut."""
        if self._dim is None:
            return value.norm()
        return self._apart(value, self._length).movedim(self._dim + 1, 0).flatten(1).norm(dim=1)

    def length_of_sums(self, value: Tensor) -> int:
        """The most elements that one result may be a sum over: a token's, or one per token."""
        if self._dim is None:
            return 1
        return max(value.numel() // max(self._length, 1), self._length)

    def _apart(self, value: Tensor, length: int) -> Tensor:
        outer, inner = self._factors
        return value.unflatten(self._dim, (outer, length, inner))


def holds(
    trial: Trial,
    row: Sequence[Placement],
    values: Sequence[Tensor],
    symbol: sympy.Symbol,
    length: int,
    bounds: Sequence[int],
    *,
    loud: bool = False,
) -> bool:
    """Whether a row is true of an op: parts give parts, and the gradients of parts.

    Args:
        trial: the op.
        row: placements of the output and of the operands.
        values: of the operands, whole.
        symbol: the size that is cut.
        length: of the dim that is cut.
        bounds: where its parts begin and end.
        loud: whether to make the tokens of ``values`` of different sizes first.

    Raises:
        Exception: whatever the op raises on parts, or on such values.
    """
    out, *parts = [Part(placement, trial.sizes, length) for placement in row]
    if loud:
        values = [part.loud(value) for part, value in zip(parts, values)]
    whole, whole_grads, cotangents = trial.run(values, loud=out.loud if loud else Tensor.clone)
    outputs, grads = [], [[] for _ in values]
    beyond = trial.sizes[symbol] - length
    for start, end in zip(bounds, bounds[1:]):
        here = {**trial.sizes, symbol: end - start + beyond}
        given = [out.of(cotangent, start, end) for cotangent in cotangents]
        pieces = [part.of(value, start, end) for part, value in zip(parts, values)]
        results, piece_grads, _ = trial.run(pieces, given, here)
        outputs.append(results)
        for found, grad in zip(grads, piece_grads):
            found.append(grad)
    sums = [out.length_of_sums(value) for value in whole]
    sums += [part.length_of_sums(value) for part, value in zip(parts, values)]
    bound = tolerance(trial.dtypes, max(sums, default=1))
    joined = [(out, out.join(pieces)) for pieces in zip(*outputs)]
    joined += [(part, part.join(pieces)) for part, pieces in zip(parts, grads)]
    return all(
        _close(have, want, part if trial.own else None, bound)
        for (part, have), want in zip(joined, [*whole, *whole_grads])
        if want is not None
    )


def _close(have: Tensor | None, want: Tensor, part: Part | None, bound: float) -> bool:
    """Within a bound: token by token, or at once without a part."""
    if have is None or have.shape != want.shape:
        return False
    if not want.is_floating_point():
        return torch.equal(have, want)
    norms = part.token_norms if part is not None else Tensor.norm
    return bool((norms(have - want) <= bound * norms(want).clamp_min(1e-30)).all())
