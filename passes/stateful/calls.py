"""Recurrent functions: those that take a state and give it back, as calls of themselves.

Layers of linear attention and state-space layers run through functions of one convention: one
parameter takes the state before the first position, another one asks for the state after the last.
Such a function can be called on a chunk's rows with the state that the chunk before it has left,
whatever it does inside: blocks of 64 in a Python loop, or a kernel. So its code is not traced
through: a call is one node (:mod:`.stand_in`), of which this file says what it computes.

A function is recognised by the names of its parameters, and nothing is believed: a call of which
every tensor has a known meaning is run, whole and in chunks (:mod:`.proof`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from seqsplit.errors import InvalidOptionError, format_message
from seqsplit.ir.placement import Chunk, Placement, Whole
from seqsplit.ops.scan import recurrent_rows

__all__ = [
    "Call",
    "Convention",
    "Recurrence",
    "Size",
    "as_target",
    "call_of",
    "chained",
    "convention_of",
    "on_chunk",
    "recurrent",
    "registered",
]

# What the two parameters are called. The state is given after the output.
_STATES = ("initial_state", "initial_states")
_FLAGS = ("output_final_state", "return_final_state", "return_final_states")

_REGISTERED: WeakKeyDictionary[Callable, Convention] = WeakKeyDictionary()


@dataclass(frozen=True)
class Convention:
    """The names of two parameters of a function.

    Attributes:
        state: takes the state before the first position, or ``None``.
        flag: whether the state after the last position is given beside the output.
    """

    state: str
    flag: str


def recurrent(
    function: Callable | None = None,
    *,
    initial_state: str = _STATES[0],
    output_final_state: str = _FLAGS[0],
) -> Callable:
    """Say that a function takes and gives its recurrent state, under whatever names.

    ``function(*tensors, initial_state=None, output_final_state=False, ...)`` gives the output, or a
    tuple of it and ``None``; with ``output_final_state=True`` it gives ``(output, state)``, and
    with that state as ``initial_state`` it goes on where it was. Tensors that are as long as the
    sequence hold one entry per position; all others (weights, one decay per head) are used by every
    position alike. It must not write into what it is given.

    Functions with these names need not be registered if the model's code refers to them. A call is
    tried by execution before it is split, registered or not; if the trial fails it runs as it would
    without.

    Args:
        function: a Python function, whatever it calls; ``None`` for a decorator.
        initial_state: the parameter that takes the state, a tensor or ``None``.
        output_final_state: the parameter that asks for the state after the last position.

    Returns:
        The function itself.

    Raises:
        InvalidOptionError: it is no Python function, or has no such parameters.
    """
    if function is None:
        return functools.partial(
            recurrent, initial_state=initial_state, output_final_state=output_final_state
        )
    names = _parameters(function)
    missing = [name for name in (initial_state, output_final_state) if name not in names]
    if missing or not isinstance(function, FunctionType):
        raise InvalidOptionError(
            format_message(
                f"{getattr(function, '__name__', function)} does not expose its state",
                why=f"it has no parameter {missing[0]}" if missing else "it is no Python function",
                fix="give initial_state= and output_final_state= the names of its parameters",
            )
        )
    _REGISTERED[function] = Convention(initial_state, output_final_state)
    return function


def registered() -> list[Callable]:
    """The functions that :func:`recurrent` was told of."""
    return list(_REGISTERED)


def convention_of(function: Callable) -> Convention | None:
    """What a function's parameters say, if it exposes its state."""
    if function in _REGISTERED:
        return _REGISTERED[function]
    names = _parameters(function)
    found = [next((n for n in known if n in names), None) for known in (_STATES, _FLAGS)]
    return None if None in found else Convention(*found)


def _parameters(function: Callable) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


# -- calls -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Stands for an operand among a call's arguments."""

    index: int


class _Untouched(Tensor):
    """Stands for a tensor that the function may hand around, but not look into: whatever is done
    with it is an error."""

    @staticmethod
    def __new__(cls) -> _Untouched:
        return Tensor._make_wrapper_subclass(cls, (0,))

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{function} on an argument whose meaning is not known")

    __torch_dispatch__ = __torch_function__

    def __repr__(self) -> str:
        return "untouched"


_UNTOUCHED = _Untouched()


