"""Steps without their products: what they need and count is the same, and takes seconds.

Which storages a step allocates, and which FLOPs it would do, does not depend on the values. Under
:class:`SkipProducts` the matrix products and fused attention, which take nearly all of the time of
a long step, are not computed: their results are allocated and left as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .flops import ATTENTION, BATCHED

aten = torch.ops.aten
_SKIPPED = {aten.mm, aten.addmm, *BATCHED, *ATTENTION}


class SkipProducts(TorchDispatchMode):
    """While active, products and attention give uninitialised results of the right layout.

    To be entered before the modes that watch memory or count FLOPs.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet not in _SKIPPED or func._schema.is_mutable:
            return func(*args, **kwargs)
        device = next(a.device for a in pytree.arg_tree_leaves(*args) if isinstance(a, Tensor))
        shapes = func(*pytree.tree_map(_without_values, args), **_mapped(kwargs))
        return pytree.tree_map(lambda value: _allocated(value, device), shapes)


def _mapped(kwargs: dict[str, Any]) -> dict[str, Any]:
    return pytree.tree_map(_without_values, kwargs)


def _without_values(value: Any) -> Any:
    return _like(value, torch.device("meta")) if isinstance(value, Tensor) else value


def _allocated(value: Any, device: torch.device) -> Any:
    return _like(value, device) if isinstance(value, Tensor) else value


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
