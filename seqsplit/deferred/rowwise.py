"""Is a call row-wise? Found by executing it.

A call on a deferred value stays deferred if one row of its result depends on one row of its
operands. Nothing is known of the functions beforehand: the call is run on six random rows, laid
out as ``[2, 3]`` tokens, as ``[1, 6]``, and as six calls on one row each, in float64. If all agree
it is row-wise. Six rows do not tell what a call does to the tenth (``x[:, 10:] = 0``), so it is
tried with smaller numbers among its arguments too. What is found is kept for calls of the same
kind.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from seqsplit.deferred.expression import Layout, Node, Operand, Operation, Result, Source, Value
from seqsplit.ops.autocast import Autocast
from seqsplit.ops.held import own_saved_tensors

__all__ = ["apply"]

_ROWS = 6
_DRAWS = 2
_LARGE = 2**22  # elements of a weight


@dataclass(frozen=True)
class _Finding:
    """How a row-wise call reads its arguments, and what it gives.

    Attributes:
        choice: for each argument, which of its readings is right.
        results: what it gives, with leads of no meaning.
        structure: of what the call returns.
    """

    choice: tuple[int, ...]
    results: tuple[Result, ...]
    structure: pytree.TreeSpec


_findings: dict[Any, _Finding | None] = {}


def apply(
    function: Callable,
    leaves: Sequence[Any],
    structure: pytree.TreeSpec,
    *,
    exact: bool = True,
) -> tuple[Operation, pytree.TreeSpec] | None:
    """The operation for a call, with the structure of its results; ``None`` if it is not row-wise.

    Args:
        function: what is called.
        leaves, structure: its arguments, flattened, with :class:`Operand` for deferred values.
        exact: try it in float64. A call with large weights is tried in their own dtype: a wrong
            row differs by more than rounding.
    """
    leaves = _of_one_lead(leaves)
    if leaves is None:
        return None
    main = next(leaf for leaf in leaves if isinstance(leaf, Operand))
    readings = [list(_readings(leaf, main)) for leaf in leaves]
    exact = exact and all(leaf.numel() < _LARGE for leaf in leaves if isinstance(leaf, Tensor))
    autocast = Autocast.current()
    key = (function, structure, autocast, tuple(map(_describe, readings)))
    if key not in _findings:
        _findings[key] = _find(function, readings, structure, main, exact)
    found = _findings[key]
    if found is None:
        return None
    chosen = [options[index] for options, index in zip(readings, found.choice)]
    lead = main.layout.lead
    results = [replace(result, layout=Layout(lead, result.layout.axes)) for result in found.results]
    recorded = torch.is_grad_enabled()
    return Operation(function, chosen, structure, results, recorded, autocast), found.structure


def _of_one_lead(leaves: Sequence[Any]) -> list[Any] | None:
    """The arguments with all deferred ones over the same tokens' dims.

    ``[B, T, 1]`` may be three dims of tokens in one value and two in another.
    """
    operands = [leaf for leaf in leaves if isinstance(leaf, Operand)]
    lead = min((operand.layout.lead for operand in operands), key=len)
    if any(operand.node.num_rows != operands[0].node.num_rows for operand in operands):
        return None
    if not operands[0].node.num_rows:
        return None
    result: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Operand) and leaf.layout.lead != lead:
            surplus = leaf.layout.lead[len(lead) :]
            if leaf.layout.lead != lead + surplus or not leaf.layout.is_leading:
                return None
            leaf = Operand(_widened(leaf.node, surplus), Layout.leading(lead))
        result.append(leaf)
    return result


def _widened(node: Node, ones: tuple[int, ...]) -> Node:
    """Rows with further features of size one."""
    layout = Layout.leading((node.num_rows,))
    features = ones + node.features
    leaves, structure = pytree.tree_flatten(((Operand(node, layout), (-1, *features)), {}))
    results = [Result(layout, features, node.dtype)]
    operation = Operation(
        torch.reshape, leaves, structure, results, torch.is_grad_enabled(), Autocast.current()
    )
    return Value(operation, 0)


def _readings(leaf: Any, main: Operand) -> Iterator[Any]:
    """What an argument may be: a tensor may have a row per token, or be the same for all."""
    if not isinstance(leaf, Tensor) or is_traceable_wrapper_subclass(leaf):
        yield leaf  # a tensor of a class of its own is a weight: it may have no rows to take
        return
    layout = main.layout
    lead, ndim = layout.lead, len(layout.lead) + len(main.node.features)
    if leaf.ndim >= len(lead) and leaf.shape[: len(lead)] == lead:
        yield _row_operand(leaf, Layout.leading(lead))
    if 0 < leaf.ndim <= ndim:
        padded = leaf.reshape((1,) * (ndim - leaf.ndim) + leaf.shape)
        sizes = [padded.shape[axis] for axis in layout.axes]
        if any(size != 1 for size in sizes) and all(s in (1, n) for s, n in zip(sizes, lead)):
            wanted = list(padded.shape)
            for axis, size in zip(layout.axes, lead):
                wanted[axis] = size
            yield _row_operand(padded.expand(wanted), layout)
    yield leaf


def _row_operand(value: Tensor, layout: Layout) -> Operand:
    return Operand(Source(layout.rows_of(value), None), layout)


def _describe(options: list[Any]) -> Any:
    """What a finding depends on in an argument: its kind, not the values of its rows."""
    parts = []
    for option in options:
        if isinstance(option, Operand):
            node = option.node
            layout = option.layout
            parts.append(
                (len(layout.lead), layout.axes, node.features, node.dtype, node.requires_grad)
            )
        elif isinstance(option, Tensor):
            kind = None
            if is_traceable_wrapper_subclass(option):
                kind = (type(option), repr(option.__tensor_flatten__()[1]))
            parts.append((tuple(option.shape), option.dtype, option.requires_grad, kind))
        elif isinstance(option, float) and option not in (0.0, 1.0):
            parts.append(float)
        else:
            parts.append((type(option), repr(option)))
    return tuple(parts)


def _find(
    function: Callable,
    readings: list[list[Any]],
    structure: pytree.TreeSpec,
    main: Operand,
    exact: bool,
) -> _Finding | None:
    for choice in itertools.product(*(range(len(options)) for options in readings)):
        found = _try(function, readings, structure, main, exact, choice)
        if found is None:
            continue
        if any(
            _try(function, readings, structure, main, exact, other)
            for other in _whole_instead(choice, readings)
        ):
            return None
        return _Finding(choice, *found)
    return None


def _try(
    function: Callable,
    readings: list[list[Any]],
    structure: pytree.TreeSpec,
    main: Operand,
    exact: bool,
    choice: Sequence[int],
) -> tuple[tuple[Result, ...], pytree.TreeSpec] | None:
    leaves = [options[index] for options, index in zip(readings, choice)]
    with torch.random.fork_rng(devices=_cuda_devices(main)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _seed(main)
        try:
            return _Trial(function, leaves, structure, main, exact).run()
        except Exception:  # whatever the function does not like about this reading
            return None


def _whole_instead(choice: Sequence[int], readings: list[list[Any]]) -> Iterator[tuple[int, ...]]:
    """Other choices, in which a tensor that was read as one row per token is the same for all.

    A function that takes it either way (``isin``) asks for a set, and six rows need not show it.
    """
    for place, options in enumerate(readings):
        if choice[place] < len(options) - 1:
            yield (*choice[:place], len(options) - 1, *choice[place + 1 :])


def _cuda_devices(main: Operand) -> list[int]:
    return [main.node.device.index or 0] if main.node.device.type == "cuda" else []


def _seed(main: Operand) -> None:
    """Seed the generators that a trial draws from, and no others: these were forked."""
    torch.default_generator.manual_seed(0)
    for device in _cuda_devices(main):
        torch.cuda.default_generators[device].manual_seed(0)


class _Trial:
    """One reading of a call's arguments, put to the test."""

    def __init__(
        self,
        function: Callable,
        leaves: list[Any],
        structure: pytree.TreeSpec,
        main: Operand,
        exact: bool,
    ) -> None:
        self._exact = exact
        self._function, self._structure = function, structure
        self._leaves = [_stand_in(leaf) for leaf in leaves]
        self._layout = main.layout
        self._chosen = {
            id(leaf): _telling_rows(leaf.node)
            for leaf in leaves
            if isinstance(leaf, Operand)
            and isinstance(leaf.node, Source)
            and leaf.node.device.type != "meta"
        }

    def run(self) -> tuple[tuple[Result, ...], pytree.TreeSpec] | None:
        axes: list[set[tuple[int, ...]]] | None = None
        for _ in range(_DRAWS):
            rows = [self._draw(leaf) for leaf in self._leaves]
            tried = [_wide(leaf) for leaf in rows] if self._exact else rows
            with torch.no_grad():
                possible = self._compare(tried)
            if possible is None:
                return None
            axes = possible if axes is None else [a & b for a, b in zip(axes, possible)]
        if any(not options for options in axes):
            return None
        with torch.no_grad():
            if any(self._mixes(numbers) for numbers in _with_smaller_numbers(tried)):
                return None
        with torch.enable_grad(), own_saved_tensors():
            rows = [_requiring_grad(row, leaf) for row, leaf in zip(rows, self._leaves)]
            arguments = self._arguments(rows, self._lead_of(_ROWS), slice(None))
            values, given = pytree.tree_flatten(self._called(arguments))
        results = []
        for value, options in zip(values, axes):
            chosen = min(options)
            features = [size for dim, size in enumerate(value.shape) if dim not in chosen]
            layout = Layout(self._layout.lead, chosen)
            result = Result(layout, tuple(features), value.dtype, value.requires_grad)
            shares = _shared(value, arguments)
            if shares is not None:
                same = value is arguments[shares]
                result = replace(result, shares=shares, is_argument=same)
            results.append(result)
        return tuple(results), given

    def _lead_of(self, num_rows: int) -> tuple[int, ...]:
        return (1,) * (len(self._layout.lead) - 1) + (num_rows,)

    def _draw(self, leaf: Any) -> Any:
        """Six rows: real ones where they exist, random ones where they are still to be computed."""
        if not isinstance(leaf, Operand):
            return leaf
        node = leaf.node
        if id(leaf) in self._chosen:
            return node.rows().detach()[self._chosen[id(leaf)]]
        device = "cpu" if node.device.type == "meta" else node.device
        return _random((_ROWS, *node.features), node.dtype, device)

    def _call(self, rows: list[Any], lead: tuple[int, ...], which: slice) -> Any:
        return self._called(self._arguments(rows, lead, which))

    def _arguments(self, rows: list[Any], lead: tuple[int, ...], which: slice) -> list[Any]:
        return [
            Layout(lead, leaf.layout.axes).arrange(value[which])
            if isinstance(leaf, Operand)
            else value
            for leaf, value in zip(self._leaves, rows)
        ]

    def _called(self, arguments: list[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(arguments, self._structure)
        with torch._C._EnableTorchFunction():  # as when it is computed
            return self._function(*args, **kwargs)

    def _compare(self, rows: list[Any]) -> list[set[tuple[int, ...]]] | None:
        """For each result, the axes along which it has one row per token."""
        before = torch.get_rng_state()
        judged = self._judge(rows)
        if not torch.equal(before, torch.get_rng_state()):
            return None  # it draws random numbers
        if judged is None:
            return None
        return [{axes for axes, verdict in slot.items() if verdict} for slot in judged]

    def _mixes(self, rows: list[Any]) -> bool:
        """Whether results of the right shape hold something else than each row's own."""
        try:
            judged = self._judge(rows)
        except Exception:  # these numbers are none that the function takes: nothing is learnt
            return False
        if judged is None:
            return False
        return any(False in slot.values() and True not in slot.values() for slot in judged)

    def _judge(self, rows: list[Any]) -> list[dict[tuple[int, ...], bool | None]] | None:
        """For each result and the axes that may be its tokens', whether rows agree however they
        are laid out; ``None`` for axes of other sizes."""
        dims = len(self._layout.lead)
        full = (_ROWS,) if dims == 1 else (1,) * (dims - 2) + (2, 3)
        whole = pytree.tree_leaves(self._call(rows, full, slice(None)))
        flat = pytree.tree_leaves(self._call(rows, self._lead_of(_ROWS), slice(None)))
        single = [
            pytree.tree_leaves(self._call(rows, self._lead_of(1), slice(row, row + 1)))
            for row in range(_ROWS)
        ]
        if not whole or not all(isinstance(value, Tensor) for value in whole):
            return None
        judged = []
        for slot, value in enumerate(whole):
            options = {tuple(range(dims)), self._layout.axes}
            verdicts = {}
            for axes in options:
                in_one = _agree(value, full, axes, [flat[slot]], self._lead_of(_ROWS))
                singly = _agree(value, full, axes, [s[slot] for s in single], self._lead_of(1))
                fits = in_one is not None and singly is not None
                verdicts[axes] = in_one and singly if fits else None
            judged.append(verdicts)
        return judged


def _random(shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device=device).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 4, shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype) * 2


def _stand_in(leaf: Any) -> Any:
    """Values for a tensor that has none: a step that is planned for is not run on a device."""
    if not isinstance(leaf, Tensor) or not leaf.is_meta:
        return leaf
    return _random(leaf.shape, leaf.dtype, "cpu").requires_grad_(leaf.requires_grad)


def _agree(
    value: Tensor,
    lead: tuple[int, ...],
    axes: tuple[int, ...],
    parts: list[Tensor],
    part_lead: tuple[int, ...],
) -> bool | None:
    if not _has_lead(value, lead, axes):
        return None
    if not all(_has_lead(part, part_lead, axes) for part in parts):
        return None
    whole = Layout(lead, axes).rows_of(value)
    joined = torch.cat([Layout(part_lead, axes).rows_of(part) for part in parts])
    if whole.shape != joined.shape or whole.dtype != joined.dtype:
        return None
    if not whole.is_floating_point():
        return torch.equal(whole, joined)
    scale = 1e3 * torch.finfo(whole.dtype).eps  # of the dtype it was tried in
    finite = whole[whole.isfinite()]
    largest = float(finite.abs().amax()) if finite.numel() else 0.0
    return torch.allclose(whole, joined, rtol=scale, atol=scale * largest, equal_nan=True)


def _has_lead(value: Tensor, lead: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    return value.ndim > max(axes) and tuple(value.shape[axis] for axis in axes) == lead


def _with_smaller_numbers(leaves: Sequence[Any]) -> Iterator[list[Any]]:
    """The same arguments with whole numbers that reach beyond the rows of a trial made small: one
    by one, in pairs if there are few of them, and all of them."""
    large = sorted({abs(n) for leaf in leaves for n in _numbers_in(leaf) if abs(n) >= _ROWS})
    groups = [(number,) for number in large]
    if len(large) <= _ROWS:
        groups += itertools.combinations(large, 2)
    for group in dict.fromkeys((*groups, tuple(large))):
        if group:
            small = {number: rank for rank, number in enumerate(group, 1)}
            yield [_replaced(leaf, small) for leaf in leaves]


def _numbers_in(leaf: Any) -> list[int]:
    if isinstance(leaf, slice):
        leaf = (leaf.start, leaf.stop, leaf.step)
    parts = leaf if isinstance(leaf, tuple) else (leaf,)
    return [part for part in parts if isinstance(part, int) and not isinstance(part, bool)]


def _replaced(leaf: Any, small: dict[int, int]) -> Any:
    def one(number: Any) -> Any:
        if not _numbers_in(number) or abs(number) not in small:
            return number
        return small[abs(number)] if number > 0 else -small[abs(number)]

    if isinstance(leaf, slice):
        return slice(one(leaf.start), one(leaf.stop), one(leaf.step))
    return one(leaf) if isinstance(leaf, int) else leaf


def _shared(value: Tensor, arguments: Sequence[Any]) -> int | None:
    """Which argument's memory a result lies in."""
    if type(value) is not Tensor:
        return None
    memory = value.untyped_storage()._cdata
    for place, argument in enumerate(arguments):
        if type(argument) is Tensor and argument.untyped_storage()._cdata == memory:
            return place
    return None


def _telling_rows(node: Source) -> Tensor:
    """Rows that differ, as far as there are such: a prompt's labels may all be the same."""
    rows = node.rows()
    spread = torch.linspace(0, node.num_rows - 1, _ROWS).round().long()
    if rows.is_floating_point() or rows.is_complex() or not rows.numel():
        return spread
    first = rows.detach().reshape(node.num_rows, -1)[:, 0].cpu()
    kinds = first.unique()
    kinds = kinds[torch.linspace(0, len(kinds) - 1, min(len(kinds), _ROWS)).round().long()]
    found = [int((first == kind).nonzero()[0]) for kind in kinds]
    return torch.tensor([*found, *spread.tolist()][:_ROWS])


def _requiring_grad(value: Any, leaf: Any) -> Any:
    """The same, requiring a gradient if the argument does: what is detached comes out without."""
    wanted = leaf.node if isinstance(leaf, Operand) else leaf
    if isinstance(value, Tensor) and wanted.requires_grad:
        return value.detach().requires_grad_()
    return value


def _wide(value: Any) -> Any:
    if is_traceable_wrapper_subclass(value):
        return value
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value
