"""Compare: the whole lowered graph against the one that Dynamo captured.

Bodies are tried against the lowered graph (validate.py), so an error made before they are split
(a write that got lost on the way to a functional graph, a function that lost its own backward)
would be in both. Here the captured graph is run as it is, on a short call (samples.py), and then
the lowered one: in float64, with every parameter made a little different from what it is, since a
model that begins with zeros (a gate, the second matrix of an adapter) has no gradient behind them.

The model's weights need not fit into memory a second time (inputs.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)

from seqsplit.passes.capture.batched import gather_vmaps
from seqsplit.passes.capture.lower import CHECKPOINT, has_own_ops
from seqsplit.passes.checks.inputs import PROJECTIONS, Inputs, random_like
from seqsplit.passes.checks.samples import Samples
from seqsplit.passes.checks.validate import TOLERANCE, relative_error, without_history
from seqsplit.passes.graph.lowered import Lowered, attribute_of
from seqsplit.passes.rules.registry import takes_double
from seqsplit.passes.trials.double import as_double, double_call, double_dtype, own_call

__all__ = ["Incomparable", "Unequal", "compare"]

_DRAWS = (0, 1)  # in one, a value may happen to lie where an op jumps
_LONGEST = 512  # a sequence, since activations of the whole model are kept
_LEAST = 1e-6  # of the largest gradient: what is smaller is the rounding of a zero


class Incomparable(Exception):
    """The captured graph cannot be run in float64, or on a short call."""


class Unequal(Exception):
    """The lowered graph is not what was captured."""


def compare(captured: fx.GraphModule, lowered: Lowered, samples: Samples) -> None:
    """Run both graphs, forward and backward.

    Args:
        captured: Dynamo's graph.
        lowered: what became of it.
        samples: a short call of both.

    Raises:
        Incomparable: nothing was compared.
        Unequal: outputs or gradients differ.
    """
    if samples.length is None or samples.length > _LONGEST:
        raise Incomparable(f"the model's branches take more than {_LONGEST} tokens")
    for node in lowered.graph.nodes:
        held = [operand.meta.get("val") for operand in node.all_input_nodes]
        kept = has_own_ops(held) or hasattr(node.target, "recurs")
        if not kept and not takes_double(node, lowered.shape):
            raise Incomparable(f"{node} has no float64")
    captured = gather_vmaps(captured)
    difference = None
    for draw in _DRAWS:
        with _undisturbed(lowered):
            inputs = Inputs(lowered, samples, draw)
            try:
                want = _run(captured, inputs, _call_captured)
                want.values.extend(inputs.written())
            except Exception as error:
                raise Incomparable(f"{type(error).__name__}: {error}") from error
            have = _run(lowered.module, inputs, _call_lowered, len(lowered.writes))
            difference = _difference(lowered, want, have)
        if difference is None:
            return
    raise Unequal(f"the lowered graph is not what was captured: {difference}")


class _Results(NamedTuple):
    """What one graph gives: outputs, then what was written into inputs; whether outputs need
    gradients; sums of the gradients of inputs, by their number."""

    values: list[Any]
    learns: list[bool]
    gradients: dict[int, Tensor]


def _difference(lowered: Lowered, want: _Results, have: _Results) -> str | None:
    for index, (w, h) in enumerate(zip(want.values, have.values, strict=True)):
        if not isinstance(w, Tensor):
            if w != h:
                return f"output {index} is {h} instead of {w}"
        elif w.shape != h.shape:
            return f"output {index} has shape {list(h.shape)} instead of {list(w.shape)}"
        elif not (error := relative_error(h, w)) <= TOLERANCE:
            return f"output {index} is off by {error:.1e}"
    for index, (w, h) in enumerate(zip(want.learns, have.learns, strict=True)):
        if w != h:
            return f"output {index} {'has no gradient' if w else 'has a gradient'}"
    least = _LEAST * max((float(sums[0]) for sums in want.gradients.values()), default=0.0)
    nothing = torch.zeros(1 + PROJECTIONS, dtype=torch.float64)
    for index, node in enumerate(lowered.placeholders):
        w, h = (side.gradients.get(index, nothing) for side in (want, have))
        same = (w == h) | (w.isnan() & h.isnan())
        error = float((h - w).masked_fill(same, 0.0).norm()) / max(float(w[0]), least, 1e-30)
        if not error <= TOLERANCE:
            return f"the gradient of {node} is off by {error:.1e}"
    return None


# -- running a graph ------------------------------------------------------------------------------


def _run(module: fx.GraphModule, inputs: Inputs, call: Callable, num_written: int = 0) -> _Results:
    """Forward and backward of a graph that takes what ``inputs`` has; its last outputs may be what
    is written into some of them."""
    gradients: dict[int, Tensor] = {}
    with inputs.made_again(), torch.enable_grad():
        with _Double():
            outputs = _forward(module, inputs, call, gradients)
        own = outputs[: len(outputs) - num_written]
        roots = [o for o in own if isinstance(o, Tensor) and o.requires_grad]
        if roots:
            cotangents = [random_like(root, i) for i, root in enumerate(roots)]
            torch.autograd.grad(roots, [inputs.anchor], cotangents, allow_unused=True)
    values = [o.detach() if isinstance(o, Tensor) else o for o in outputs]
    learns = [isinstance(o, Tensor) and o.requires_grad for o in own]
    return _Results(values, learns, gradients)


def _forward(
    module: fx.GraphModule, inputs: Inputs, call: Callable, gradients: dict[int, Tensor]
) -> list[Any]:
    known: dict[fx.Node, Any] = {}
    numbers = {n: i for i, n in enumerate(n for n in module.graph.nodes if n.op == "placeholder")}
    unused = _last_uses(module.graph)
    for node in module.graph.nodes:
        for operand in node.all_input_nodes:
            if operand in numbers and operand not in known:
                known[operand] = inputs.make(numbers[operand], gradients)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.get)
        if node.op == "output":
            return pytree.tree_leaves(args[0])
        if node.op == "get_attr":
            known[node] = as_double(attribute_of(module, node))
        elif node.op != "placeholder":
            known[node] = call(module, node, args, kwargs)
        for operand in unused.get(node, ()):
            inputs.forget(numbers.get(operand), known.pop(operand, None))
    return []


def _call_captured(module: fx.GraphModule, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if node.target is CHECKPOINT:  # it would run its body twice, to the same effect
        return args[0](*args[1:])
    if node.op == "call_method":
        target = functools.partial(_call_method, node.target)
    else:
        target = node.target if node.op == "call_function" else module.get_submodule(node.target)
    if has_own_ops((args, kwargs)):
        return _in_own_dtypes(target, node, "example_value", args, kwargs)
    return target(*args, **kwargs)


def _call_method(name: str, owner: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner, name)(*args, **kwargs)


def _call_lowered(module: fx.GraphModule, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    learns = node.meta["region"].grad
    with torch.set_grad_enabled(learns):
        if has_own_ops((args, kwargs)):
            result = _in_own_dtypes(node.target, node, "val", args, kwargs)
        else:
            target, args, kwargs = double_call(node.target, args, kwargs)
            # A function that computes in float32 inside does so in float64 here, if it is code.
            result = (target or node.target)(*args, **kwargs)
    return result if learns else without_history(result)


def _in_own_dtypes(target: Any, node: fx.Node, kept_as: str, args: tuple, kwargs: dict) -> Any:
    """Both sides run such a call on what is the same up to its last bits, so they round alike."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    held = [leaf.meta.get(kept_as) for leaf in leaves if isinstance(leaf, fx.Node)]
    own = own_call(target, [value for value in held if isinstance(value, Tensor)])
    with _disable_current_modes():
        return own(*args, **kwargs)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that nobody uses any more after a node."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        last.update(dict.fromkeys(node.all_input_nodes, node))
    found: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        found.setdefault(user, []).append(node)
    return found


@contextlib.contextmanager
def _undisturbed(lowered: Lowered) -> Iterator[None]:
    """Random numbers go on afterwards as if nothing had been drawn."""
    held = (node.meta.get("val") for node in lowered.placeholders)
    devices = {h.device.index for h in held if isinstance(h, Tensor) and h.is_cuda}
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(sorted(devices)):
            yield
    finally:
        torch.set_default_dtype(dtype)


class _Double(TorchDispatchMode):
    """Ops give float64 where they are asked for a floating dtype, and draw the same random numbers
    whenever they draw as many."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload):  # an op that takes functions
            return func(*args, **(kwargs or {}))
        args = [double_dtype(arg) for arg in args]
        kwargs = {name: double_dtype(arg) for name, arg in (kwargs or {}).items()}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            for generator in (torch.default_generator, *torch.cuda.default_generators):
                generator.manual_seed(0)
        out = func(*args, **kwargs)
        # The value of ``torch.tensor(0.1)``.
        return as_double(out) if func is torch.ops.aten.lift_fresh.default else out
