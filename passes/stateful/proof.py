"""Proof by execution that a function goes on from the state it is given as if it had never stopped.

A call is run on small random tensors, on whole sequences and on chunks of them, each chunk being
given the state of the one before it: outputs, final states and the gradients of every operand and
of the first state have to be the same. Lengths and borders are no multiples of any block that the
function may work in. In float64 they agree to rounding; a function that does not compute in float64
(a kernel, or code that casts) is tried in its own dtypes, where what a chunk would give without a
state has to be far outside of the tolerance.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import is_symbolic

from seqsplit.passes.stateful.calls import Call, Convention, Recurrence, Size, call_of, chained
from seqsplit.passes.trials.kernel import TOLERANCES

__all__ = ["recurrence_of_call"]

# Lengths with borders of chunks, and the sizes that stand for others (a batch). The long ones are
# for what works in blocks.
_TRIALS = {
    13: ((0, 1, 9, 13), 2),
    131: ((0, 67, 100, 131), 1),
    389: ((0, 133, 389), 1),
}
_LARGEST = 2**22  # elements of all operands of a trial, unless it is one of the first two
_EXACT = 1e-10
_POWER = 10  # times as far off as the tolerance has to be what forgets the state
_SPREAD = 0.3  # of the values: decays and gates of either sign neither explode nor vanish

_PROVED: dict[Any, Recurrence | None] = {}

Open = str  # the name of a size that varies: "T" is the sequence's
_LENGTH: Open = "T"


@dataclass(frozen=True)
class _Given:
    """An operand: its sizes, numbers or names of those that vary."""

    shape: tuple[int | Open, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def dim(self) -> int | None:
        """Its dim along the sequence."""
        return self.shape.index(_LENGTH) if _LENGTH in self.shape else None


def recurrence_of_call(
    function: Callable, convention: Convention, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Recurrence, list[Tensor]] | None:
    """What a call is proved to be, and its operands; ``None`` if it is not.

    Args:
        function: what is called.
        convention: what the names of its parameters say.
        args, kwargs: of the call; tensors need no data.
    """
    found = call_of(function, convention, args, kwargs)
    if found is None:
        return None
    call, operands = found
    for dim in _candidates(operands[0]):
        givens = _givens(operands, call, dim)
        recurrence = givens and _proved(call, givens)
        if recurrence:
            return recurrence, operands
    return None


def _candidates(first: Tensor) -> list[int]:
    """The dims of the first operand that may be the sequence, those of open sizes first: a length
    that the model's code has fixed is a number."""
    is_open = [is_symbolic(size) for size in first.shape]
    usual = [dim for dim in (1, 2, 0) if dim < first.ndim]
    numbers = [dim for dim in usual if dim > 0 and not is_open[dim] and first.shape[dim] > 1]
    return [*(dim for dim in usual if is_open[dim]), *numbers]


def _givens(operands: Sequence[Tensor], call: Call, dim: int) -> tuple[_Given, ...] | None:
    """The operands, taking ``dim`` of the first one for the sequence."""
    length = operands[0].shape[dim]
    names = {_text(length): _LENGTH}
    givens = []
    for index, operand in enumerate(operands):
        shape: list[int | Open] = []
        for place, size in enumerate(operand.shape):
            if is_symbolic(size):
                shape.append(names.setdefault(_text(size), f"s{len(names)}"))
            else:  # of equal numbers, only those of the same dim can be the length
                is_length = place == dim and not is_symbolic(length) and size == length
                shape.append(_LENGTH if is_length else int(size))
        is_state = index >= call.num_operands
        if shape.count(_LENGTH) > (0 if is_state else 1):
            return None
        # The planner's tensors have no values: what is tried for them is tried here.
        device = torch.device("cpu") if operand.device.type == "meta" else operand.device
        givens.append(_Given(tuple(shape), operand.dtype, device))
    return tuple(givens)


def _text(size: Any) -> str:
    return str(size.node.expr if isinstance(size, torch.SymInt) else size)


