"""Recurrences: a gated sum over time, found by what it computes.

``h[t] = gate[t] * h[t - 1] + x[t]`` is written in many ways: an associative scan by recursion on
halves, a loop over positions, a function with a backward of its own, a higher-order op. No step of
these can be cut along the sequence; the whole is one op that can (:mod:`seqsplit.ops.linear_scan`).

A candidate is found by its form: values that have the length of the sequence go in and come out,
and what lies between has it no more (every second position, a single one). Or it is a call that
the trace keeps as one node. What it computes is found by execution: on random float64 operands,
its values are those of the recurrence in two of them, and so are the gradients of all. What is
found by its form only adds and multiplies: two polynomials that agree at a random point are one.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from seqsplit.ops.linear_scan import linear_scan
from seqsplit.passes.analysis.facts import FEW
from seqsplit.passes.graph.lowered import Lowered, fake_mode_of
from seqsplit.passes.rewrite.normalize import drop_whole_slices
from seqsplit.passes.rewrite.pieces import is_value, write_piece
from seqsplit.passes.rewrite.reading import Unreadable, value_of
from seqsplit.passes.rules.registry import arguments_of

__all__ = ["find_linear_scans"]

aten = torch.ops.aten

# What only moves values. (A tuple's items, too: see :func:`_may_belong`.)
_MOVES = {
    aten.alias.default,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.contiguous.default,
    aten.expand.default,
    aten.flatten.using_ints,
    aten.full.default,
    aten.movedim.int,
    aten.new_zeros.default,
    aten.pad.default,
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.stack.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten.zeros.default,
    aten.zeros_like.default,
}
# What adds and multiplies.
_ADDS = {
    aten.add.Tensor,
    aten.addcmul.default,
    aten.mul.Tensor,
    aten.neg.default,
    aten.sub.Tensor,
}
# The same in the code under a ``vmap``, which is not lowered.
_ADDS_BEFORE = {operator.add, operator.mul, operator.neg, operator.sub}
_ADDS_BEFORE |= {torch.add, torch.addcmul, torch.mul, torch.neg, torch.sub}
# What keeps all channels, and what takes or puts together along one dim.
_RENAMES = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.movedim.int,
    aten.permute.default,
    aten.stack.default,
    aten.to.dtype,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.zeros_like.default,
}
_PADS = {aten.constant_pad_nd.default, aten.pad.default}
_ALONG_ONE = {aten.cat.default, aten.select.int, aten.slice.Tensor, aten.unbind.int}
_SHORT, _FEW_CHANNELS, _ANY = 11, 2, 2**62
_MOST_ELEMENTS = 2**24  # of the operands that a candidate is tried on
_MOST_OUTPUTS = 4
_MOST_OPERANDS = 4
_TOLERANCE = 1e-9
_SCALES = (0.3, 1.3)  # of random operands; much larger gates would let the states grow


@dataclass(frozen=True)
class _Candidate:
    """Ops that may be a recurrence.

    Attributes:
        length: the size of the dim of time.
        members: the ops, in the graph's order.
        outputs: those of them that others use.
    """

    length: sympy.Expr
    members: list[fx.Node]
    outputs: list[fx.Node]


@dataclass(frozen=True)
class _Found:
    """An output as a recurrence in two operands, each with its dim of time."""

    output: fx.Node
    dim: int
    gate: fx.Node
    gate_dim: int
    x: fx.Node
    x_dim: int


def find_linear_scans(lowered: Lowered) -> None:
    """Put :func:`~seqsplit.linear_scan.linear_scan` in the place of whatever computes it."""
    drop_whole_slices(lowered)
    seen: set[fx.Node] = set()
    tried: dict[Any, list[tuple[int, ...]] | None] = {}
    changed = False
    for node in list(lowered.graph.nodes):
        if node.op != "call_function" or node in seen:
            continue
        for candidate in _candidates(lowered, node):
            seen.update(candidate.members)
            found = _prove(lowered, candidate, tried)
            if found is not None:
                for item in found:
                    _replace(lowered, candidate, item)
                changed = True
                break
    if changed:
        lowered.graph.eliminate_dead_code(
            is_impure_node=lambda node: node.op in ("placeholder", "output")
        )
        _refresh(lowered)
        lowered.graph.lint()
        lowered.module.recompile()


# -- candidates ----------------------------------------------------------------------------------


def _candidates(lowered: Lowered, node: fx.Node) -> Iterator[_Candidate]:
    if _is_opaque(node):
        items = [user for user in node.users if user.target is operator.getitem]
        whole = isinstance(node.meta.get("val"), Tensor)
        outputs = [node] if whole else [item for item in items if item.users]
        sizes = [s for o in outputs if _is_tensor(o) for s in lowered.shape(o)]
        for length in dict.fromkeys(sizes):
            if _grows(lowered, length):
                yield _Candidate(length, [node, *items], outputs)
    elif (length := _taken_apart(lowered, node)) is not None:
        candidate = _between(lowered, node, length)
        if candidate is not None:
            yield candidate


def _is_opaque(node: fx.Node) -> bool:
    """A call that the trace keeps as one node."""
    return hasattr(node.target, "fingerprint") and not getattr(node.target, "is_vmap", False)


def _taken_apart(lowered: Lowered, node: fx.Node) -> sympy.Expr | None:
    """The size of the dim of which a node takes single positions, or every second one."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not _is_tensor(source):
        return None
    rank = source.meta["val"].ndim
    if node.target is aten.slice.Tensor:
        if len(node.args) < 5 or node.args[4] == 1:
            return None
        dim = node.args[1]
    elif node.target is aten.select.int:
        dim = node.args[1]
        places = {
            u.args[2] for u in source.users if u.target is aten.select.int if u.args[1] == dim
        }
        if len(places) < 2:
            return None
    elif node.target is aten.unbind.int:
        dim = node.args[1] if len(node.args) > 1 else 0
    else:
        return None
    length = lowered.shape(source)[dim % rank]
    return length if _grows(lowered, length) else None


