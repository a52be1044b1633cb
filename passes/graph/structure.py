"""Code and operands as text that is the same for equal layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["kind_of", "structure_of"]


def structure_of(module: fx.GraphModule) -> str:
    """A graph's code without the names of its values, which differ from layer to layer."""
    numbers = {node: index for index, node in enumerate(module.graph.nodes)}
    return "\n".join(
        f"{node.op} {'' if node.op == 'placeholder' else node.target} "
        f"{fx.node.map_arg((node.args, node.kwargs), lambda n: f'%{numbers[n]}')}"
        for node in module.graph.nodes
    )


def kind_of(value: Any) -> str:
    """What, beside its shape, a tensor is: its dtype, or its class with what that is made of."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if not is_traceable_wrapper_subclass(value):
        return str(value.dtype)
    names, context = value.__tensor_flatten__()
    inner = {name: kind_of(getattr(value, name)) for name in names}
    return f"{type(value).__module__}.{type(value).__qualname__}({context}, {inner})"
