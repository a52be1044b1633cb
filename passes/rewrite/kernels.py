"""Kernels: calls of fused attention that others have written, told by what their arguments say.

Such a call is opaque to a trace: a custom op, or an ``autograd.Function`` around one. What the op
computes stands in the names of its schema: queries, keys and values, whether it is causal, its
window, its scale, where documents start. A call is taken for attention if every argument has a
meaning known here (or says nothing: ``None``, ``False``, zero), and if running it proves the
meaning (:mod:`..trials.kernel`). A chunk's call is then the same call on a chunk of queries and the
keys up to its end: these kernels line up the last query with the last key.

Each call found becomes one node whose target says so in ``attends``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from seqsplit.ir.assumptions import SameValues
from seqsplit.ops.attention import documents_within
from seqsplit.passes.analysis.bands import Band, Bands
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.capture.lower import custom_function, function_of
from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.trials.kernel import Given, Meaning, is_proved, reference

__all__ = ["Kernel", "find_kernels"]

# What an argument says, by the names that kernels give it.
_TENSORS = {
    "query": ("q", "query"),
    "key": ("k", "key"),
    "value": ("v", "value"),
    "slopes": ("alibi_slopes",),
    "starts_q": ("cu_seqlens_q", "cu_seq_q", "cum_seq_q"),
    "starts_k": ("cu_seqlens_k", "cu_seq_k", "cum_seq_k"),
    "longest_q": ("max_seqlen_q", "max_q"),
    "longest_k": ("max_seqlen_k", "max_k"),
}
_NUMBERS = {
    "scale": ("softmax_scale", "scale"),
    "causal": ("causal", "is_causal"),
    "left": ("window_size_left",),
    "right": ("window_size_right",),
    "window": ("window_size",),
    "softcap": ("softcap",),
    "dropout": ("dropout_p", "p_dropout"),
}
_ORDER = tuple(_TENSORS)
_ROLES = {name: role for role, names in (_TENSORS | _NUMBERS).items() for name in names}
_COPIES = {
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.dtype_layout,
}
_UNRELATED = 10007  # for sizes that a kernel is given and has no use for
_WITHOUT_EFFECT = {
    "deterministic",
    "enable_gqa",
    "num_splits",
    "pack_gqa",
    "return_attn_probs",
    "return_debug_mask",
    "return_softmax",
    "rotary_interleaved",
    "sm_margin",
}


@dataclass(frozen=True, eq=False)
class Kernel:
    """One call of attention as a function of its operands.

    Attributes:
        run: gives the output for the operands of the call.
        places: the place of each role among these, tensors first.
        meaning: what is computed.
        dim: the sequence's dim in query, key, value and output.
    """

    run: Callable[[Sequence[Any]], Tensor]
    places: dict[str, int]
    meaning: Meaning
    dim: int

    @property
    def counts_from_last(self) -> bool:
        """Whether places are counted from the last query, which is where the last key is."""
        return self.meaning.causal

    def sees(self, facts: Facts, bands: Bands) -> tuple[list[Band], int]:
        """What is known of the keys that a query sees, and the dim that stands for keys."""
        if not self.meaning.causal:
            return [], 1
        left = math.inf if self.meaning.left is None else self.meaning.left
        return [Band(0, 1, (-left, 0), (-left, 0))], 1

    def rows(
        self, run: Callable, start: int, first: int, end: int, operands: Sequence[Any]
    ) -> Tensor:
        """The output of a chunk's queries, which lie at ``[start, end)``.

        Args:
            run: the kernel, or what stands for it.
            start, end: of the queries.
            first: of the keys: they lie at ``[first, end)`` of a causal call, and are all there
                otherwise.
            operands: as the whole call takes them, but query, key and value the chunk's.
        """
        operands = list(operands)
        if "starts_q" in self.places:
            place = self.places["starts_q"]
            operands[place] = documents_within(operands[place], start, end)
            if self.meaning.causal:
                place = self.places["starts_k"]
                operands[place] = documents_within(operands[place], first, end)
        return run(operands)

    def in_double(self, operands: Sequence[Any]) -> Tensor:
        """What stands for the kernel where it is checked in float64."""
        given = {role: operands[place] for role, place in self.places.items()}
        return reference(self.meaning, **{k: v for k, v in given.items() if "longest" not in k})


def find_kernels(lowered: Lowered, examples: Sequence[Any]) -> None:
    """Turn every call that is proved to be attention into one node that says so (in place).

    Args:
        lowered: the graph.
        examples: the real inputs of the captured call.
    """
    for node in list(lowered.graph.nodes):
        call = _call(node) if node.op == "call_function" else None
        kernel = call and _kernel(lowered, call)
        if not kernel:
            continue
        operands = [call.operands[call.said[role].index] for role in kernel.places]
        if not _same_documents(lowered, examples, kernel, operands):
            continue
        with lowered.graph.inserting_before(node):
            new = lowered.graph.call_function(_as_target(kernel, call), tuple(operands))
        kept = ("region", "stack_trace", "nn_module_stack")
        new.meta = {key: value for key, value in node.meta.items() if key in kept}
        new.meta["val"] = _first(node.meta["val"])
        _put(new, node)
    lowered.graph.lint()


def _put(new: fx.Node, node: fx.Node) -> None:
    if isinstance(node.meta["val"], Tensor):
        node.replace_all_uses_with(new)
    for user in list(node.users):  # items of a tuple, of which only the first is used
        user.replace_all_uses_with(new)
        user.graph.erase_node(user)
    node.graph.erase_node(node)


def _first(value: Any) -> Any:
    return pytree.tree_leaves(value)[0]


def _as_target(kernel: Kernel, call: _Call) -> Callable:
    def attention(*operands: Any) -> Tensor:
        return kernel.run(operands)

    def attention_in_double(*operands: Any) -> Tensor:
        return kernel.in_double(operands)

    def attention_rows(start: int, first: int, end: int, *operands: Any) -> Tensor:
        return kernel.rows(kernel.run, start, first, end, operands)

    def attention_rows_in_double(start: int, first: int, end: int, *operands: Any) -> Tensor:
        return kernel.rows(kernel.in_double, start, first, end, operands)

    attention.__module__ = attention_rows.__module__ = __name__
    attention.attends, attention.rows = kernel, attention_rows
    attention.in_double, attention_rows.in_double = attention_in_double, attention_rows_in_double
    attention.fingerprint = (call.fingerprint, repr(kernel.places), repr(kernel.meaning))
    return attention


# -- what a call says ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Stands for an operand among a call's arguments."""

    index: int