def _proved(call: Call, givens: tuple[_Given, ...]) -> Recurrence | None:
    key = (call.fingerprint, call.ends, givens)
    if key not in _PROVED:
        devices = [given.device for given in givens if given.device.type == "cuda"]
        with (
            unset_fake_temporarily(),
            disable_proxy_modes_tracing(),
            torch.random.fork_rng(dict.fromkeys(devices)),
            torch.enable_grad(),
            torch.autocast(givens[0].device.type, enabled=False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            _PROVED[key] = _tried(call, givens)
    return _PROVED[key]


def _tried(call: Call, givens: tuple[_Given, ...]) -> Recurrence | None:
    """In float64, else in its own dtypes."""
    for double in (True, False):
        try:
            outline = _outline(call, givens)
            if all(_agrees(trial, outline.dim, double) for trial in _trials(call, givens, double)):
                return replace(outline, takes_double=double)
        except Exception:  # a function that fails on such inputs is not proved
            continue
    return None


# -- one trial -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """Operands of one length.

    Attributes:
        call: what is tried.
        dims: of each operand, the dim along the sequence.
        values: the operands.
        bounds: of chunks.
        sizes: what the open sizes stand for.
    """

    call: Call
    dims: tuple[int | None, ...]
    values: tuple[Tensor, ...]
    bounds: tuple[int, ...]
    sizes: dict[Open, int]


def _trials(call: Call, givens: Sequence[_Given], double: bool) -> Iterator[_Trial]:
    for number, (length, (bounds, batch)) in enumerate(_TRIALS.items()):
        names = dict.fromkeys(s for g in givens for s in g.shape if isinstance(s, Open))
        # Different from each other and from trial to trial.
        sizes = {name: batch + index for index, name in enumerate(names)} | {_LENGTH: length}
        generator = torch.Generator().manual_seed(number)
        values = tuple(_drawn(given, sizes, generator, double) for given in givens)
        if number > 1 and sum(value.numel() for value in values) > _LARGEST:
            return
        dims = tuple(given.dim for given in givens[: call.num_operands])
        yield _Trial(call, dims, values, bounds, sizes)


def _drawn(given: _Given, sizes: dict, generator: torch.Generator, double: bool) -> Tensor:
    shape = [sizes.get(size, size) for size in given.shape]
    value = torch.randn(shape, generator=generator, dtype=torch.float64) * _SPREAD
    if len(shape) > 3:  # keys, of whose norm products are powers
        value = value * shape[-1] ** -0.5
    return value.to(given.device, torch.float64 if double else given.dtype)


def _agrees(trial: _Trial, dim: int, double: bool) -> bool:
    """Whether chunks give what the whole gives, from the function's own beginning and from a
    state. The output's dim along the sequence is ``dim``."""
    call = trial.call
    given, state = call.parts(trial.values)
    with torch.no_grad():
        out, final = call(given, state, ends=True)
        if not torch.equal(call(given, state, ends=False)[0], out):
            return False
    if call.begins:
        return _same(trial, dim, double)
    generator = torch.Generator().manual_seed(final.numel())
    state = torch.randn(final.shape, generator=generator, dtype=torch.float64) * _SPREAD
    values = (*given, state.to(final.device, final.dtype))
    from_state = replace(trial, call=replace(call, begins=True), values=values)
    return _same(trial, dim, double) and _same(from_state, dim, double)


def _same(trial: _Trial, dim: int, double: bool) -> bool:
    call, dims, bounds, values = trial.call, trial.dims, trial.bounds, trial.values
    tolerance = _EXACT if double else TOLERANCES.get(values[0].dtype, 0.0)
    whole = _results(lambda leaves: call(*call.parts(leaves), ends=True), values)
    chunks = _results(lambda leaves: chained(call, dims, dim, leaves, bounds), values)
    for have, want in zip(chunks, whole, strict=True):
        if have.shape != want.shape or have.dtype != want.dtype:
            return False
        if not _distance(have, want) <= tolerance:
            return False
    if double:
        return True
    with torch.no_grad():
        forgetful, _ = chained(call, dims, dim, values, bounds, handed_on=False)
    return bool(_distance(forgetful, whole[0]) > _POWER * tolerance)


def _results(run: Callable, values: Sequence[Tensor]) -> list[Tensor]:
    """Output, final state and the gradients of all operands."""
    if any(result.requires_grad for result in run([value.detach() for value in values])):
        raise TypeError("it differentiates what it is not given: a weight that it closes over")
    leaves = [value.detach().clone().requires_grad_() for value in values]
    versions = [leaf._version for leaf in leaves]
    results = run(leaves)
    cotangents = [_cotangent(result) for result in results]
    grads = torch.autograd.grad(results, leaves, cotangents, allow_unused=True)
    if versions != [leaf._version for leaf in leaves]:
        raise TypeError("it writes into what it is given")
    zeros = (torch.zeros_like(leaf) for leaf in leaves)
    return [*(r.detach() for r in results), *(z if g is None else g for g, z in zip(grads, zeros))]


def _cotangent(result: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(result.numel())
    drawn = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    return drawn.to(result.device, result.dtype)


def _distance(have: Tensor, want: Tensor) -> Tensor:
    have, want = have.double(), want.double()
    return (have - want).norm() / want.norm().clamp_min(1e-30)


# -- what is said ----------------------------------------------------------------------------------


def _outline(call: Call, givens: Sequence[_Given]) -> Recurrence:
    """What a call gives, seen from two runs.

    Raises:
        ValueError: a size of it is none of its operands'.
    """
    tried, shapes = [], []
    with torch.no_grad():
        for trial, _ in zip(_trials(call, givens, double=False), range(2)):
            given, state = call.parts(trial.values)
            results = call(given, state, ends=True)
            tried.append(trial)
            shapes.append([tuple(result.shape) for result in results])
        in_tuple = isinstance(call.result(given, state, ends=False), tuple)
    out, final = (
        tuple(_size(tried, givens, sizes) for sizes in zip(*both, strict=True))
        for both in zip(*shapes)
    )
    along = [size for size in (*out, *final) if _is_length(size, givens)]
    dim, *more = [dim for dim, size in enumerate(out) if size in along]
    if more or len(along) > 1:
        raise ValueError("not one dim along the sequence")
    dtypes = tuple(result.dtype for result in results)
    return Recurrence(call, tried[0].dims, dim, (out, final), dtypes, in_tuple, takes_double=False)


def _is_length(size: Size, givens: Sequence[_Given]) -> bool:
    return isinstance(size, tuple) and givens[size[0]].shape[size[1]] == _LENGTH


def _size(tried: Sequence[_Trial], givens: Sequence[_Given], sizes: Sequence[int]) -> Size:
    """Which size of the operands a size is."""
    if len(set(sizes)) == 1:
        return sizes[0]
    for index, given in enumerate(givens):
        for dim, name in enumerate(given.shape):
            if [trial.sizes.get(name) for trial in tried] == list(sizes):
                return index, dim
    raise ValueError(f"sizes {sizes} are none of the operands'")
