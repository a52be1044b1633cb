"""Double: the same code in float64, for checking by execution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["as_double", "double_call", "double_dtype", "double_graph", "own_call"]


def as_double(value: Any) -> Any:
    """A tensor in float64 (complex128), unless it holds integers or booleans, or is of a class of
    its own: what a quantised weight is in float64, only its ops know."""
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return value
    if value.is_floating_point():
        return value.to(torch.float64)
    if value.is_complex():
        return value.to(torch.complex128)
    return value


def double_call(target: Any, args: Any, kwargs: Any) -> tuple[Callable, Any, Any]:
    """The same call, asking for double wherever it asks for a floating dtype.

    A function that was made of a piece of the graph says itself, in ``in_double``, what it is
    in float64.
    """
    args, kwargs = pytree.tree_map(double_dtype, (args, kwargs))
    return getattr(target, "in_double", target), args, kwargs


def double_dtype(value: Any) -> Any:
    """A floating or complex dtype becomes the widest, anything else stays what it is."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, torch.dtype) and value.is_complex:
        return torch.complex128
    return value


def own_call(target: Callable, like: Sequence[Tensor]) -> Callable:
    """An op that takes and gives float64, and computes in dtypes of its own.

    Args:
        target: the op.
        like: the tensors that it is really called with, in the call's order.
    """
    dtypes = [None if is_traceable_wrapper_subclass(t) else t.dtype for t in like]

    def in_own_dtypes(*args: Any, **kwargs: Any) -> Any:
        given = iter(dtypes)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda tensor: _cast(tensor, next(given)), (args, kwargs)
        )
        return pytree.tree_map_only(Tensor, as_double, target(*args, **kwargs))

    in_own_dtypes.__module__ = __name__
    return in_own_dtypes


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def double_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph that computes in float64, outside of any autocast.

    A node with ``meta["own"]``, the tensors it is really called with, keeps their dtypes.
    """
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    for node in new.nodes:
        if node.op != "call_function":
            continue
        if getattr(node.target, "__name__", "") == "_enter_autocast":
            device, dtype, _, cache = node.args
            node.args = (device, dtype, False, cache)
        elif "own" in node.meta:
            node.target = own_call(node.target, node.meta["own"])
        else:
            node.target, node.args, node.kwargs = double_call(node.target, node.args, node.kwargs)
    return new