@dataclass(frozen=True)
class _Call:
    """Attributes:
    said: arguments by role.
    operands: the nodes it takes.
    function: ``function(left)`` gives the call as a function of these, with that window to the
        left in place of its own, unless it is ``None``.
    fingerprint: equal for calls of the same code.
    """

    said: dict[str, Any]
    operands: list[fx.Node]
    function: Callable[[int | None], Callable]
    fingerprint: Any


def _call(node: fx.Node) -> _Call | None:
    if _uses_more_than_the_first(node):
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        return None if node.target._schema.is_mutable else _call_of_op(node)
    return _call_of_function(node) if hasattr(node.target, "parts") else None


def _uses_more_than_the_first(node: fx.Node) -> bool:
    if isinstance(node.meta.get("val"), Tensor):
        return False
    return any(user.args[1:] != (0,) and user.users for user in node.users)


def _call_of_op(node: fx.Node) -> _Call | None:
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    places = map(_Place, range(len(operands)))
    leaves = [next(places) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(leaves, structure)

    def function(left: int | None) -> Callable:
        leaves, structure = pytree.tree_flatten(_with_left(node_target, args, kwargs, left))
        moving = [isinstance(leaf, _Place) for leaf in leaves]
        fixed = [leaf for leaf in leaves if not isinstance(leaf, _Place)]
        return function_of(node_target, moving, fixed, structure)

    node_target = node.target
    said = _said_by(node_target, args, kwargs)
    return said and _Call(said, operands, function, function(None).fingerprint)


def _call_of_function(node: fx.Node) -> _Call | None:
    """The call of an ``autograd.Function`` whose forward makes one call of attention."""
    forward, backward, options = node.target.parts
    if not all(isinstance(argument, fx.Node) for argument in node.args):
        return None
    inputs = [n for n in forward.graph.nodes if n.op == "placeholder"]
    found = []
    for inner in forward.graph.nodes:
        if inner.op == "call_function" and (op := _overload(inner.target)) is not None:
            sources = fx.node.map_arg((inner.args, inner.kwargs), lambda n: _source(n, inputs))
            found.append(_said_by(op, *sources))
    found = [said for said in found if said is not None]
    if len(found) != 1:
        return None

    def function(left: int | None) -> Callable:
        graphs = [_graph_with_left(graph, left) for graph in (forward, backward)]
        return custom_function(*graphs, options)

    return _Call(found[0], list(node.args), function, node.target.fingerprint)


def _overload(target: Any) -> torch._ops.OpOverload | None:
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target.default if target.overloads() == ["default"] else None
    return target if isinstance(target, torch._ops.OpOverload) else None


def _source(node: fx.Node, inputs: list[fx.Node]) -> _Place | None:
    """The input that a value of a function's graph comes from, through padding and the like."""
    while node.op != "placeholder":
        if len(node.all_input_nodes) != 1:
            return _Place(-1)
        (node,) = node.all_input_nodes
    return _Place(inputs.index(node))


def _named(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict) -> dict[str, Any]:
    given = {a.name: value for a, value in zip(op._schema.arguments, args)} | dict(kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in op._schema.arguments}


def _said_by(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict) -> dict | None:
    """The arguments of a call by their roles; ``None`` if one has a meaning that is not known."""
    names = {argument.name for argument in op._schema.arguments}
    if not all(names & set(_TENSORS[role]) for role in ("query", "key", "value")):
        return None
    said = {}
    for name, value in _named(op, args, kwargs).items():
        name = name.rstrip("_")  # as optional ones are called in some
        if name in _ROLES:
            said[_ROLES[name]] = value
        elif name not in _WITHOUT_EFFECT and not _says_nothing(value):
            return None
    return said


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (bool, int, float)) and value == 0)


