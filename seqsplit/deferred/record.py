"""Record calls on deferred tensors, or find that a call has to be carried out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqsplit.deferred.expression import Operand, Value, concatenate, select
from seqsplit.deferred.rearrange import Rearranged, joining, rearrange
from seqsplit.deferred.rowwise import apply
from seqsplit.deferred.tensor import DeferredTensor, current
from seqsplit.deferred.totals import Total, as_total
from seqsplit.deferred.write import ABOUT_AUTOGRAD, is_write, write
from seqsplit.errors import SeqsplitError, format_message

__all__ = ["HOOKS", "record"]


def record(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of a call, deferred if it can be; ``NotImplemented`` if the tensors have to be
    computed first."""
    name = _name_of(func)
    if name in HOOKS or func is torch.autograd.grad:
        inputs = args[0] if name in HOOKS else kwargs.get("inputs", args[1:2])
        _refuse_used(deferred_in(inputs, {}), name)
    if args and is_write(name) and isinstance(args[0], DeferredTensor):
        return write(func, args, kwargs, row_wise)
    args, kwargs = pytree.tree_map_only(DeferredTensor, current, (args, kwargs))
    given = deferred_in(args, kwargs)
    if not given:
        return func(*args, **kwargs)
    recorded = _recorded(func, name, args, kwargs, given)
    if recorded is not NotImplemented and _has_history(recorded):
        for tensor in given:
            tensor.is_used = True
    return recorded


def _refuse_used(inputs: list[DeferredTensor], name: str) -> None:
    """Refuse to ask for the gradient of a tensor that others were derived from: theirs goes past
    its node, straight to the hidden states."""
    for tensor in inputs:
        if tensor.is_used:
            shape = list(tensor._layout.shape(tensor._node.features))
            raise SeqsplitError(
                format_message(
                    f"{name} of a deferred tensor that has been used already",
                    got=f"a tensor of shape {shape}",
                    why="what was computed from it goes back to the hidden states at once: the "
                    "gradient does not pass here",
                    fix="register hooks (or call .materialize()) before it is used, or run the "
                    "step inside `with seqsplit.disable():`",
                )
            )


def _has_history(recorded: Any) -> bool:
    leaves = pytree.tree_leaves(recorded)
    return any(not isinstance(leaf, Tensor) or leaf.requires_grad for leaf in leaves)


def _recorded(
    func: Callable, name: str, args: tuple, kwargs: dict, given: list[DeferredTensor]
) -> Any:
    if is_write(name) or name in _LOOKS or "out" in kwargs:
        return NotImplemented
    if name in _COPIES and not given[0].requires_grad:
        return NotImplemented  # kept for later, when weights may have changed
    if name in _JOINS:
        joined = _join(name, args, kwargs)
        if joined is not None:
            return joined
    if args and isinstance(args[0], DeferredTensor) and len(given) == 1:
        found = _rearranged(func, name, args[0], args[1:], kwargs)
        if found is not None:
            return found
    total = as_total(func, name, args, kwargs)
    if total is not None:
        return _take_total(total)
    return row_wise(func, args, kwargs)


_JOINS = ("cat", "concat", "concatenate", "stack")

_COPIES = ("clone", "cpu")

# What asks for the gradient of the tensor itself.
HOOKS = {"register_hook", "retain_grad"}

# What is done to the tensor itself, and not a function of its values.
_LOOKS = {
    "__array__", "__bool__", "__contains__", "__deepcopy__", "__float__", "__format__",
    "__index__", "__int__", "__repr__", "__get__data", "__set__", "backward", "data_ptr",
    "item", "numpy", "pin_memory", "register_post_accumulate_grad_hook", "storage", "tolist",
    "untyped_storage",
    *ABOUT_AUTOGRAD, *HOOKS,
}  # fmt: skip


