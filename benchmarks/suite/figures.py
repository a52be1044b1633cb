"""Numbers drawn from measurements: growth, ratios, the longest sequence that fits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..flops import attention_flops
from ..models import DecoderShape

Point = tuple[int, float]  # length, peak bytes


def slopes(points: Sequence[Point]) -> list[float]:
    """Bytes per position between each two neighbouring lengths."""
    pairs = zip(points, points[1:], strict=False)
    return [(peak - before) / (length - shorter) for (shorter, before), (length, peak) in pairs]


def expected_bytes(points: Sequence[Point], length: int) -> float:
    """Peak at ``length``, by the last slope (or proportionally, with one point to go by)."""
    if not points:
        return 0.0
    last, peak = points[-1]
    slope = slopes(points)[-1] if len(points) > 1 else peak / last
    return peak + slope * (length - last)


def longest(points: Sequence[Point], budget_bytes: float) -> int | None:
    """The length whose expected peak is the budget, by the last slope; ``None`` without one.

    A peak that grows faster than its last slope says (a mask of T x T) is taken to be better than
    it is.
    """
    if len(points) < 2:
        return None
    last, peak = points[-1]
    return max(0, int(last + (budget_bytes - peak) / slopes(points)[-1]))


@dataclass(frozen=True)
class Ratios:
    """Ratios of pairs: their median, quartiles and range."""

    median: float
    quartiles: tuple[float, float]
    range: tuple[float, float]

    @staticmethod
    def of(pairs: Sequence[tuple[float, float]]) -> Ratios:
        """Of ``first / second`` for each pair; there has to be one."""
        ratios = sorted(first / second for first, second in pairs)
        quartiles = (ratios[0], ratios[-1])
        if len(ratios) > 1:
            first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
            quartiles = (first, third)
        return Ratios(statistics.median(ratios), quartiles, (ratios[0], ratios[-1]))


def units(shape: DecoderShape, length: int, batch: int = 1) -> tuple[int, int]:
    """F of the layers and A of one forward pass, in FLOPs, by hand.

    Raises:
        ValueError: some layers attend within a window: their pairs are not those of a triangle.
    """
    if shape.window is not None:
        raise ValueError("A is of full causal attention; this shape has windows")
    linear = 2 * batch * length * shape.layers * shape.layer_weights
    q = (batch, shape.heads, length, shape.head_dim)
    kv = (batch, shape.kv_heads, length, shape.head_dim)
    attention = attention_flops(q, kv, kv, causal=True, align="top_left", backward=False)
    return linear, shape.layers * attention


def head_flops(shape: DecoderShape, length: int, batch: int = 1) -> int:
    """The head's products, forward and backward."""
    return 3 * 2 * batch * length * shape.vocab * shape.d
