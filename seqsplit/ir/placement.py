"""Placements: which part of a value a chunk holds.

The vocabulary is that of sequence parallelism, played on one device by turns:

``Whole``           the chunk holds all of the value (weights, constants)
``Chunk(dim)``      it holds the rows ``[start, end)`` of ``dim``
``Prefix(dim)``     it holds ``[0, end)`` of ``dim``, or the window that ends at ``end``
``Sum``             it holds a share; the value is the sum of all chunks' shares

A value can be split on two dims at once (attention scores are ``Chunk`` on their query dim and
``Prefix`` on their key dim): ``Chunk(2) | Prefix(3)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import sympy

__all__ = ["Chunk", "Kind", "Placement", "Prefix", "Span", "Sum", "Whole"]


class Kind(Enum):
    """What range of the sequence a dim holds."""

    ROWS = "rows"  # [start, end): the chunk itself
    KEYS = "keys"  # [lo, end): everything up to the chunk's end, or a window of it


@dataclass(frozen=True)
class Span:
    """The range of one dim of a value.

    The sequence may sit inside a merged dim, as in ``view(B * T, V)``: then the dim's size is
    ``outer * T * inner`` and the range is taken on the middle factor.

    Attributes:
        kind: ``ROWS`` or ``KEYS``.
        window: for ``KEYS``, how many positions before a row's own it still sees
            (``None``: all of them).
        outer: the factor left of the sequence in a merged dim.
        inner: the factor right of it.
    """

    kind: Kind = Kind.ROWS
    window: int | None = None
    outer: sympy.Expr = sympy.S.One
    inner: sympy.Expr = sympy.S.One

    @property
    def merged(self) -> bool:
        return self.outer != 1 or self.inner != 1

    @property
    def separable(self) -> bool:
        """Whether the factors can be told from the dim's size and the sequence's length."""
        return self.outer == 1 or self.inner.is_Integer

    def factored(self, outer: sympy.Expr, inner: sympy.Expr) -> Span:
        """The same range on a dim with these factors around the sequence."""
        return Span(self.kind, self.window, outer, inner)

    def __str__(self) -> str:
        text = self.kind.value if self.window is None else f"window {self.window}"
        return f"{text} of {self.outer}*T*{self.inner}" if self.merged else text


ROWS = Span()


@dataclass(frozen=True)
class Placement:
    """Spans by dim, sorted; or a share of a sum (``partial``)."""

    spans: tuple[tuple[int, Span], ...] = ()
    partial: bool = False

    @property
    def dims(self) -> dict[int, Span]:
        return dict(self.spans)

    @property
    def has_rows(self) -> bool:
        return any(span.kind is Kind.ROWS for _, span in self.spans)

    @property
    def has_keys(self) -> bool:
        return any(span.kind is Kind.KEYS for _, span in self.spans)

    @property
    def rows_dim(self) -> int:
        """The dim that holds the chunk's rows (there is at most one)."""
        return next(dim for dim, span in self.spans if span.kind is Kind.ROWS)

    def normalized(self, ndim: int) -> Placement:
        """The same placement with negative dims counted from the front."""
        spans = ((dim % ndim if dim < 0 else dim, span) for dim, span in self.spans)
        return Placement(tuple(sorted(spans, key=lambda item: item[0])), self.partial)

    def __or__(self, other: Placement) -> Placement:
        spans = {**self.dims, **other.dims}
        return Placement(tuple(sorted(spans.items(), key=lambda item: item[0])), self.partial)

    def __str__(self) -> str:
        if self.partial:
            return "Sum"
        if not self.spans:
            return "Whole"
        names = {Kind.ROWS: "Chunk", Kind.KEYS: "Prefix"}
        parts = []
        for dim, span in self.spans:
            window = f", window={span.window}" if span.window is not None else ""
            merged = f", {span.outer}*T*{span.inner}" if span.merged else ""
            parts.append(f"{names[span.kind]}(dim={dim}{window}{merged})")
        return " | ".join(parts)

    __repr__ = __str__


def Chunk(dim: int, outer: sympy.Expr = sympy.S.One, inner: sympy.Expr = sympy.S.One) -> Placement:
    """The chunk's own rows along ``dim``, whose size is ``outer * T * inner``."""
    return Placement(((dim, ROWS.factored(outer, inner)),))


def Prefix(dim: int, window: int | None = None) -> Placement:
    """Everything along ``dim`` up to the chunk's end, or a window of it."""
    return Placement(((dim, Span(Kind.KEYS, window)),))


Whole = Placement()
Sum = Placement(partial=True)
