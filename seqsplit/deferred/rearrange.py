"""Calls that choose, split or reorder tokens, and leave the features of each as they are.

Each is carried out on the tokens' numbers, a small integer tensor of the tokens' dims, to see
which rows come out in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqsplit.deferred.expression import Layout, Node, unless_all

__all__ = ["Rearranged", "joining", "rearrange"]


@dataclass(frozen=True)
class Rearranged:
    """One result of a rearrangement.

    Attributes:
        layout: of the result.
        index: which rows, ``None`` for all of them in order.
        rest: a further index, into the features, still to be applied (or ``None``).
        columns: one feature per row is to be taken, those of these numbers (or ``None``).
    """

    layout: Layout
    index: Tensor | None = None
    rest: tuple[Any, ...] | None = None
    columns: Tensor | None = None


def rearrange(
    name: str, call: Callable, layout: Layout, node: Node, args: Sequence[Any]
) -> list[Rearranged] | None:
    """What a call on a deferred value does to its rows; ``None`` if it does something else.

    Args:
        name: of the function.
        call: does it to another tensor in the value's place.
        layout, node: of the value.
        args: the other positional arguments.
    """
    features = node.features
    if name in _RESHAPES:
        return _reshape(call, layout, features, node.dtype)
    if name in _PERMUTES:
        return _permute(call, layout, len(features))
    if name in ("getitem", "__getitem__"):
        if layout.is_leading:
            return _index(layout, features, args[0])
        return _slice(layout, len(features), args[0])
    if name in _ALONG_DIM and layout.is_leading:
        return _along_dim(call, layout, features)
    return None


_RESHAPES = {
    "contiguous", "flatten", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view",
    "view_as",
}  # fmt: skip
_PERMUTES = {
    "__get__mT", "__get__T", "movedim", "moveaxis", "permute", "swapaxes", "swapdims", "t",
    "transpose",
}  # fmt: skip
_ALONG_DIM = {
    "__iter__", "chunk", "flip", "index_select", "narrow", "select", "split", "split_with_sizes",
    "tensor_split", "unbind", "unsafe_chunk", "unsafe_split",
}  # fmt: skip


def _reshape(
    call: Callable, layout: Layout, features: tuple[int, ...], dtype: torch.dtype
) -> list[Rearranged] | None:
    shape = layout.shape(features)
    try:
        result = call(torch.empty(shape, dtype=dtype, device="meta"))
    except RuntimeError:
        return None
    if result.dtype != dtype:  # the bits of a number seen as something else
        return None
    given = tuple(result.shape)
    if given == shape:
        return [Rearranged(layout)]
    if not layout.is_leading:
        return None
    num_lead = len(given) - len(features)
    if num_lead < 1 or given[: len(layout.lead)] == layout.lead:  # only the features change
        return None
    if given[num_lead:] != features or torch.Size(given[:num_lead]).numel() != layout.num_rows:
        return None
    return [Rearranged(Layout.leading(given[:num_lead]))]


def _permute(call: Callable, layout: Layout, num_features: int) -> list[Rearranged] | None:
    """Dims in another order: by labels on them, told from the strides they end up with."""
    ndim = len(layout.lead) + num_features
    labels = torch.empty((), device="meta").as_strided([1] * ndim, list(range(ndim)))
    try:
        order = list(call(labels).stride())
    except RuntimeError:
        return None
    if sorted(order) != list(range(ndim)):
        return None
    features = [dim for dim in range(ndim) if dim not in layout.axes]
    if [dim for dim in order if dim in features] != features:
        return None  # features among themselves: no matter of tokens
    axes = tuple(order.index(axis) for axis in layout.axes)
    ranks = sorted(range(len(axes)), key=axes.__getitem__)
    lead = tuple(layout.lead[rank] for rank in ranks)
    index = None
    if ranks != list(range(len(axes))):
        index = _numbers(layout).permute(ranks).flatten()
    return [Rearranged(Layout(lead, tuple(sorted(axes))), index)]


def _along_dim(
    call: Callable, layout: Layout, features: tuple[int, ...]
) -> list[Rearranged] | None:
    """Along a dim of tokens: what it does to numbers, with features of size two that must come
    out as they went in. (So would they if only the first two are taken of many: the real sizes
    have to come out too.)"""
    shape, num_features = layout.shape(features), len(features)
    try:
        sizes = [part.shape for part in _as_tuple(call(torch.empty(shape, device="meta")))]
    except (RuntimeError, IndexError):
        return None
    if any(size[len(size) - num_features :] != features for size in sizes):
        return None
    twos = (2,) * num_features
    places = torch.arange(2**num_features).reshape(twos)
    numbers = _numbers(layout).reshape(layout.lead + (1,) * num_features) * places.numel()
    try:
        parts = _as_tuple(call(numbers + places))
    except (RuntimeError, IndexError):
        return None
    found = []
    for part in parts:
        kept = part.shape[: part.ndim - num_features]
        if not kept or part.shape[len(kept) :] != twos:
            return None
        if ((part % places.numel()) != places).any():
            return None
        rows = part.reshape(torch.Size(kept).numel(), -1)[:, 0] // places.numel()
        found.append(Rearranged(Layout.leading(kept), rows))
    return found


def _index(layout: Layout, features: tuple[int, ...], key: Any) -> list[Rearranged] | None:
    keys = _full(key, len(layout.lead) + len(features))
    if keys is None:
        return None
    front, dims = [], 0
    rest = list(keys)
    while rest and dims < len(layout.lead):
        item = rest.pop(0)
        front.append(item)
        dims += _consumed(item)
    if dims != len(layout.lead):
        return None
    plain = all(isinstance(item, slice) and item == slice(None) for item in rest)
    if plain and all(isinstance(i, slice) and i == slice(None) for i in front):
        return None
    numbers = _numbers(layout)
    if not plain and any(isinstance(item, Tensor) for item in (*front, *rest)):
        return _pick(numbers, front, rest, features)
    chosen = numbers[tuple(_on_cpu(item) for item in front)]
    if chosen.ndim == 0:
        return None
    lead = Layout.leading(chosen.shape)
    further = None if plain else (slice(None),) * chosen.ndim + tuple(rest)
    return [Rearranged(lead, unless_all(chosen.flatten(), layout.num_rows), further)]


def _slice(layout: Layout, num_features: int, key: Any) -> list[Rearranged] | None:
    """Slices of tokens where features do not come last."""
    keys = _full(key, len(layout.lead) + num_features)
    if keys is None or not all(isinstance(item, slice) for item in keys):
        return None
    if any(item != slice(None) for dim, item in enumerate(keys) if dim not in layout.axes):
        return None
    chosen = _numbers(layout)[tuple(keys[axis] for axis in layout.axes)]
    kept = Layout(tuple(chosen.shape), layout.axes)
    return [Rearranged(kept, unless_all(chosen.flatten(), layout.num_rows))]


def _pick(
    numbers: Tensor, front: list[Any], rest: list[Any], features: tuple[int, ...]
) -> list[Rearranged] | None:
    """``x[rows, columns]``: one feature of each of some rows."""
    if len(features) != 1 or len(rest) != 1 or not isinstance(rest[0], Tensor):
        return None
    if not all(isinstance(item, Tensor) and item.dtype == torch.int64 for item in front):
        return None
    if rest[0].dtype != torch.int64:
        return None
    *rows, columns = torch.broadcast_tensors(*(i.cpu() for i in front), rest[0].cpu())
    chosen = numbers[tuple(rows)]
    if chosen.ndim == 0:
        return None
    columns = torch.where(columns < 0, columns + features[0], columns)
    return [Rearranged(Layout.leading(chosen.shape), chosen.flatten(), columns=columns)]


def _full(key: Any, ndim: int) -> list[Any] | None:
    """An index with one item per dim (or group of dims), ``...`` written out."""
    keys = list(key) if isinstance(key, tuple) else [key]
    keys = [torch.as_tensor(item) if isinstance(item, (list, range)) else item for item in keys]
    allowed = (int, slice, Tensor, type(None), type(...))
    if not all(isinstance(item, allowed) for item in keys):
        return None
    used = sum(_consumed(item) for item in keys)
    places = [place for place, item in enumerate(keys) if item is ...]
    if len(places) > 1 or used > ndim:
        return None
    fill = [slice(None)] * (ndim - used)
    if places:
        return keys[: places[0]] + fill + keys[places[0] + 1 :]
    return keys + fill


def _consumed(item: Any) -> int:
    """How many dims an item of an index stands for."""
    if item is None or item is ...:
        return 0
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.ndim
    return 1


def _on_cpu(item: Any) -> Any:
    return item.cpu() if isinstance(item, Tensor) else item


def _numbers(layout: Layout) -> Tensor:
    return torch.arange(layout.num_rows).reshape(layout.lead)


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def joining(stacks: bool, layouts: Sequence[Layout], dim: int) -> Rearranged | None:
    """How the rows of ``cat`` (or ``stack``) lie among those of its operands one after another."""
    if not all(layout.is_leading for layout in layouts):
        return None
    numbers, first = [], 0
    for layout in layouts:
        numbers.append(_numbers(layout) + first)
        first += layout.num_rows
    joined = (torch.stack if stacks else torch.cat)(numbers, dim)
    return Rearranged(Layout.leading(joined.shape), unless_all(joined.flatten(), first))
