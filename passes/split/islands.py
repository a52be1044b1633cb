"""Islands: the parts of a chunk body that a compiler may have.

Between the linear maps, the attentions and the reads of caches lie stretches of ordinary ops
(norms, rotations, gates, residual sums). Each becomes one call, compiled forward and backward.
Their sizes are symbolic, so that one compilation serves every chunk, every prefix and every layer
of the same structure.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from seqsplit.ir.plan import Body
from seqsplit.ops.caches import keys_start
from seqsplit.passes.graph.sizes import OPERATORS

__all__ = ["compile_islands"]

_LEAST_OPS = 2  # fewer are not worth a call
_POSITIONS = ("start", "end", "length")
_NUMBERS = {*OPERATORS.values(), operator.add, operator.sub, operator.mul, min, max, keys_start}


def compile_islands(body: Body, inner: str) -> Body:
    """A body that computes the same, with its islands compiled.

    Its modules are much alike, and the islands that they have in common are compiled once.

    Args:
        inner: a backend of ``torch.compile``.
    """
    islands: dict[str, _Island] = {}
    return body.with_code(lambda module: _with_islands(module, inner, islands))


def _with_islands(
    module: fx.GraphModule, inner: str, islands: dict[str, _Island]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), {}
    root = torch.nn.Module()
    nodes = _numbers_first(list(module.graph.nodes))
    position = 0
    while position < len(nodes):
        run = _run_from(nodes, position)
        if sum(_computes(node) for node in run) >= _LEAST_OPS:
            _place_island(graph, root, run, copies, inner, islands)
            position += len(run)
            continue
        node = nodes[position]
        copies[node] = graph.node_copy(node, copies.__getitem__)
        position += 1
    graph.lint()
    return fx.GraphModule(root, graph, class_name="ChunkBody")


def _numbers_first(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The same nodes, sizes and positions (which tensors do not give) before all tensors."""
    numbers: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder":
            is_number = node.name in _POSITIONS or node.name.startswith("size_")
        else:
            is_number = node.target in _NUMBERS and numbers.issuperset(node.all_input_nodes)
        if is_number:
            numbers.add(node)
    inputs = [node for node in nodes if node.op == "placeholder"]
    early = [node for node in nodes if node in numbers and node.op != "placeholder"]
    known = {*inputs, *early}
    return [*inputs, *early, *(node for node in nodes if node not in known)]


def _run_from(nodes: Sequence[fx.Node], position: int) -> list[fx.Node]:
    run = []
    for node in nodes[position:]:
        if not _is_plain(node):
            break
        run.append(node)
    return run


def _is_plain(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace != "aten" or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return target not in _LEFT_OUT


# Products: the library's kernels do them, with weights' gradients added in place.
_LEFT_OUT = {
    torch.ops.aten.linear.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.einsum.default,
    torch.ops.aten.scaled_dot_product_attention.default,
}


def _computes(node: fx.Node) -> bool:
    """Whether a node is more than another view."""
    return not node.target.is_view


def _place_island(
    graph: fx.Graph,
    root: torch.nn.Module,
    run: Sequence[fx.Node],
    copies: dict[fx.Node, Any],
    inner: str,
    islands: dict[str, _Island],
) -> None:
    inside = set(run)
    inputs = list(dict.fromkeys(i for n in run for i in n.all_input_nodes if i not in inside))
    outputs = [node for node in run if any(user not in inside for user in node.users)]
    island, own = fx.Graph(), {}
    for index, node in enumerate(inputs):
        own[node] = island.placeholder(f"in_{index}")
    for node in run:
        own[node] = island.node_copy(node, own.__getitem__)
    island.output(tuple(own[node] for node in outputs))
    name = f"island_{len(root._modules)}"
    code = island.python_code("self").src
    setattr(root, name, islands.setdefault(code, _Island(island, inner)))
    call = graph.call_module(name, tuple(copies[node] for node in inputs))
    for slot, node in enumerate(outputs):
        copies[node] = graph.call_function(operator.getitem, (call, slot))


class _Island(torch.nn.Module):
    """A stretch of ordinary ops, compiled at its first call: the code of modules that are made
    while a compiler is at work, as this one is, is never compiled."""

    def __init__(self, graph: fx.Graph, inner: str) -> None:
        super().__init__()
        self._graph, self._inner = graph, inner
        self._compiled: Callable | None = None

    def forward(self, *inputs: Any) -> Any:
        if self._compiled is None:
            module = fx.GraphModule(torch.nn.Module(), self._graph)
            self._compiled = torch.compile(module.forward, backend=self._inner, dynamic=True)
        # The settings of our own capture, in whose forward this may run, are not meant for it.
        with (
            torch._dynamo.config.patch(specialize_int=False, specialize_float=True),
            warnings.catch_warnings(),
        ):
            # The compiler looks at .grad of every input.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
            return self._compiled(*inputs)
