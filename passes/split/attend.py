"""Attend: for everything that contracts a sequence dim, which keys each row needs.

Fused attention says so itself (``is_causal``) or through its mask. Attention written by hand is a
softmax over keys followed by a product with the values: where the masked scores are -inf, the
probabilities are exactly zero, so the product may leave those keys out. The second half of this
pass carries "zero beyond this range" from the softmax to the product.

A range is claimed only if :mod:`bands` proves it; without a proof every row reads all keys, which
is always right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from seqsplit.ir.assumptions import Assumption
from seqsplit.ir.placement import Kind, Span
from seqsplit.passes.analysis.bands import Band, Bands, Bias
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.rewrite.stencils import STENCILS, windowed_of
from seqsplit.passes.rules.attention import SDPA, SOFTMAX, kernel_of
from seqsplit.passes.rules.registry import arguments_of, operands_of, rows_of, sum_rows
from seqsplit.passes.rules.scans import SCANS, recurrence_of, scanned_dim

__all__ = ["Reads", "attend"]

aten = torch.ops.aten

# Ops that keep a zero a zero, whatever else they do.
_KEEPS_ZERO = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.div.Scalar,
    aten.div.Tensor,
    aten.dropout.default,
    aten.expand.default,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.permute.default,
    aten.reshape.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}


@dataclass(frozen=True)
class Read:
    """What an attention needs of its keys.

    Attributes:
        span: the range, ``None`` for all keys.
        causal: the mask is exactly the causal one (or the causal window ``span.window``), so
            that a kernel can be told so instead of being given a mask.
    """

    span: Span | None
    causal: bool = False


ALL = Read(None)


@dataclass
class Reads:
    """Attributes:
    fused: the read of each fused attention node.
    zero_beyond: for values, dims along which everything outside a range is exactly zero.
    contracted: the range that suffices for each product that contracts such a dim.
    mixers: every node that mixes positions causally, in graph order.
    light: those of them that may share a segment with an attention: shifts, convolutions, sums.
    assumptions: what the reads assume of masks that are stored in buffers.
    """

    fused: dict[fx.Node, Read] = field(default_factory=dict)
    zero_beyond: dict[fx.Node, dict[int, Span]] = field(default_factory=dict)
    contracted: dict[fx.Node, Span] = field(default_factory=dict)
    mixers: list[fx.Node] = field(default_factory=list)
    light: set[fx.Node] = field(default_factory=set)
    assumptions: list[Assumption] = field(default_factory=list)


def attend(facts: Facts, examples: Sequence[Any] = ()) -> Reads:
    """Find the reads of every attention in the graph.

    Args:
        facts: of the graph.
        examples: the real inputs of the captured call, for masks that are stored in buffers.
    """
    reads, bands = Reads(), Bands(facts, examples)
    for node in facts.lowered.graph.nodes:
        if node.op != "call_function" or not facts.is_active(node):
            continue
        if node.target is SDPA:
            if facts.is_sequence(facts.shape(node.args[1])[-2]):
                reads.mixers.append(node)
                reads.fused[node] = _fused(facts, bands, node)
        elif (kernel := kernel_of(node.target)) is not None:
            key = node.args[kernel.places["key"]]
            if facts.is_sequence(facts.shape(key)[kernel.dim]):
                reads.mixers.append(node)
                reads.fused[node] = _of_kernel(facts, bands, kernel, node)
        elif node.target in SOFTMAX:
            dim = node.args[1] % node.meta["val"].ndim
            if facts.is_sequence(facts.shape(node)[dim]):
                reads.mixers.append(node)
                read = _of_bias(bands.of(node.args[0]), dim)
                if read.span is not None:
                    reads.zero_beyond[node] = {dim: read.span}
        elif (recurrence := recurrence_of(node.target)) is not None:
            if facts.is_sequence(facts.shape(node)[recurrence.dim]):
                reads.mixers.append(node)
        elif windowed_of(node.target) is not None:
            reads.mixers.append(node)
        elif node in facts.stream and _mixes_lightly(facts, node):
            reads.mixers.append(node)
            reads.light.add(node)
        else:
            _carry_zeros(facts, reads, node)
    reads.assumptions = list(bands.assumptions)
    return reads


def _mixes_lightly(facts: Facts, node: fx.Node) -> bool:
    """Whether a node is a stencil, or a scan along the sequence (and not, say, along experts)."""
    if node.target in SCANS:
        along = facts.shape(node)[scanned_dim(node)]
        return facts.sequence in along.free_symbols
    return node.target in STENCILS


def _fused(facts: Facts, bands: Bands, node: fx.Node) -> Read:
    arguments = arguments_of(node)
    query, key, mask = (facts.shape(arguments[n]) for n in ("query", "key", "query"))
    same_length = query[-2] == key[-2]
    if not same_length:
        return ALL
    if arguments["is_causal"]:
        return Read(Span(Kind.KEYS), causal=True)
    mask = arguments["attn_mask"]
    if mask is None:
        return ALL
    known, dim = bands.of(mask), mask.meta["val"].ndim - 1
    if isinstance(known, Bias):
        return _of_bias(known, dim)
    if not isinstance(known, Band) or mask.meta["val"].dtype != torch.bool:
        return ALL
    return _of_band(known, dim, minimum_fill=False)


def _of_kernel(facts: Facts, bands: Bands, kernel: Any, node: fx.Node) -> Read:
    query, key = (
        facts.shape(node.args[kernel.places[role]])[kernel.dim] for role in ("query", "key")
    )
    if query != key:
        return ALL
    found, dim = kernel.sees(facts, bands)
    reads = [
        _of_band(known, dim, minimum_fill=False)
        if isinstance(known, Band)
        else _of_bias(known, dim)
        for known in found
    ]
    return next((read for read in reads if read.span is not None), ALL)


def _of_bias(known: Any, dim: int) -> Read:
    if not isinstance(known, Bias):
        return ALL
    read = _of_band(known.band, dim, minimum_fill=known.fill != -math.inf)
    return Read(read.span, read.causal and known.pure)


def _of_band(band: Band, dim: int, *, minimum_fill: bool) -> Read:
    """Args:
    band: what the mask lets through.
    dim: the dim of the keys.
    minimum_fill: masked scores are finite, so that a row which sees nothing attends
        uniformly to ALL keys: the diagonal has to be visible for a range to suffice.
    """
    low, high = band.possible
    if band.key != dim:  # the band counts query - key
        if band.query != dim:
            return ALL
        low, high = -high, -low
    if high > 0:
        return ALL
    certain = band.certain
    if minimum_fill and (certain is None or not certain[0] <= 0 <= certain[1]):
        return ALL
    window = None if low == -math.inf else int(-low) + 1
    return Read(Span(Kind.KEYS, window), causal=band.exact and high == 0)


def _carry_zeros(facts: Facts, reads: Reads, node: fx.Node) -> None:
    operands = operands_of(node)
    zeros = [reads.zero_beyond.get(operand) for operand in operands]
    if not any(zeros):
        return
    for operands_row in sum_rows(node, facts.shape):
        for zero, placement in zip(zeros, operands_row):
            for dim, _ in placement.spans:
                if zero and dim in zero:
                    reads.contracted[node] = zero[dim]
    if node.target not in _KEEPS_ZERO:
        return
    found: dict[int, Span] = {}
    for row in rows_of(node, facts.shape):
        if row.exact_factors or row.out.partial:
            continue
        (out_dim, _) = row.out.spans[0]
        for zero, placement in zip(zeros, row.operands):
            for dim, _ in placement.spans:
                if zero and dim in zero:
                    found[out_dim] = zero[dim]
    if node.target in (aten.div.Tensor,) and zeros[0] is None:
        return  # a zero divisor makes no zero
    if found:
        reads.zero_beyond[node] = found
