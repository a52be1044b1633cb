"""Writes into deferred tensors (``logits.div_(2)``, ``logits /= 2``): new values for them.

Nobody else may see the tensor change but those who should. While it has views, or is one, all of
them are computed, as true views of one tensor, and the write is carried out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqsplit.deferred.tensor import DeferredTensor, look
from seqsplit.errors import SeqsplitError, format_message

__all__ = ["ABOUT_AUTOGRAD", "is_write", "write"]


def is_write(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name in _IN_PLACE_OPERATORS)
    return name.endswith("_") and name not in ABOUT_AUTOGRAD


# What these change is not a value: they are carried out on the computed tensor.
ABOUT_AUTOGRAD = {"detach_", "requires_grad_", "share_memory_"}

_IN_PLACE_OPERATORS = {
    "__iadd__", "__iand__", "__idiv__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__",
    "__ior__", "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__",
}  # fmt: skip


def write(func: Callable, args: tuple, kwargs: dict, row_wise: Callable) -> Any:
    """Carry out or record a write.

    Args:
        func, args, kwargs: the call.
        row_wise: records a call.
    """
    target, *others = args
    relatives = list(_relatives(target))
    if target._result is None and not relatives:
        made = row_wise(_without_writing(func), args, kwargs)
        if made is not NotImplemented and _replaces(made, target):
            target.rewrite(made._node)
            return target
        target.own_result()
    elif relatives:
        _make_real(target, relatives)
    computed = functools.partial(look, name=getattr(func, "__name__", str(func)))
    others, kwargs = pytree.tree_map_only(DeferredTensor, computed, (others, kwargs))
    func(target._result, *others, **kwargs)
    for member in (target, *relatives):
        member.follow_result()
    return target._result


@functools.cache
def _without_writing(func: Callable) -> Callable:
    def pure(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = tensor.clone()
        func(copy, *args, **kwargs)
        return copy

    return pure


def _replaces(made: DeferredTensor, target: DeferredTensor) -> bool:
    """Whether the new values fit where the old ones were, gradients included."""
    known = {id(leaf) for leaf in target._node.leaves}
    return (
        made._layout == target._layout
        and made._node.features == target._node.features
        and made._node.dtype == target._node.dtype
        and all(id(leaf) in known for leaf in made._node.leaves)
        and (made._node.requires_grad == target.requires_grad or not torch.is_grad_enabled())
    )


def _relatives(target: DeferredTensor) -> Iterator[DeferredTensor]:
    yield from (member for member in list(target._memory.members) if member is not target)


def _make_real(target: DeferredTensor, relatives: list[DeferredTensor]) -> None:
    """Compute a tensor and its views, as views of one another."""
    root = target.whole()
    for member in (target, *relatives):
        computed = member._result is not None and not member._is_true_view
        if root is None or (computed and member is not root):
            raise SeqsplitError(
                format_message(
                    "a write into a deferred tensor of which a view was looked at before",
                    got=f"a tensor of shape {list(target._layout.shape(target._node.features))}",
                    fix="write into a copy: x = x.clone()",
                )
            )
    if root._result is None:
        root.own_result()
    for member in sorted((target, *relatives), key=lambda member: len(member._ancestors)):
        member.materialize()
