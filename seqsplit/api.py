"""``seqsplit.compile``: what a user touches. Joins Dynamo, the passes and the runtime."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported, UserError

from .breaks import GraphBreak, break_after, break_at
from .chain import Chain, Link
from .deferred import DeferredTensor, defer, defer_logits
from .errors import (
    CaptureError,
    InvalidOptionError,
    NotStreamedError,
    SeqsplitError,
    SequenceNotFoundError,
    UnfinishedPlanWarning,
    format_message,
)
from .loops import own_saved_tensors
from .options import Options
from .passes import (
    Executor,
    NothingToSplit,
    build_plan,
    keeps_recurrent,
    recurrent,
    recurrent_functions,
    rule,
    standing_in,
)
from .plan import Plan
from .runtime import run_segment
from .schedule import Schedule

__all__ = [
    "Handle",
    "Run",
    "compile",
    "disable",
    "handle_for",
    "handle_of",
    "modules_of",
    "recurrent",
    "rule",
]

Target = TypeVar("Target", bound=Callable)


def executor_running(run: Callable) -> Executor:
    """What executes plans, with a function of its own for running a segment."""
    return Executor(run, defer, Chain, Link)


_EXECUTOR = executor_running(run_segment)

_DISABLED: ContextVar[bool] = ContextVar("seqsplit_disabled", default=False)


def compile(  # noqa: A001 - named after torch.compile
    target: Target,
    *,
    chunk_size: int | str = "auto",
    head_chunk_size: int | str = "auto",
    segment_layers: int | str = "auto",
    schedule: Schedule | None = None,
    inner: str | None = None,
    accumulate_dtype: torch.dtype = torch.float32,
    seq_dim: int | None = None,
    strict: bool = False,
    validate: bool = True,
) -> Target:
    """Make training steps of a causal decoder run chunk by chunk along the sequence.

    Gradients are those of the original, memory is a fraction. Logits are a
    :class:`~seqsplit.deferred.DeferredTensor`: a loss computed from them, outside the model too,
    never needs all of them at once. Calls without gradients (evaluation, ``generate()``) run the
    original code, with deferred logits where the sequence is long.

    Args:
        target: an ``nn.Module``, compiled in place and returned, or a function, for which a
            compiled function is returned (a loss computed in it is streamed as well).
        chunk_size: rows of the sequence per chunk of a layer. ``"auto"`` chooses by the width
            of the layer.
        head_chunk_size: the same for the head with the loss, whose rows are wider.
        segment_layers: layers per checkpoint.
        schedule: what is kept for the backward and what is computed again; by default every
            segment's input is kept, as gradient checkpointing would.
        inner: ``"inductor"`` (or another backend of ``torch.compile``) to compile the stretches of
            ordinary ops inside of chunk bodies; results then differ from eager's by rounding.
        accumulate_dtype: the least precise dtype in which gradients are added up over chunks.
        seq_dim: the dim of the inputs that is the sequence; found by itself where attention
            mixes it.
        strict: raise :class:`~seqsplit.errors.NotStreamedError` if a part would run whole.
        validate: try each distinct chunk body against the original code, on a short sequence in
            float64, before it is used.

    Returns:
        ``target`` itself if it is a module, else a function with the same signature.

    Raises:
        InvalidOptionError: an option is out of range. Errors about the model come at the first
            call, when its inputs are known.

    Example:
        >>> model = seqsplit.compile(model)
        >>> loss = model(input_ids=ids, labels=ids).loss
        >>> loss.backward()
    """
    options = Options.checked(
        chunk_size=chunk_size,
        head_chunk_size=head_chunk_size,
        segment_layers=segment_layers,
        schedule=schedule,
        inner=inner,
        accumulate_dtype=accumulate_dtype,
        seq_dim=seq_dim,
        strict=strict,
        validate=validate,
    )
    if isinstance(target, nn.Module):
        # The slot that nn.Module.compile uses: the module keeps its class, its state dict, its
        # hooks; copies and pickles of it are plain.
        target._compiled_call_impl = handle_for(target, options)
        return target
    if not callable(target):
        raise InvalidOptionError(
            format_message(
                f"cannot compile a {type(target).__name__}",
                fix="give an nn.Module or a function",
            )
        )
    return _as_function(target, handle_for(target, options))


def _as_function(target: Callable, handle: Handle) -> Any:
    @functools.wraps(target)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return handle(*args, **kwargs)

    compiled.__seqsplit__ = handle
    return compiled


def handle_of(target: Any) -> Handle | None:
    """The handle of a compiled module or function, ``None`` for others."""
    if isinstance(target, nn.Module):
        handle = target._compiled_call_impl
        return handle if isinstance(handle, Handle) else None
    return getattr(target, "__seqsplit__", None)


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Run everything inside the ``with`` block in plain eager mode."""
    token = _DISABLED.set(True)
    try:
        yield
    finally:
        _DISABLED.reset(token)


def handle_for(target: Callable, options: Options | None = None) -> Handle:
    """A new handle for a target, which is left as it is."""
    if isinstance(target, nn.Module):
        return Handle(target._call_impl, options or Options(), [target])
    return Handle(target, options or Options(), modules_of(target))


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
            with _capture_settings(), _without_cache(self.modules), standing_in(self._recurrent):
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


# Captures of one target (train and eval mode, with and without a mask, other numbers) before
# Dynamo gives up and leaves it in eager.
MAX_CAPTURES = 64
_RECOMPILE_LIMIT = (
    "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
)


@contextlib.contextmanager
def _capture_settings() -> Iterator[None]:
    settings: dict[str, Any] = {
        _RECOMPILE_LIMIT: MAX_CAPTURES,
        "specialize_float": True,  # Python numbers of the model are constants of its graph
        "specialize_int": True,
        "skip_nnmodule_hook_guards": False,  # a hook that is added later is not to be missed
    }
    for name in ("ignore_logging_functions", "ignore_logger_methods"):
        if hasattr(torch._dynamo.config, name):
            settings[name] = getattr(torch._dynamo.config, name) | _logging_functions()
            break
    with (
        torch._dynamo.config.patch(**settings),
        warnings.catch_warnings(),
        # Two dims of the same size (a batch as long as the sequence) stay two symbols.
        symbolic_shapes_config.patch(use_duck_shape=False),
    ):
        # Dynamo looks at .grad of every input.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        yield


def _logging_functions() -> set[Callable]:
    """Methods of loggers, those included that libraries add, and warnings: no graph breaks."""
    names = ("debug", "info", "warn", "error", "critical", "exception", "log")
    return {warnings.warn} | {
        function
        for name, function in vars(logging.Logger).items()
        if callable(function) and name.startswith(names)
    }


@contextlib.contextmanager
def _without_cache(modules: list[nn.Module]) -> Iterator[None]:
    """Models with a generation cache do not fill it in a training call.

    Such models read the default from their configuration; a caller who passes ``use_cache=True``
    still gets a cache.
    """
    configs = {
        id(config): config
        for root in modules
        for module in root.modules()
        if getattr(config := getattr(module, "config", None), "use_cache", None) is True
    }
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


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
