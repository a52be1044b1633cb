"""Steps without arithmetic: what they allocate and count is the same, and takes seconds.

Which storages a step allocates, and which FLOPs it would do, does not depend on the values of its
floating-point numbers. Under :class:`SkipArithmetic` large ones are not computed: results are
allocated and left as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_SMALL = 2**14  # elements: not worth the trouble


class SkipArithmetic(TorchDispatchMode):
    """While active, ops on large floating-point tensors give uninitialised results.

    Views are made and integers and booleans are computed as ever: sizes may follow from them. To be
    entered before the modes that watch memory or count FLOPs.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._without_meta: set[Any] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [a for a in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(a, Tensor)]
        if not isinstance(func, torch._ops.OpOverload) or not any(map(_is_large, tensors)):
            return func(*args, **kwargs)
        if _writes_its_first(func) and tensors[0] is args[0] and _is_large(args[0]):
            return args[0]
        if any(argument.alias_info for argument in func._schema.returns):
            return func(*args, **kwargs)  # a view, or another way of writing
        shapes = self._shapes_of(func, args, kwargs)
        if shapes is None:
            return func(*args, **kwargs)
        return pytree.tree_map(lambda shape: _like(shape, tensors[0].device), shapes)

    def _shapes_of(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """The results on the meta device; ``None`` where those are not known, or not all of them
        are floating-point tensors."""
        if func in self._without_meta:
            return None
        try:
            shapes = func(*pytree.tree_map(_without_values, args), **_without_values_of(kwargs))
        except (NotImplementedError, RuntimeError):
            self._without_meta.add(func)
            return None
        leaves = pytree.tree_leaves(shapes)
        fits = all(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves)
        return shapes if fits else None


def _is_large(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() >= _SMALL


def _writes_its_first(func: Any) -> bool:
    """Whether an op does nothing but write to its first argument, which it returns."""
    returned = func._schema.returns
    written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return (
        len(returned) == len(written) == 1
        and written[0].name == func._schema.arguments[0].name
        and func._schema.name.endswith("_")
        and func._schema.name not in _SHAPING
    )


# They write no values but the tensor's own size and storage.
_SHAPING = (
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::as_strided_",
    "aten::transpose_",
    "aten::t_",
    "aten::squeeze_",
    "aten::unsqueeze_",
    "aten::detach_",
)


def _without_values_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    mapped = pytree.tree_map(_without_values, kwargs)
    return mapped | ({"device": torch.device("meta")} if "device" in mapped else {})


def _without_values(value: Any) -> Any:
    return _like(value, torch.device("meta")) if isinstance(value, Tensor) else value


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
