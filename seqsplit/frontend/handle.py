"""A compiled callable: captures, has plans made, runs them. Joins Dynamo, passes and runtime."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported, UserError

from seqsplit.deferred import DeferredTensor, defer, defer_logits
from seqsplit.errors import (
    CaptureError,
    NotStreamedError,
    SeqsplitError,
    SequenceNotFoundError,
    UnfinishedPlanWarning,
    format_message,
)
from seqsplit.frontend.breaks import GraphBreak, break_after, break_at
from seqsplit.frontend.settings import (
    MAX_CAPTURES,
    capture_settings,
    without_generation_cache,
)
from seqsplit.ir.plan import Plan
from seqsplit.ops.held import own_saved_tensors
from seqsplit.options import Options
from seqsplit.passes import (
    Executor,
    NothingToSplit,
    build_plan,
    keeps_recurrent,
    recurrent_functions,
    standing_in,
)
from seqsplit.runtime.checkpoints import Chain, Link
from seqsplit.runtime.segment_function import run_segment

__all__ = ["Handle", "Run", "disable", "executor_running", "handle_for", "handle_of", "modules_of"]


def executor_running(run: Callable) -> Executor:
    """What executes plans, with a function of its own for running a segment."""
    return Executor(run, defer, Chain, Link)


_EXECUTOR = executor_running(run_segment)

_DISABLED: ContextVar[bool] = ContextVar("seqsplit_disabled", default=False)


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Run everything inside the ``with`` block in plain eager mode."""
    token = _DISABLED.set(True)
    try:
        yield
    finally:
        _DISABLED.reset(token)


@dataclass(frozen=True)
class Run:
    """One execution of a captured graph.

    Attributes:
        plan: what was executed, or why the graph ran whole.
        length: of the sequence.
        device: type of the device of its inputs.
        no_sequence: there was nothing like a sequence in it.
        learns: whether anything in it needs a gradient, so that activations may be kept.
        broke: where and why the capture broke after this graph, if it did.
    """

    plan: Plan | str
    length: int = 0
    device: str = "cpu"
    no_sequence: bool = False
    learns: bool = True
    broke: GraphBreak | None = None


