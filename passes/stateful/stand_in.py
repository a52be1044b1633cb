"""Stand-ins: what Dynamo is given in the place of a function whose code is not to be traced.

For the time of a capture, a function that exposes its state is *substituted in the graph*, as
Dynamo calls it: the function itself and all names of it stay as they are, guards on it hold, and
eager code calls it; only Dynamo inlines the stand-in where it would inline the function. The
stand-in looks at the call while it is traced. If it is proved to be recurrent, it becomes one node,
which computes shapes on tensors without data and calls the function on others. If not, a copy of
the function is inlined, which is nothing but what would have happened.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import allow_in_graph, assume_constant_result
from torch._dynamo.comptime import comptime
from torch._dynamo.trace_rules import _polyfilled_function_ids, get_torch_obj_rule_map
from torch._dynamo.variables import PolyfilledFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from seqsplit.passes.stateful.calls import Convention, convention_of, registered
from seqsplit.passes.stateful.proof import recurrence_of_call

__all__ = ["keeps_recurrent", "recurrent_functions", "standing_in"]

_LOCK = threading.Lock()
_USERS: dict[Callable, int] = {}  # how many captures each function is stood in for


def keeps_recurrent(backend: Callable) -> Callable:
    """Mark a backend of ours. Another one, by which a part of the model may be compiled meanwhile,
    would trace through the node and find nothing but shapes."""
    backend.keeps_recurrent = True
    return backend


@contextlib.contextmanager
def standing_in(functions: Iterable[Callable]) -> Iterator[None]:
    """A context in which Dynamo keeps calls of recurrent functions as nodes.

    Args:
        functions: those that the model refers to; registered ones are always among them.
    """
    functions = dict.fromkeys([*functions, *registered()])
    with _LOCK:
        mine = [function for function in functions if _begin(function)]
    try:
        yield
    finally:
        with _LOCK:
            for function in mine:
                _end(function)


def _begin(function: Callable) -> bool:
    if function not in _USERS:
        if id(function) in _polyfilled_function_ids:  # somebody else has a stand-in for it
            return False
        substitute = torch.compiler.substitute_in_graph(function, skip_signature_check=True)
        substitute(_stand_in(function, convention_of(function)))
    _USERS[function] = _USERS.get(function, 0) + 1
    return True


def _end(function: Callable) -> None:
    _USERS[function] -= 1
    if _USERS[function] > 0:
        return
    del _USERS[function]
    # What substitute_in_graph has noted; there is no function that takes it back.
    handlers = PolyfilledFunctionVariable._get_polyfill_handlers()
    for noted in (function, handlers[function]):
        VariableBuilder._id_dispatch().pop(id(noted), None)
        _polyfilled_function_ids.remove(id(noted))
        get_torch_obj_rule_map().pop(noted, None)
        handlers.pop(noted, None)


@functools.cache
def _stand_in(function: Callable, convention: Convention) -> Callable:
    verdict: list[bool] = []

    def examine(context: Any) -> None:
        verdict[:] = [_is_recurrent(function, convention, context)]

    @assume_constant_result
    def is_recurrent() -> bool:
        return verdict[0]

    node, inlined = _node(function, convention), _copy(function)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        comptime(examine)
        if is_recurrent():
            return node(*args, **kwargs)
        return inlined(*args, **kwargs)

    return stand_in


def _is_recurrent(function: Callable, convention: Convention, context: Any) -> bool:
    """Whether the call that is being traced is proved, and traced for us."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    if not _is_ours(translator.output.compiler_fn):
        return False
    try:
        given = [context.get_local(name).as_proxy() for name in ("args", "kwargs")]
        args, kwargs = pytree.tree_map_only(fx.Proxy, lambda p: p.node.meta["example_value"], given)
    except (AttributeError, KeyError, NotImplementedError):  # an argument that no node can take
        return False
    return recurrence_of_call(function, convention, args, kwargs) is not None


def _is_ours(backend: Any) -> bool:
    """Whether a backend, under what Dynamo wraps it in, was marked."""
    while backend is not None and not hasattr(backend, "keeps_recurrent"):
        outer, backend = backend, getattr(backend, "_torchdynamo_orig_backend", None)
        backend = backend or getattr(outer, "compiler_fn", None)
    return backend is not None


def _node(function: Callable, convention: Convention) -> Callable:
    """The target of the nodes of Dynamo's graph."""

    def recurrent(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            found = recurrence_of_call(function, convention, args, kwargs)
            if found is not None:
                recurrence, operands = found
                return recurrence.as_given(*recurrence.like(operands))
        return function(*args, **kwargs)

    recurrent.__module__ = __name__
    recurrent.proves = functools.partial(recurrence_of_call, function, convention)
    return allow_in_graph(recurrent)


def _copy(function: FunctionType) -> FunctionType:
    """The same code, for which there is no stand-in."""
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


# -- where they are --------------------------------------------------------------------------------


def recurrent_functions(modules: Sequence[nn.Module], target: Callable) -> list[Callable]:
    """The functions with such parameters that the code of modules, or a function, refers to."""
    search = _Search()
    search.visit(target)
    every = [module for root in modules for module in root.modules()]
    for base in {base for module in every for base in type(module).__mro__}:
        if not _is_of_torch(base.__module__):
            search.visit_all(vars(base).values())
    for module in every:
        search.visit_all(vars(module).values())
    return search.found


class _Search:
    """Follows the names in the code of functions."""

    def __init__(self) -> None:
        self.found: list[Callable] = []
        self._visited: set[int] = set()

    def visit_all(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self.visit(value)

    def visit(self, value: Any) -> None:
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, (staticmethod, classmethod, MethodType)):
                value = value.__func__
            if not isinstance(value, FunctionType) or id(value) in self._visited:
                continue
            self._visited.add(id(value))
            if convention_of(value) is not None:
                self.found.append(value)
            elif not _is_of_torch(value.__module__):
                waiting += _referred(value)


def _is_of_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch"


def _referred(function: FunctionType) -> Iterator[Any]:
    """What a function's code names, and what it closes over."""
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_names")]
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if isinstance(value, ModuleType) and not _is_of_torch(value.__name__):
            yield from (vars(value)[other] for other in names & vars(value).keys())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield cell.cell_contents
    yield getattr(function, "__wrapped__", None)