def _with_left(op: Any, args: Sequence, kwargs: dict, left: int | None) -> tuple[tuple, dict]:
    """A call's arguments with another window to the left, if it has one."""
    if left is None:
        return tuple(args), dict(kwargs)

    def changed(name: str, value: Any) -> Any:
        if _ROLES.get(name) == "left":
            return left
        return [left, *value[1:]] if _ROLES.get(name) == "window" and value else value

    names = [argument.name for argument in op._schema.arguments]
    args = tuple(changed(name, value) for name, value in zip(names, args))
    return args, {name: changed(name, value) for name, value in kwargs.items()}


def _graph_with_left(module: fx.GraphModule, left: int | None) -> fx.GraphModule:
    if left is None:
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function" and (op := _overload(node.target)) is not None:
            node.args, node.kwargs = _with_left(op, node.args, node.kwargs, left)
    return fx.GraphModule(module, graph)


# -- what it means ---------------------------------------------------------------------------------


def _kernel(lowered: Lowered, call: _Call) -> Kernel | None:
    said = call.said
    found = {role: said[role].index for role in _ORDER if isinstance(said.get(role), _Place)}
    meaning = _meaning(said)
    if meaning is None or not {"query", "key", "value"} <= found.keys() or -1 in found.values():
        return None
    if ("starts_q" in found) != ("starts_k" in found):
        return None
    tensors = [place for role, place in found.items() if "longest" not in role]
    if len(set(tensors)) < len(tensors) or set(tensors) != {
        i for i, operand in enumerate(call.operands) if isinstance(operand.meta["val"], Tensor)
    }:
        return None  # one that has two roles, or none
    operands = [call.operands[place] for place in found.values()]
    given = [_given(lowered, operand) for operand in operands]
    rank = 3 if "starts_q" in found else 4
    if any(len(x.shape) != rank or None in x.shape[-2:] for x in given[:3]):
        return None
    limits = [v for v in (said.get("longest_q"), said.get("longest_k")) if isinstance(v, int)]
    tried = [_made(call, found, meaning, rank - 3, None)]
    if meaning.left is not None:
        # The window itself may be longer than what is tried.
        tried.append(_made(call, found, meaning, rank - 3, 3))
    key = (call.fingerprint, repr(said), repr(given))
    return tried[0] if is_proved(key, tried, given, min(limits, default=None)) else None


def _made(
    call: _Call, found: dict[str, int], meaning: Meaning, dim: int, left: int | None
) -> Kernel:
    function, count = call.function(left), len(call.operands)
    meaning = meaning if left is None else replace(meaning, left=left)

    def run(operands: Sequence[Any]) -> Tensor:
        # Sizes without a role are not needed: that the call is proved with this one shows it.
        arguments = [_UNRELATED] * count
        for place, operand in zip(found.values(), operands):
            arguments[place] = operand
        return _first(function(*arguments))

    return Kernel(run, {role: index for index, role in enumerate(found)}, meaning, dim)


def _given(lowered: Lowered, operand: fx.Node) -> Given:
    value = operand.meta["val"]
    if not isinstance(value, Tensor):
        return Given((), None, None)
    shape = tuple(int(s) if s.is_Integer else None for s in lowered.shape(operand))
    return Given(shape, value.dtype, value.device)


def _meaning(said: dict[str, Any]) -> Meaning | None:
    """The meaning of a call; ``None`` for one that a chunk of queries cannot make."""
    left, right = said.get("window") or (said.get("left"), said.get("right"))
    numbers = [said.get(role) for role in ("causal", "scale", "softcap", "dropout")]
    if not all(x is None or isinstance(x, (bool, int, float)) for x in (left, right, *numbers)):
        return None
    causal, scale, softcap, dropout = numbers
    left, right = (None if bound is None or bound < 0 else bound for bound in (left, right))
    causal = bool(causal) or right == 0
    if dropout:
        return None  # drawn inside, out of sight
    if not causal and (left is not None or right is not None or said.get("slopes") is not None):
        # It counts from the last query, which in a chunk is not where it is in the whole.
        return None
    return Meaning(scale, causal, left, softcap or None)


def _same_documents(
    lowered: Lowered, examples: Sequence[Any], kernel: Kernel, operands: list[fx.Node]
) -> bool:
    """Whether keys and queries of a causal call are divided alike; if that rests on two inputs
    having the same values, it is assumed, and checked at each call."""
    if "starts_q" not in kernel.places or not kernel.meaning.causal:
        return True
    one, other = (_copied(operands[kernel.places[role]]) for role in ("starts_q", "starts_k"))
    if one is other:
        return True
    inputs = lowered.placeholders
    if one not in inputs or other not in inputs:
        return False
    assumption = SameValues(inputs.index(one), inputs.index(other))
    if not assumption.holds(examples):
        return False
    lowered.assumptions.append(assumption)
    return True


def _copied(node: fx.Node) -> fx.Node:
    """Where an integer tensor's values come from."""
    while node.target in _COPIES:
        node = node.args[0]
    return node