class Handle:
    """A compiled callable.

    Args:
        original: what it stands for.
        options: of the compilation.
        modules: the modules it runs, as far as they are known.
        executor: what executes its plans.
    """

    def __init__(
        self,
        original: Callable,
        options: Options,
        modules: list[nn.Module],
        executor: Executor = _EXECUTOR,
    ) -> None:
        self.original = original
        self.options = options
        self.modules = modules
        self.executor = executor
        self.log: list[Run] = []  # of the last call
        self._compiled = torch.compile(
            _own_code(original), backend=self._backend, dynamic=True, fullgraph=options.strict
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _DISABLED.get() or torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        if not torch.is_grad_enabled():
            with defer_logits(self.modules, self.options, (args, kwargs)):
                return self.original(*args, **kwargs)
        self.log.clear()
        try:
            with (
                capture_settings(),
                without_generation_cache(self.modules),
                standing_in(self._recurrent),
            ):
                result = self._compiled(*args, **kwargs)
        except BackendCompilerFailed as error:
            inner = error.inner_exception
            raise inner if isinstance(inner, SeqsplitError) else error from None
        except (Unsupported, UserError) as error:  # only where strict=True asks for a single graph
            found = break_at(error)
            raise CaptureError(
                format_message(
                    "strict=True, and the target is not one graph",
                    at=found.line,
                    why=found.why,
                    fix=f"{found.fix}; or compile with strict=False",
                )
            ) from None
        if not self.log:
            warnings.warn(
                format_message(
                    "this call ran in eager: no memory was saved",
                    why=f"the target was captured {MAX_CAPTURES} times, breaks the capture inside "
                    "of a loop, or holds no tensor code",
                    fix="pass numbers that change from call to call as tensors; pad to few lengths "
                    "where explain() says that the model's code fixes the length; strict=True "
                    "names a line that breaks the capture",
                ),
                UnfinishedPlanWarning,
                stacklevel=3,
            )
        if self.log and all(run.no_sequence for run in self.log):
            raise SequenceNotFoundError(
                format_message(
                    "no input has a dim that could be the sequence",
                    why="nothing attends along one, and no dim 1 varies from call to call",
                    fix="compile the model or loss that takes the tokens, or give seq_dim=",
                )
            )
        return result

    @functools.cached_property
    def _recurrent(self) -> list[Callable]:
        """The functions it calls that expose their state."""
        return recurrent_functions(self.modules, self.original)

    @keeps_recurrent
    def _backend(self, captured: torch.fx.GraphModule, examples: list[Any]) -> Callable:
        broke = break_after(captured)
        try:
            with own_saved_tensors():
                plan = build_plan(captured, examples, self.options, self.executor)
        except NothingToSplit as error:
            if self.options.strict and error.fixed:
                raise NotStreamedError(
                    format_message(
                        "strict=True, and the model would run whole",
                        why=str(error),
                        fix="do not loop over positions in Python, nor decide by the length",
                    )
                ) from None
            learns = any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples)
            entry = Run(str(error), no_sequence=error.no_sequence, learns=learns, broke=broke)
            return self._whole(captured, entry)
        except CaptureError as error:
            if self.options.strict:
                raise
            return self._whole(captured, Run(str(error), broke=broke))
        except SeqsplitError:
            raise
        except Exception as error:  # a fault of ours: the user's step still has to be right
            if self.options.strict:
                raise
            reason = f"seqsplit failed on it ({type(error).__name__}: {error})"
            warnings.warn(
                format_message(
                    "a captured graph runs whole: no memory is saved in it",
                    why=reason,
                    fix="please report it; strict=True gives the full traceback",
                ),
                UnfinishedPlanWarning,
                stacklevel=2,
            )
            return self._whole(captured, Run(reason, broke=broke))

        def run(*inputs: Any) -> Any:
            inputs = _computed(inputs)
            if not plan.holds_for(inputs):
                other = "inputs of other relative sizes than the captured ones"
                self.log.append(Run(other, broke=broke))
                return captured(*inputs)
            used = self.choose(plan)
            length, device = used.length_of(inputs), used.device_of(inputs)
            self.log.append(Run(used, length, device, broke=broke))
            return used.run(inputs)

        return run

    def choose(self, plan: Plan) -> Plan:
        """The plan that is executed where ``plan`` was made."""
        return plan

    def _whole(self, captured: torch.fx.GraphModule, entry: Run) -> Callable:
        def run_whole(*inputs: Any) -> Any:
            self.log.append(entry)
            return captured(*_computed(inputs))

        return run_whole


def _computed(inputs: Sequence[Any]) -> list[Any]:
    """Inputs as ordinary tensors: an earlier graph of the same call may have deferred some."""
    return [i.materialize() if isinstance(i, DeferredTensor) else i for i in inputs]


def _own_code(original: Callable) -> Callable:
    """A function with a code object of its own: Dynamo keeps its cache by code object, and the
    compiled modules of a program must not share one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    code = call.__code__.replace(co_name="seqsplit_call")
    return FunctionType(code, call.__globals__, "seqsplit_call", None, call.__closure__)


def handle_for(target: Callable, options: Options | None = None) -> Handle:
    """A new handle for a target, which is left as it is."""
    if isinstance(target, nn.Module):
        return Handle(target._call_impl, options or Options(), [target])
    return Handle(target, options or Options(), modules_of(target))


def handle_of(target: Any) -> Handle | None:
    """The handle of a compiled module or function, ``None`` for others."""
    if isinstance(target, nn.Module):
        handle = target._compiled_call_impl
        return handle if isinstance(handle, Handle) else None
    return getattr(target, "__seqsplit__", None)


def modules_of(function: Callable) -> list[nn.Module]:
    """Modules that a function refers to."""
    owner = getattr(function, "__self__", None)
    found = [owner] if isinstance(owner, nn.Module) else []
    try:
        variables = inspect.getclosurevars(function)
    except TypeError:
        return found
    values = (*variables.nonlocals.values(), *variables.globals.values())
    return found + [value for value in values if isinstance(value, nn.Module)]
