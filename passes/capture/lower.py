"""Lower: Dynamo's torch-level graph becomes one functional ATen graph, before autograd.

The trace is taken above autograd and above decomposition, so ``linear``, ``layer_norm`` and
``scaled_dot_product_attention`` stay single nodes; sizes stay symbolic. Three things that Python
does with context managers become facts of each node (``node.meta["region"]``), because a chunk
body runs its nodes at another time and in another order: ``no_grad``, ``autocast``, and the
user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from seqsplit.errors import CaptureError
from seqsplit.ir.assumptions import SameSize
from seqsplit.passes.capture.batched import gather_vmaps, is_vmap
from seqsplit.passes.capture.functionalize import functionalize
from seqsplit.passes.graph.lowered import Lowered, Region
from seqsplit.passes.graph.structure import structure_of
from seqsplit.passes.stateful.calls import as_target

__all__ = [
    "CHECKPOINT",
    "custom_function",
    "function_of",
    "has_own_ops",
    "lower",
]

aten = torch.ops.aten

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_CUSTOM_FUNCTION = torch.ops.higher_order.autograd_function_apply
_DATA = getattr(torch._C._autograd, "_get_data_attr", None)


def lower(captured: fx.GraphModule, example_inputs: Sequence[Any]) -> Lowered:
    """Lower Dynamo's graph.

    Args:
        captured: what Dynamo hands to a backend.
        example_inputs: the real inputs of this first call, in the graph's order.

    Raises:
        CaptureError: an op could not be traced on tensors without data.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise CaptureError("seqsplit has to be called by torch.compile as its backend")
    fake_mode = context.fake_mode
    _blame_callers(captured.graph)
    fakes = [_as_fake(value, fake_mode, context) for value in example_inputs]
    try:
        with fake_mode, enable_python_dispatcher(), fx.traceback.preserve_node_meta():
            run = _KeepBackwards(gather_vmaps(captured)).run
            module = make_fx(lambda *args: run(*args), pre_dispatch=True)(*fakes)
    except Exception as error:
        raise CaptureError(f"a captured graph could not be lowered to ATen ops: {error}") from error
    graph = module.graph
    for node, example in zip([n for n in graph.nodes if n.op == "placeholder"], example_inputs):
        node.meta["requires_grad"] = isinstance(example, torch.Tensor) and example.requires_grad
        node.meta["open_dims"] = _open_dims(example, context)
        if isinstance(example, torch.Tensor) and is_traceable_wrapper_subclass(example):
            node.meta["example"] = example.detach()  # cannot be drawn at random
    _absorb_contexts(graph)
    with fake_mode:
        writes = functionalize(graph)
    _forget_assertions(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    graph.lint()
    module.recompile()
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(module, node.target, None), FakeTensor):
            raise CaptureError(f"{node.target} was computed out of sight of the trace")
    lowered = Lowered(module, fake_mode.shape_env, writes)
    _align_inputs(lowered)
    return lowered


def _blame_callers(graph: fx.Graph) -> None:
    """Calls that :mod:`..stateful.stand_in` has made come from the model's line, for the report."""
    for node in graph.nodes:
        if hasattr(node.target, "proves"):
            node.meta["stack_trace"] = node.meta.get("stack_trace", "").rpartition('  File "')[0]


def _align_inputs(lowered: Lowered) -> None:
    """Take dims of the same index and size in different inputs (token ids, labels) to be one.

    Every dim of every input is a symbol of its own, so that a batch as long as the sequence does
    not look like it. Where the model compares two inputs only by their number of elements, Dynamo
    learns nothing about their dims; that they are equal is then checked at each call.
    """
    first: dict[tuple[int, int], tuple[sympy.Expr, tuple[int, int]]] = {}
    for symbol, hint, place in _open_places(lowered):
        if symbol.is_Integer:
            continue
        known, other = first.setdefault((place[1], hint), (symbol, place))
        if known != symbol:
            lowered.rename(symbol, known)
            lowered.assumptions.append(SameSize(other, place))
    _fix_counterparts(lowered)


