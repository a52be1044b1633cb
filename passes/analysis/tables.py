"""Tables: masks and the like that are there as numbers.

Where a loop over positions writes a mask row by row, what is left of it after the writes became
values is a chain of as many ops as there are positions, none of which can be cut. It depends on no
input, so the table itself takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from seqsplit.passes.graph.lowered import Lowered, attribute_of, fake_mode_of

__all__ = ["compute_tables", "stored_tables"]

aten = torch.ops.aten

_WRITES = {
    aten.index_put.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.select_scatter.default,
    aten.slice_scatter.default,
}


def compute_tables(lowered: Lowered) -> None:
    """Replace what is put together from numbers by writes with a constant (in place).

    Equal tables (one for each layer) become one.
    """
    written = _written(lowered.graph)
    roots = [n for n in written if any(u not in written for u in n.users)]
    if not roots:
        return
    graph, mode = lowered.graph, fake_mode_of(lowered.graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    constants = [node for node in graph.nodes if node.op == "get_attr"]
    values = {node: attribute_of(lowered.module, node) for node in constants}
    kept: list[tuple[fx.Node, Tensor]] = []
    for root in roots:
        value = _computed(root, values)
        node = next((n for n, other in kept if _same(other, value)), None)
        if node is None:
            name = f"table_{len(kept)}"
            lowered.module.register_buffer(name, value)
            with graph.inserting_before(first):
                node = graph.get_attr(name)
            node.meta = {
                "region": root.meta["region"],
                "val": mode.from_tensor(value, static_shapes=True),
            }
            kept.append((node, value))
        root.replace_all_uses_with(node, delete_user_cb=lambda user: user not in written)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def _written(graph: fx.Graph) -> dict[fx.Node, None]:
    """Tensors that hang on no input and of which a write is a part."""
    numbers: set[fx.Node] = set()
    written: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            numbers.add(node)
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        drawn = torch.Tag.nondeterministic_seeded in node.target.tags
        if drawn or not all(operand in numbers for operand in node.all_input_nodes):
            continue
        numbers.add(node)
        is_tensor = isinstance(node.meta.get("val"), Tensor)
        if is_tensor and (node.target in _WRITES or written.keys() & set(node.all_input_nodes)):
            written[node] = None
    return written


def _computed(root: fx.Node, values: dict[fx.Node, Any]) -> Tensor:
    stack = [root]
    while stack:
        node = stack[-1]
        missing = [operand for operand in node.all_input_nodes if operand not in values]
        if missing:
            stack += missing
            continue
        stack.pop()
        if node not in values:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)
    return values[root]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def stored_tables(
    lowered: Lowered, examples: Sequence[Any]
) -> dict[fx.Node, tuple[int | None, Tensor]]:
    """Inputs and constants of fixed size that may be masks: plain tensors, an input's with its
    number.

    Args:
        lowered: the graph.
        examples: the real inputs of the captured call.
    """
    given = [(node, i, v) for i, (node, v) in enumerate(zip(lowered.placeholders, examples))]
    for node in lowered.graph.nodes:
        if node.op == "get_attr":
            given.append((node, None, attribute_of(lowered.module, node)))
    return {
        node: (index, value)
        for node, index, value in given
        if isinstance(value, Tensor)
        and not value.requires_grad
        and value.dim() >= 2
        and not any(size.free_symbols for size in lowered.shape(node))
    }