@dataclass(frozen=True)
class Call:
    """A call as a function of its tensors and its state.

    Attributes:
        function: what is called.
        args, kwargs: as the model gives them, tensors as places.
        state, flag: where these two are: a number among ``args``, or a keyword.
        num_operands: how many tensors there are, the state not counted.
        begins: whether the model gives a state to begin with. It is then the last operand.
        ends: whether the model asks for the state after the last position.
    """

    function: Callable
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    state: int | str
    flag: int | str
    num_operands: int
    begins: bool
    ends: bool

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for calls of the same function with the same numbers."""
        function = self.function
        name = (function.__module__, function.__qualname__, id(function))
        return name, repr(self.args), repr(self.kwargs), self.begins

    def __call__(
        self, operands: Sequence[Tensor], state: Tensor | None, *, ends: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The output and the final state (``None`` unless ``ends``) for a state to begin with.

        Raises:
            TypeError: it gives something else.
        """
        return _out_and_state(self.result(operands, state, ends=ends), ends)

    def result(self, operands: Sequence[Tensor], state: Tensor | None, *, ends: bool) -> Any:
        """What the function gives."""
        given: dict[int | str, Any] = {**dict(enumerate(self.args)), **dict(self.kwargs)}
        given = {k: operands[v.index] if isinstance(v, _Place) else v for k, v in given.items()}
        given |= {self.state: state, self.flag: ends}
        args = [given.pop(index) for index in range(len(self.args))]
        return self.function(*args, **given)

    def parts(self, operands: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """The operands, and the state to begin with."""
        return operands[: self.num_operands], operands[-1] if self.begins else None


def _out_and_state(result: Any, ends: bool) -> tuple[Tensor, Tensor | None]:
    if isinstance(result, Tensor) and not ends:
        return result, None
    if isinstance(result, tuple) and isinstance(result[0], Tensor):
        if ends and len(result) == 2 and isinstance(result[1], Tensor):
            return result
        if not ends and all(other is None for other in result[1:]):
            return result[0], None
    raise TypeError("not an output and a state")


def call_of(
    function: Callable, convention: Convention, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Call, list[Tensor]] | None:
    """A call and its operands, the model's own state last; ``None`` if an argument is not known.

    Operands are tensors of ordinary floating-point numbers. What others mean is not known (where
    documents start, what the model hands to all its layers alike): the function is called with
    something in their place that it cannot use.
    """
    parameters = inspect.signature(function).parameters
    names = [
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(args) > len(names):
        return None
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}

    def key(name: str) -> int | str:
        place = names.index(name) if name in names else len(args)
        return place if place < len(args) else name

    state_at, flag_at = key(convention.state), key(convention.flag)
    state, flag = given.get(state_at), given.get(flag_at, parameters[convention.flag].default)
    given |= {state_at: None, flag_at: False}
    operands = [value for value in given.values() if _is_plain(value)]
    begins = [state] if _is_plain(state) else []
    if not isinstance(flag, bool) or not (state is None or begins) or not operands:
        return None
    if any(isinstance(x, torch.SymInt) for x in pytree.tree_leaves(given)):
        return None
    places = map(_Place, range(len(operands)))
    given = {
        k: next(places) if _is_plain(v) else pytree.tree_map_only(Tensor, lambda _: _UNTOUCHED, v)
        for k, v in given.items()
    }
    own_args = tuple(given.pop(index) for index in range(len(args)))
    own_kwargs, ends = tuple(given.items()), flag
    places = (state_at, flag_at)
    call = Call(function, own_args, own_kwargs, *places, len(operands), bool(begins), ends)
    return call, operands + begins


def _is_plain(value: Any) -> bool:
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return False
    return value.is_floating_point()


# -- what is proved --------------------------------------------------------------------------------

# A size: a number, or the operand and the dim that it is the size of.
Size = int | tuple[int, int]


@dataclass(frozen=True, eq=False)
class Recurrence:
    """A call that was proved to go on where its state says.

    Attributes:
        call: what is called.
        dims: of each operand, the dim along the sequence, if it has one.
        dim: of the output.
        sizes: of the output, then of the state.
        dtypes: of the two.
        in_tuple: whether the output comes in a tuple where no state is asked for.
        takes_double: whether it computes in float64 what is given in float64.
    """

    call: Call
    dims: tuple[int | None, ...]
    dim: int
    sizes: tuple[tuple[Size, ...], tuple[Size, ...]]
    dtypes: tuple[torch.dtype, torch.dtype]
    in_tuple: bool
    takes_double: bool

    def wanted(self, num_operands: int) -> tuple[Placement, ...]:
        """What a chunk takes of the operands. The state to begin with is for the first one."""
        dims = [*self.dims, None][:num_operands]
        return tuple(Whole if dim is None else Chunk(dim) for dim in dims)

    def whole(self, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The output of all positions, and the state after them if the model asks for it."""
        if _without_data(operands):
            return self.like(operands)
        given, state = self.call.parts(operands)
        return self.call(given, state, ends=self.call.ends)

    def on_chunk(
        self, carry: Any, start: int, last: bool, operands: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The output of the chunk that begins at ``start``, and its share of the final state:
        operands along the sequence are the chunk's own, the others whole."""
        given, first = self.call.parts(operands)
        # As the trials gave them: a chunk of a whole value is a view with gaps in it.
        given = [x if dim is None else x.contiguous() for x, dim in zip(given, self.dims)]
        step = functools.partial(self.call, given, ends=True)
        return recurrent_rows(step, operands, carry, start, last, first)

    def in_chunks(
        self, operands: Sequence[Tensor], bounds: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        """Output and final state, computed chunk by chunk, each on operands cast for it alone."""
        return chained(self.call, self.dims, self.dim, operands, bounds, dtypes=dtypes)

    def like(self, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Output and final state without data, for operands without data."""
        shapes = [
            [s if isinstance(s, int) else operands[s[0]].shape[s[1]] for s in sizes]
            for sizes in self.sizes
        ]
        out, state = (
            operands[0].new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, self.dtypes)
        )
        return out, state

    def as_given(self, out: Any, state: Any = None) -> Any:
        """Output and state as the function gives them to the model."""
        if self.call.ends:
            return out, state
        return (out, None) if self.in_tuple else out


def chained(
    call: Call,
    dims: Sequence[int | None],
    dim: int,
    operands: Sequence[Tensor],
    bounds: Sequence[int],
    *,
    handed_on: bool = True,
    dtypes: Sequence[torch.dtype] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and final state by calls on chunks, each going on from the state of the one before
    it, unless nothing is ``handed_on``. Each call may have operands of other ``dtypes``."""
    (given, state), (wanted, of_state) = call.parts(operands), call.parts(dtypes or operands)
    if dtypes is not None and state is not None:
        state = state.to(of_state)
    outputs = []
    for start, end in zip(bounds, bounds[1:]):
        parts = [
            x if d is None else x.narrow(d, start, end - start).contiguous()
            for x, d in zip(given, dims)
        ]
        if dtypes is not None:
            parts = [part.to(dtype) for part, dtype in zip(parts, wanted)]
        out, final = call(parts, state, ends=True)
        state = final if handed_on else state
        outputs.append(out)
    return torch.cat(outputs, dim), final


def _without_data(operands: Sequence[Tensor]) -> bool:
    return any(isinstance(operand, FakeTensor) for operand in operands)


def as_target(recurrence: Recurrence, gives: int) -> Callable:
    """A recurrence as the target of a node that gives its output (0) or its final state (1)."""

    def recurrent(*operands: Tensor) -> Tensor:
        return recurrence.whole(operands)[gives]

    recurrent.__module__ = __name__
    recurrent.recurs, recurrent.gives = recurrence, gives
    recurrent.in_double = recurrent if recurrence.takes_double else None
    recurrent.fingerprint = ("recurrent", gives, *recurrence.call.fingerprint, recurrence.dims)
    return recurrent


def on_chunk(recurrence: Recurrence) -> Callable:
    """A recurrence as a chunk's body calls it: ``(carry, start, end, length, *operands)``."""

    def recurrent_on_chunk(
        carry: Any, start: int, end: int, length: int, *operands: Tensor
    ) -> tuple[Tensor, Tensor]:
        return recurrence.on_chunk(carry, start, end == length, operands)

    recurrent_on_chunk.__module__ = __name__
    return recurrent_on_chunk