def _fix_counterparts(lowered: Lowered) -> None:
    """Where the model's code has fixed the length of one input, it is that of the others too:
    of inputs that are alike up to there, which a quantised weight of that width is not."""

    def lead(place: tuple[int, int]) -> tuple[int, ...]:
        index, dim = place
        sizes = lowered.placeholders[index].meta["val"].shape[:dim]
        return tuple(s.node.hint if isinstance(s, torch.SymInt) else s for s in sizes)

    fixed: dict[Any, tuple[sympy.Expr, tuple[int, int]]] = {}
    places = list(_open_places(lowered))
    for size, hint, place in places:
        if size.is_Integer:
            fixed.setdefault((lead(place), hint), (size, place))
    for symbol, hint, place in places:
        if isinstance(symbol, sympy.Symbol) and (lead(place), hint) in fixed:
            known, other = fixed[lead(place), hint]
            lowered.rename(symbol, known)
            lowered.assumptions.append(SameSize(other, place))


def _open_places(lowered: Lowered) -> Iterator[tuple[sympy.Expr, int, tuple[int, int]]]:
    """The sizes of inputs that Dynamo took to vary: what is known of each by now, its value in
    the captured call, and the input's number and dim."""
    for index, node in enumerate(lowered.placeholders):
        held = node.meta.get("val")
        for dim, size in enumerate(held.shape if isinstance(held, torch.Tensor) else ()):
            known = lowered.expr(size)
            if known.is_Integer and dim in node.meta["open_dims"]:
                yield known, int(known), (index, dim)
            elif isinstance(known, sympy.Symbol) and size.node.has_hint():
                yield known, int(size.node.hint), (index, dim)


def _as_fake(value: Any, fake_mode: Any, context: TracingContext) -> Any:
    """The data-less twin of an input, with the very symbols that Dynamo gave its sizes."""
    if not isinstance(value, torch.Tensor):
        return value
    known = context.tensor_to_context.get(value)
    if known is None:
        return fake_mode.from_tensor(value, static_shapes=True)
    return fake_mode.from_tensor(value, symbolic_context=known, source=known.tensor_source)


def _open_dims(value: Any, context: TracingContext) -> set[int]:
    """The dims that were left open, before the model's code fixed some of them."""
    known = context.tensor_to_context.get(value) if isinstance(value, torch.Tensor) else None
    kinds = getattr(known, "dynamic_sizes", ())
    return {dim for dim, kind in enumerate(kinds) if kind is not DimDynamic.STATIC}


class _KeepBackwards(fx.Interpreter):
    """Runs Dynamo's graph under the trace, keeping what a plain run would lose."""

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is CHECKPOINT:
            # A block that the model itself checkpoints: we decide about memory, so only its
            # body matters.
            body, *operands = args
            return _KeepBackwards(body).run(*operands)
        if target is _CUSTOM_FUNCTION:
            # Traced through, it would become its forward alone and lose its own backward.
            return _trace_as_one_node(custom_function(args[0], args[1], kwargs), args[2:])
        if hasattr(target, "proves") and (found := target.proves(args, kwargs)) is not None:
            recurrence, operands = found
            targets = [as_target(recurrence, gives) for gives in range(1 + recurrence.call.ends)]
            values = [_trace_as_one_node(target, operands) for target in targets]
            return recurrence.as_given(*values)
        if is_vmap(target):
            return _trace_as_one_node(target, args)
        if target is _DATA:  # ``x.data``, which leaves no trace of its own
            return args[0].detach()
        if _is_opaque(target) or has_own_ops((args, kwargs)):
            return _keep_call(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: str, args: tuple, kwargs: dict) -> Any:
        if has_own_ops((args, kwargs)):
            return _keep_call(None, args, kwargs, method=target)
        return super().call_method(target, args, kwargs)


def _is_opaque(target: Any) -> bool:
    return isinstance(target, torch._ops.HigherOrderOperator) or hasattr(target, "proves")