def _name_of(func: Callable) -> str:
    """The name of a function; for a property, which one it is."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        name += getattr(getattr(func, "__self__", None), "__name__", "")
    return name


def deferred_in(args: Any, kwargs: Any) -> list[DeferredTensor]:
    leaves = pytree.tree_leaves((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, DeferredTensor)]


def row_wise(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record a call that treats each token by itself, as is found by trying it."""
    given, (leaves, structure) = deferred_in(args, kwargs), pytree.tree_flatten((args, kwargs))
    operands = [
        Operand(leaf._node, leaf._layout) if isinstance(leaf, DeferredTensor) else leaf
        for leaf in leaves
    ]
    found = apply(func, operands, structure)
    if found is None:
        return NotImplemented
    operation, returned = found
    made = []
    for slot, result in enumerate(operation.call.results):
        parent = None if result.shares is None else leaves[result.shares]
        if result.is_argument and isinstance(parent, DeferredTensor):
            made.append(parent)
            continue
        value = DeferredTensor.make(
            Value(operation, slot), result.layout, given[0]._options, given[0]._hidden_width
        )
        if parent is not None:
            if len(given) > 1 or parent is not given[0]:
                return NotImplemented
            value.be_view_of(parent, _again(func, leaves, structure, result.shares, slot))
        made.append(value)
    return pytree.tree_unflatten(made, returned)


def _again(
    func: Callable, leaves: list[Any], structure: pytree.TreeSpec, place: int, slot: int
) -> Callable[[Tensor], Tensor]:
    """A call as a function of one of its arguments."""
    before, behind = leaves[:place], leaves[place + 1 :]

    def again(value: Tensor) -> Tensor:
        args, kwargs = pytree.tree_unflatten([*before, value, *behind], structure)
        return pytree.tree_leaves(func(*args, **kwargs))[slot]

    return again


def _take_total(total: Total) -> Any:
    per_token = row_wise(total.func, total.args, total.kwargs)
    return per_token if per_token is NotImplemented else total.of(per_token)


def _rearranged(
    func: Callable, name: str, tensor: DeferredTensor, args: tuple, kwargs: dict
) -> Any:
    def call(other: Tensor) -> Any:
        return func(other, *args, **kwargs)

    found = rearrange(name, call, tensor._layout, tensor._node, args)
    if found is None:
        return None
    if not tensor.is_wide and any(part.index is not None for part in found):
        return NotImplemented  # a choice of narrow rows is simply computed
    made = [
        _taken(tensor, part, functools.partial(_part_of, call, slot))
        for slot, part in enumerate(found)
    ]
    if any(part is NotImplemented for part in made):
        return NotImplemented
    if name == "__iter__":
        return iter(made)
    return tuple(made) if name in _GIVES_TUPLE else made[0]


_GIVES_TUPLE = {
    "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_chunk", "unsafe_split",
}  # fmt: skip


def _part_of(call: Callable, slot: int, value: Tensor) -> Tensor:
    given = call(value)
    return given if isinstance(given, Tensor) else list(given)[slot]


def _taken(tensor: DeferredTensor, part: Rearranged, again: Callable) -> Any:
    node = tensor._node if part.index is None else select(tensor._node, part.index)
    made = DeferredTensor.make(node, part.layout, tensor._options, tensor._hidden_width)
    if part.columns is not None:
        columns = part.columns.unsqueeze(-1).to(node.device)
        picked = row_wise(torch.gather, (made, -1, columns), {})
        return row_wise(torch.squeeze, (picked, -1), {})
    if part.rest is not None:
        made = row_wise(Tensor.__getitem__, (made, part.rest), {})
        if made is NotImplemented:
            return made
    made.be_view_of(tensor, again)
    return made


def _join(name: str, args: tuple, kwargs: dict) -> DeferredTensor | None:
    tensors: Sequence[Any] = args[0] if args else kwargs.get("tensors", ())
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not tensors or not all(isinstance(tensor, DeferredTensor) for tensor in tensors):
        return None
    first, layouts = tensors[0], [tensor._layout for tensor in tensors]
    num_lead = len(first._layout.lead)
    if any(len(layout.lead) != num_lead for layout in layouts):
        return None
    stacks = name == "stack"
    dim %= num_lead + len(first._node.features) + stacks
    if dim >= num_lead + stacks:  # features are joined, token by token
        return None
    node = concatenate([tensor._node for tensor in tensors])
    found = joining(stacks, layouts, dim) if node is not None else None
    if found is None:
        return None
    if found.index is not None:
        node = select(node, found.index)
    return DeferredTensor.make(node, found.layout, first._options, first._hidden_width)
