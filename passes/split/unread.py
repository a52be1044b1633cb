"""Unread: a body without the products whose values nobody reads.

The backward runs a chunk again to record what its gradients are made of. The chunk's outputs are
known by then, and so are the rows in its caches: products that only lead there, through ops whose
own backward does not ask for them (a residual sum, a rotation by a table), need not be computed.
They stay in the graph, since gradients pass through them: a placeholder stands for their value.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from seqsplit.ops import caches, views, weights

__all__ = ["without_unread"]

aten = torch.ops.aten

_READS = (caches.cached_read, caches.cached_parts)
# Linear in each operand, so that a gradient asks for none of them.
_SUMS = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.rsub.Scalar,
    aten.neg.default,
    aten.cat.default,
    aten.stack.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.reshape.default,
    aten.to.dtype,
    aten._to_copy.default,
    aten.dropout.default,  # asks for its mask
    aten.native_dropout.default,
    views.sliced,
    operator.getitem,
}
# Linear in the first one: a gradient for the second would ask for its value.
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


def without_unread(module: fx.GraphModule, *, caches_filled: bool) -> fx.GraphModule:
    """A body that gives the same gradients, its outputs' values being left open.

    Args:
        module: the body. A node with ``meta["constant"]`` never needs a gradient.
        caches_filled: whether the chunk's own rows are in the caches already.

    Returns:
        ``module`` itself if every product in it is read.
    """
    unread: set[fx.Node] = set()
    for node in reversed(module.graph.nodes):
        if node.users and all(
            user.op == "output"
            or (caches_filled and user.target in _READS)
            or (user in unread and _is_linear(user, node))
            for user in node.users
        ):
            unread.add(node)
    if not any(node.target in weights.UNREAD for node in unread):
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in unread:
            copies[node].target = weights.UNREAD.get(node.target, node.target)
    graph.lint()
    return fx.GraphModule(module, graph, class_name="ChunkBody")


def _is_linear(user: fx.Node, operand: fx.Node) -> bool:
    """Whether no gradient that passes through ``user`` asks for the value of ``operand``."""
    target = getattr(user.target, "replays", user.target)
    if target in _PRODUCTS:
        first, second = user.args[:2]
        constant = not isinstance(second, fx.Node) or second.meta.get("constant", False)
        return first is operand and second is not operand and constant
    return target in _SUMS or getattr(target, "is_view", False)