def _grows(lowered: Lowered, size: sympy.Expr) -> bool:
    """Whether a size varies with the inputs, or did before the model's code fixed it."""
    if size.free_symbols:
        return True
    return int(size) > FEW and any(
        lowered.shape(node)[dim] == size
        for node in lowered.placeholders
        for dim in node.meta.get("open_dims", ())
    )


def _between(lowered: Lowered, anchor: fx.Node, length: sympy.Expr) -> _Candidate | None:
    """What lies between values of a length, around an op that takes them apart."""
    members: set[fx.Node] = set()
    stack = [anchor]
    while stack:
        node = stack.pop()
        if node in members or not is_value(node):
            continue
        if not _may_belong(node):
            return None
        members.add(node)
        if _has_length(lowered, node, length):
            continue
        stack.extend(node.users)
        for operand in filter(is_value, node.all_input_nodes):
            if operand.op == "call_function" and not _has_length(lowered, operand, length):
                stack.append(operand)
    outputs = [
        n for n in members if _has_length(lowered, n, length) and not set(n.users) <= members
    ]
    ordered = sorted(members)
    return _Candidate(length, ordered, sorted(outputs)) if outputs else None


def _may_belong(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function":
        return False
    if target is operator.getitem or target in _MOVES | _ADDS:
        return True
    return getattr(target, "is_vmap", False)


def _has_length(lowered: Lowered, node: fx.Node, length: sympy.Expr) -> bool:
    return _is_tensor(node) and bool(_dims_of(lowered, node, length))


def _dims_of(lowered: Lowered, node: fx.Node, length: sympy.Expr) -> list[int]:
    """The dims that have the length, in the captured call if not by their expression."""
    number = _number(lowered, length)
    return [
        dim
        for dim, size in enumerate(lowered.shape(node))
        if size == length
        or (size.free_symbols & length.free_symbols and _number(lowered, size) == number)
    ]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _number(lowered: Lowered, size: sympy.Expr) -> int:
    return int(size.xreplace(lowered.hints))


# -- proof ---------------------------------------------------------------------------------------


def _smaller(
    lowered: Lowered, candidate: _Candidate, numbers: dict[sympy.Symbol, int]
) -> tuple[dict[sympy.Symbol, int], int] | None:
    """Numbers for a trial on less, and the most channels, where the real sizes are too large."""
    length = candidate.length
    if _is_opaque(candidate.members[0]):  # any length will do, if it takes another one
        return ({**numbers, length: _SHORT}, _ANY) if length.is_Symbol else None
    if not _treats_channels_alike(lowered, candidate):
        return None
    time = length.free_symbols
    return {s: n if s in time else min(n, _FEW_CHANNELS) for s, n in numbers.items()}, _FEW_CHANNELS


def _treats_channels_alike(lowered: Lowered, candidate: _Candidate) -> bool:
    """Whether ops with fewer channels tell what they do with all: nothing but time is taken apart
    or put together, and no width is spelled out."""
    time = candidate.length.free_symbols
    for node in candidate.members:
        if node.target in _ADDS | _RENAMES or node.target is operator.getitem:
            continue
        if getattr(node.target, "is_vmap", False):
            continue
        rank = node.meta["val"].ndim if _is_tensor(node) else 0
        if node.target in _PADS:
            amounts = node.args[1]  # they begin with the last dim
            dims = {rank - 1 - i // 2 for i, by in enumerate(amounts) if by != 0}
        elif node.target in _ALONG_ONE:
            dims = {arguments_of(node).get("dim", 0)}
        else:
            return False
        whole = node if node.target is aten.cat.default else node.args[0]
        if not all(lowered.shape(whole)[dim].free_symbols & time for dim in dims):
            return False
    return True


def _prove(
    lowered: Lowered, candidate: _Candidate, tried: dict[Any, list[tuple[int, ...]] | None]
) -> list[_Found] | None:
    """Each output as a recurrence; ``None`` if one is not."""
    outputs, length = candidate.outputs, candidate.length
    if not 0 < len(outputs) <= _MOST_OUTPUTS:
        return None
    try:
        piece, operands, symbols = write_piece(lowered, candidate.members, outputs)
    except ValueError:
        return None
    whole = piece.in_double
    if whole is None or not 2 <= len(operands) <= _MOST_OPERANDS:
        return None
    if not all(_is_tensor(o) and _dims_of(lowered, o, length) for o in (*operands, *outputs)):
        return None
    # A smaller batch will do; the code may hold for this length alone.
    numbers = {
        symbol: hint if symbol in length.free_symbols else min(hint, 2)
        for symbol, hint in lowered.hints.items()
    }
    try:
        shapes = [[int(s.xreplace(numbers)) for s in lowered.shape(o)] for o in operands]
    except TypeError:  # a size that follows from the data
        return None
    if sum(map(math.prod, shapes)) > _MOST_ELEMENTS:
        smaller = _smaller(lowered, candidate, numbers)
        if smaller is None:
            return None
        numbers, most = smaller
        shapes = [
            [
                int(s.xreplace(numbers)) if s.free_symbols & length.free_symbols else min(own, most)
                for s, own in zip(lowered.shape(operand), shape)
            ]
            for operand, shape in zip(operands, shapes)
        ]
        if sum(map(math.prod, shapes)) > _MOST_ELEMENTS:
            return None
    dims = [_dims_of(lowered, node, length) for node in (*operands, *outputs)]
    key = (piece.fingerprint, str(shapes), str(dims), str([o.meta["val"].dtype for o in operands]))
    if key not in tried:
        arguments = [int(symbol.xreplace(numbers)) for symbol in symbols]
        likes = [operand.meta["val"] for operand in operands]
        trial = _Trial(lambda *values: whole(*values, *arguments), likes, shapes, dims)
        with disable_proxy_modes_tracing(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            tried[key] = trial.run()
    if tried[key] is None:
        return None
    found = [
        _Found(output, dim, operands[gate], gate_dim, operands[x], x_dim)
        for output, (dim, gate, gate_dim, x, x_dim) in zip(outputs, tried[key])
    ]
    return found if all(_has_its_shape(lowered, item) for item in found) else None


def _has_its_shape(lowered: Lowered, found: _Found) -> bool:
    """Whether an output has the shape of what is summed up, with the real sizes."""
    shapes = [[_number(lowered, s) for s in lowered.shape(n)] for n in (found.x, found.output)]
    shapes[0].insert(found.dim, shapes[0].pop(found.x_dim))
    return shapes[0] == shapes[1]


class _Trial:
    """Runs a candidate on random operands, and compares it with recurrences in them.

    Args:
        whole: the candidate, in float64.
        likes: its operands' dtypes and devices.
        shapes: of its operands in the trial.
        dims: that may be time, for all operands and then for all outputs.
    """

    def __init__(
        self, whole: Any, likes: Sequence[Tensor], shapes: list[list[int]], dims: list[list[int]]
    ) -> None:
        self._whole, self._likes, self._shapes = whole, likes, shapes
        self._operand_dims, self._output_dims = dims[: len(shapes)], dims[len(shapes) :]

    def run(self) -> list[tuple[int, ...]] | None:
        """For each output ``(dim, gate, its dim, x, its dim)``, operands by their number."""
        found = None
        for scale in _SCALES:
            values = [
                self._random(like, shape, scale) for like, shape in zip(self._likes, self._shapes)
            ]
            try:
                with torch.enable_grad():
                    outputs = self._whole(*values)
                    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
                    if found is None:
                        found = [self._readings(values, out, i) for i, out in enumerate(outputs)]
                    if not all(found) or not self._agrees(found, values, outputs):
                        return None
            except Exception:  # whatever it says to such operands
                return None
        return found

    def _random(self, like: Tensor, shape: list[int], scale: float) -> Tensor:
        dtype = torch.complex128 if like.is_complex() else torch.float64
        if not like.is_complex() and not like.is_floating_point():
            raise TypeError("a recurrence is not of whole numbers")
        return (scale * torch.randn(shape, dtype=dtype)).to(like.device).requires_grad_()

    def _readings(self, values: list[Tensor], out: Tensor, index: int) -> tuple[int, ...] | None:
        """The operands in which an output is a recurrence, by its values."""
        for dim in self._output_dims[index]:
            for x, gate in itertools.permutations(range(len(values)), 2):
                for x_dim, gate_dim in itertools.product(
                    self._operand_dims[x], self._operand_dims[gate]
                ):
                    reading = (dim, gate, gate_dim, x, x_dim)
                    if _fits(*_lined_up(reading, values), out, dim):
                        return reading
        return None

    def _agrees(
        self, readings: list[tuple[int, ...]], values: list[Tensor], outputs: Sequence[Tensor]
    ) -> bool:
        """Whether the outputs are those of the recurrences, and so are the gradients."""
        expected = [linear_scan(*_lined_up(reading, values), reading[0]) for reading in readings]
        if not all(_close(have, want) for have, want in zip(expected, outputs)):
            return False
        cotangents = [torch.randn_like(out) for out in outputs]
        grads = [
            torch.autograd.grad(side, values, cotangents, allow_unused=True)
            for side in (expected, outputs)
        ]
        return all(
            _close(*(torch.zeros_like(v) if g is None else g for g in pair))
            for v, pair in zip(values, zip(*grads))
        )


def _lined_up(reading: tuple[int, ...], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Gate and x with time where the output has it."""
    dim, gate, gate_dim, x, x_dim = reading
    return values[gate].movedim(gate_dim, dim), values[x].movedim(x_dim, dim)


def _fits(gate: Tensor, x: Tensor, out: Tensor, dim: int) -> bool:
    """Whether ``out`` has the values of the recurrence along ``dim``."""
    if x.shape != out.shape or gate.ndim != x.ndim or gate.shape[dim] != x.shape[dim]:
        return False
    if any(size not in (1, whole) for size, whole in zip(gate.shape, out.shape)):
        return False
    begins = _close(x.narrow(dim, 0, 1).to(out.dtype), out.narrow(dim, 0, 1))
    return begins and _close(linear_scan(gate, x, dim), out)


def _close(have: Tensor, want: Tensor) -> bool:
    if have.shape != want.shape or have.dtype != want.dtype:
        return False
    if not bool(want.isfinite().all()):
        return False
    return bool((have - want).abs().max() <= _TOLERANCE * want.abs().max().clamp_min(1e-30))


# -- rewriting -----------------------------------------------------------------------------------


def _replace(lowered: Lowered, candidate: _Candidate, found: _Found) -> None:
    """Users outside of the candidate get the recurrence."""
    graph, inside, output = lowered.graph, set(candidate.members), found.output
    last = candidate.members[-1]

    def insert(target: Any, *args: Any) -> fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.call_function(target, args)
        place = ("region", "stack_trace", "nn_module_stack")
        last.meta = {key: output.meta[key] for key in place if key in output.meta}
        given = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        last.meta["val"] = value_of(last, fake_mode_of(graph), given, {})
        return last

    def moved(node: fx.Node, dim: int) -> fx.Node:
        return node if dim == found.dim else insert(aten.movedim.int, node, dim, found.dim)

    gate, x = moved(found.gate, found.gate_dim), moved(found.x, found.x_dim)
    new = insert(linear_scan, gate, x, found.dim)
    wanted = output.meta["val"].dtype
    if new.meta["val"].dtype != wanted:
        new = insert(aten.to.dtype, new, wanted)
    output.replace_all_uses_with(
        new, delete_user_cb=lambda user: user not in inside and user is not new
    )
    # The sizes are the same in the captured call; that they are is guarded from now on.
    for have, want in zip(lowered.shape(new), lowered.shape(output)):
        if have != want:
            lowered.shape_env.evaluate_expr(sympy.Eq(have, want))


def _refresh(lowered: Lowered) -> None:
    """Say the sizes of all values by those of the inputs again, if they can be said."""
    mode = fake_mode_of(lowered.graph)
    known: dict[fx.Node, Any] = {}
    for node in lowered.graph.nodes:
        if node.op != "call_function":
            known[node] = node.meta.get("val")
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        try:
            known[node] = value_of(node, mode, args, kwargs)
        except Unreadable:
            return
    for node, value in known.items():
        if node.op == "call_function":
            node.meta["val"] = value
            node.meta.pop("shape_exprs", None)
