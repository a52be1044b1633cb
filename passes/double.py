"""Double: the same code in float64, for checking by execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

__all__ = ["as_double", "double_call", "double_graph"]


def as_double(value: Any) -> Any:
    """A tensor in float64 (complex128), unless it holds integers or booleans."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.float64)
    if isinstance(value, Tensor) and value.is_complex():
        return value.to(torch.complex128)
    return value


def double_call(target: Any, args: Any, kwargs: Any) -> tuple[Callable, Any, Any]:
    """The same call, asking for double wherever it asks for a floating dtype.

    A function that was made of a piece of the graph says itself, in ``in_double``, what it is
    in float64.
    """

    def double(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        if isinstance(value, torch.dtype) and value.is_complex:
            return torch.complex128
        return value

    args, kwargs = pytree.tree_map(double, (args, kwargs))
    return getattr(target, "in_double", target), args, kwargs


def double_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph that computes in float64, outside of any autocast."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    for node in new.nodes:
        if node.op != "call_function":
            continue
        if getattr(node.target, "__name__", "") == "_enter_autocast":
            device, dtype, _, cache = node.args
            node.args = (device, dtype, False, cache)
        else:
            node.target, node.args, node.kwargs = double_call(node.target, node.args, node.kwargs)
    return new