def has_own_ops(operands: Any) -> bool:
    """Whether an operand is of a class that says itself what ops on it do: a quantised weight.

    What such a class runs may lie above autograd or below it, and traced through, its own
    derivatives could be lost. So the call is kept, and made again in each chunk, on the weight
    as it is: it is unpacked there, and not kept unpacked.
    """
    return any(map(is_traceable_wrapper_subclass, pytree.tree_leaves(operands)))


def _keep_call(target: Any, args: tuple, kwargs: dict, method: str | None = None) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    moving = [isinstance(leaf, (torch.Tensor, torch.SymInt)) for leaf in leaves]
    operands = [leaf for leaf, moves in zip(leaves, moving) if moves]
    fixed = [leaf for leaf, moves in zip(leaves, moving) if not moves]
    return _trace_as_one_node(function_of(target, moving, fixed, structure, method), operands)


def custom_function(forward: fx.GraphModule, backward: fx.GraphModule, options: dict) -> Callable:
    """An ``autograd.Function`` of the user's, as a function of its operands; its graphs and what
    Dynamo says of them are in ``parts``."""

    def custom_function(*operands: Any) -> Any:
        return _CUSTOM_FUNCTION(forward, backward, *operands, **options)

    custom_function.__module__ = __name__
    custom_function.parts = (forward, backward, options)
    # What makes two calls the same piece of code, whatever objects they were traced into.
    custom_function.fingerprint = (
        structure_of(forward), structure_of(backward), repr(sorted(options.items()))
    )  # fmt: skip
    return custom_function


def function_of(
    target: Callable,
    moving: list[bool],
    fixed: list,
    structure: Any,
    method: str | None = None,
) -> Callable:
    """A call as a function of its tensors and sizes: of an op that takes functions (a scan, a
    loop), for one.

    Args:
        target: what is called.
        moving: for each leaf of ``(args, kwargs)`` whether it is given at each call.
        fixed: the other leaves.
        structure: of ``(args, kwargs)``.
        method: the name of a method of the first argument, to be called instead.
    """

    def call(*operands: Any) -> Any:
        given, constant = iter(operands), iter(fixed)
        leaves = [next(given) if moves else next(constant) for moves in moving]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        if method is not None:
            return getattr(args[0], method)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    call.__module__, call.__name__ = __name__, (method or str(target)).replace(".", "_")
    call.template = (target, moving, fixed, structure)
    codes = [structure_of(f) if isinstance(f, fx.GraphModule) else repr(f) for f in fixed]
    call.fingerprint = (method or str(target), repr(moving), repr(codes), repr(structure))
    return call


def _trace_as_one_node(function: Callable, operands: Sequence[Any]) -> Any:
    mode = get_proxy_mode()
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    with disable_proxy_modes_tracing():
        out = function(*operands)
    if versions != [tensor._version for tensor in tensors]:
        raise CaptureError(f"{function.fingerprint[0]} writes into what it is given")
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, tuple(operands))
    proxy = mode.tracer.create_proxy("call_function", function, proxies, {}, name="custom")
    return track_tensor_tree(out, proxy, constant=None, tracer=mode.tracer)


def _absorb_contexts(graph: fx.Graph) -> None:
    """Turn the nodes that switch grad mode and autocast into a fact of every node between."""
    grad, entered = True, {}
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.target is torch._C._set_grad_enabled:
            grad = node.args[0]
        elif name == "_enter_autocast":
            entered[node] = tuple(node.args)
        elif name == "_exit_autocast":
            entered.pop(node.args[0])
        else:
            node.meta["region"] = Region(grad, tuple(entered.values()))
            continue
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "__name__", "")
        if node.target is torch._C._set_grad_enabled or name in (
            "_enter_autocast",
            "_exit_autocast",
        ):
            graph.erase_node(node)


def _forget_assertions(graph: fx.Graph) -> None:
    """Drop runtime assertions on sizes: Dynamo's guards have made them already."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and "assert" in str(node.target) and not node.users:
            graph.erase_node(node)
