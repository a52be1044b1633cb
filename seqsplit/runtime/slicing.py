"""Which part of a whole value a chunk holds, as a view of it."""

from __future__ import annotations

from torch import Tensor

from seqsplit.ir.placement import Kind, Placement, Span
from seqsplit.ops.caches import keys_start

__all__ = ["part_view", "take_part"]


def take_part(
    value: Tensor, placement: Placement, start: int, end: int, length: int | None = None
) -> Tensor:
    """The part of a whole value that a chunk ``[start, end)`` holds under a placement.

    Args:
        length: of the sequence in this value, needed only where it sits inside a merged dim.

    Returns:
        A view, but for merged dims, whose factors a view cannot join again.
    """
    part = part_view(value, placement, start, end, length)
    for dim, span in placement.spans:
        if span.merged:
            part = part.flatten(dim, dim + len(_factors(span, -1)) - 1)
    return part


def part_view(
    value: Tensor, placement: Placement, start: int, end: int, length: int | None = None
) -> Tensor:
    """The same, with merged dims (one more dim each) left apart."""
    for dim, span in reversed(placement.spans):
        if span.merged:
            value = value.unflatten(dim, _factors(span, length))
            dim += int(span.outer != 1)
        first, last = min(_first(span, start), value.shape[dim]), min(end, value.shape[dim])
        value = value.narrow(dim, first, last - first)
    return value


def _factors(span: Span, length: int) -> tuple[int, ...]:
    """The sizes that a merged dim is made of, one of them left open."""
    if span.outer == 1:
        return (length, -1)
    return (-1, length) if span.inner == 1 else (-1, length, int(span.inner))


def _first(span: Span, start: int) -> int:
    return start if span.kind is Kind.ROWS else keys_start(start, span.window)
