"""Calls of ``vmap`` inside a model, as one node each.

In Dynamo's graph a ``vmap`` is a stretch of nodes between two that enter and leave it. What is
computed in between has a hidden dim, which a trace of ATen ops does not see; so the stretch is kept
together as one function of the tensors that enter it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from seqsplit.passes.graph.structure import structure_of

__all__ = ["gather_vmaps", "is_vmap"]


def gather_vmaps(captured: fx.GraphModule) -> fx.GraphModule:
    """The same graph with a node for each call of ``vmap``; the graph itself if there is none."""
    if not any(_name(node) == _ENTER for node in captured.graph.nodes):
        return captured
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    gathered = fx.GraphModule(captured, graph)
    for stretch in _stretches(gathered.graph):
        _gather(gathered, stretch)
    gathered.graph.lint()
    gathered.recompile()
    return gathered


_ENTER, _LEAVE = "_vmap_increment_nesting", "_vmap_decrement_nesting"


def is_vmap(target: object) -> bool:
    """Whether a node's target is a function made by :func:`gather_vmaps`."""
    return getattr(target, "is_vmap", False)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _stretches(graph: fx.Graph) -> list[list[fx.Node]]:
    """The outermost calls of ``vmap``."""
    found: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if _name(node) == _ENTER:
            if not depth:
                found.append([])
            depth += 1
        if depth:
            found[-1].append(node)
        if _name(node) == _LEAVE:
            depth -= 1
    return found


def _gather(module: fx.GraphModule, stretch: list[fx.Node]) -> None:
    graph, inside = module.graph, set(stretch)
    inputs = list(dict.fromkeys(i for n in stretch for i in n.all_input_nodes if i not in inside))
    outputs = [node for node in stretch if any(user not in inside for user in node.users)]
    body = fx.Graph()
    known = {node: body.placeholder(f"operand_{place}") for place, node in enumerate(inputs)}
    for node in stretch:
        known[node] = body.node_copy(node, known.__getitem__)
    body.output(tuple(known[node] for node in outputs))
    if outputs:
        _insert_call(module, body, stretch, inputs, outputs)
    for node in reversed(stretch):
        graph.erase_node(node)


def _insert_call(
    module: fx.GraphModule,
    body: fx.Graph,
    stretch: list[fx.Node],
    inputs: list[fx.Node],
    outputs: list[fx.Node],
) -> None:
    graph, inside = module.graph, set(stretch)
    function = _as_function(fx.GraphModule(module, body))
    with graph.inserting_before(stretch[0]):
        call = graph.call_function(function, tuple(inputs))
        call.meta = {k: v for k, v in outputs[0].meta.items() if k != "example_value"}
        for slot, node in enumerate(outputs):
            item = graph.call_function(operator.getitem, (call, slot))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)


def _as_function(body: fx.GraphModule) -> Callable:
    def batched(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        depth = _depth()
        try:
            return body.forward(*operands)  # not called: that would print the failure
        except Exception:  # on operands that it was only tried with: leave what was entered
            while _depth() > depth:
                torch._C._functorch._vmap_decrement_nesting()
            raise

    batched.__module__ = __name__
    batched.is_vmap = True
    batched.fingerprint = ("vmap", structure_of(body))
    return batched


def _depth() -> int:
    """How many transforms of functions are entered."""
    return torch._C._functorch.maybe_current_level() or 0
