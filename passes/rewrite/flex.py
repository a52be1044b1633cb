"""Flex: attention whose scores and mask are functions of places.

In Dynamo's graph it is an op that takes two small graphs. A chunk's call is the same op with the
places shifted, on a chunk of queries and the keys that they may see: what the mask's graph says of
these is read as from any mask (:mod:`..bands`), the places being its variables.

The op is also given the mask in blocks, made of the same function for the whole sequence. A chunk
makes its own, so it has to be proved that the blocks say nothing beyond the function: they are
computed for a short sequence and compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._guards import detect_fake_mode, tracing
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.nn.attention.flex_attention import create_mask
from torch.utils import _pytree as pytree

from seqsplit.ops.flex import FlexAttention
from seqsplit.passes.analysis.bands import Affine, Bands, Bias
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.graph.structure import structure_of
from seqsplit.passes.trials.double import double_graph

__all__ = ["Flex", "find_flex"]

_LIKE = {
    torch.ops.aten.new_ones.default: torch.ops.aten.ones.default,
    torch.ops.aten.new_zeros.default: torch.ops.aten.zeros.default,
}
_LENGTH = 300  # some blocks, the last one cut
_QUERY, _KEY = 2, 3  # the places' dims, as they are told apart in what is known of a mask


@dataclass(frozen=True, eq=False)
class Flex:
    """A call of the op.

    Attributes:
        functions: graphs of the score and of the mask, with what each takes besides places.
        places: where query, key and value are among the operands.
        dim: the sequence's dim in these and in the output.
        counts_from_last: whether places are counted from the last query.
    """

    functions: tuple[tuple[fx.GraphModule, tuple[Any, ...]], ...]
    places: dict[str, int]
    dim: int = 2
    counts_from_last: bool = False

    def sees(self, facts: Facts, bands: Bands) -> tuple[list[Any], int]:
        """What is known of the keys that a query sees, and the dim that stands for keys.

        The mask hides some; the function of the scores may hide others, with -inf: in rows that
        the mask leaves without an ordinary score, anything finite would count.
        """
        (score, of_score), (mask, of_mask) = self.functions
        known = [_known(facts, bands, mask, 0, of_mask)]
        of_scores = _known(facts, bands, score, 1, of_score)
        if isinstance(of_scores, Bias) and of_scores.fill == -math.inf:
            known.append(of_scores)
        return known, _KEY


def find_flex(lowered: Lowered) -> None:
    """Give every call of the op a target that a chunk can call (in place)."""
    changed = False
    for node in list(lowered.graph.nodes):
        call = getattr(node.target, "template", None) if node.op == "call_function" else None
        if call is None or call[0] is not torch.ops.higher_order.flex_attention:
            continue
        changed |= _replace(lowered, node, *call[1:])
    if changed:
        lowered.graph.eliminate_dead_code(
            is_impure_node=lambda node: node.op in ("placeholder", "output")
        )
        lowered.graph.lint()


def _replace(
    lowered: Lowered, node: fx.Node, moving: list[bool], fixed: list, structure: Any
) -> bool:
    given, constant = iter(node.args), iter(fixed)
    leaves = [next(given) if moves else next(constant) for moves in moving]
    args, _ = pytree.tree_unflatten(leaves, structure)
    query, key, value, score, blocks, scale, options, of_score, of_mask = args
    mask = blocks[-1]
    if not isinstance(scale, float) or not _blocks_say_no_more(lowered, args):
        return False
    mask_dims = tuple(size != 1 for size in lowered.shape(blocks[2])[:2])
    call = FlexAttention(score, mask, len(of_score), mask_dims, blocks[-3:-1], scale, options)
    flex = Flex(((score, of_score), (mask, of_mask)), {"query": 0, "key": 1, "value": 2})
    node.target = _as_target(flex, call, (structure_of(score), structure_of(mask), scale))
    node.args, node.kwargs = (query, key, value, *of_score, *of_mask), {}
    return True


def _as_target(flex: Flex, call: FlexAttention, fingerprint: Any) -> Callable:
    doubles = [fx.GraphModule(m, double_graph(m.graph)) for m in (call.score, call.mask)]
    double = call.checked_by(*doubles)

    def flex_attention(*operands: Any) -> tuple[Tensor, ...]:
        return call(0, 0, *operands)

    def flex_attention_in_double(*operands: Any) -> tuple[Tensor, ...]:
        return rows_in_double(0, 0, 0, *operands)

    def flex_attention_rows(start: int, first: int, end: int, *operands: Any) -> tuple[Tensor, ...]:
        return call(start, first, *operands)

    def rows_in_double(start: int, first: int, end: int, *operands: Any) -> tuple[Tensor, ...]:
        with tracing(None):  # the op's own autograd traces, and must not find the capture's mode
            return double(start, first, *operands)

    flex_attention.__module__ = flex_attention_rows.__module__ = __name__
    flex_attention.attends, flex_attention.rows = flex, flex_attention_rows
    flex_attention.in_double = flex_attention_in_double
    flex_attention_rows.in_double = rows_in_double
    flex_attention.fingerprint = fingerprint
    return flex_attention


# -- which keys ------------------------------------------------------------------------------------


class _OfPlaces(Bands):
    """Reads the graph of a function of places, of whose inputs something is known."""

    def __init__(self, facts: Facts, known: dict[fx.Node, Any]) -> None:
        super().__init__(facts)
        self._known |= known


def _known(
    facts: Facts, bands: Bands, function: fx.GraphModule, num_scores: int, buffers: Sequence
) -> Any:
    """What is known of a function's value; ``num_scores`` scalars come before the places."""
    graph = _traced(function, num_scores, buffers)
    if graph is None:
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder"][num_scores:]
    known = {inputs[_QUERY]: Affine(((_QUERY, 1.0),)), inputs[_KEY]: Affine(((_KEY, 1.0),))}
    known |= {own: bands.of(buffer) for own, buffer in zip(inputs[4:], buffers)}
    (output,) = (node for node in graph.nodes if node.op == "output")
    return _OfPlaces(facts, known).of(output.args[0])


def _traced(function: fx.GraphModule, num_scores: int, buffers: Sequence) -> fx.Graph | None:
    """The function as a graph of ATen ops on scalars."""
    values = fx.node.map_arg(tuple(buffers), lambda node: node.meta["val"])
    mode = detect_fake_mode([value for value in values if isinstance(value, Tensor)])
    tensors = [value for value in values if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    mode = mode or torch._subclasses.FakeTensorMode()
    with mode, enable_python_dispatcher(), TransformGetItemToIndex():
        scalars = [torch.zeros((), device=device) for _ in range(num_scores)]
        places = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(4)]
        try:
            graph = make_fx(function, pre_dispatch=True)(*scalars, *places, *values).graph
        except Exception:  # then nothing is known of it
            return None
    for node in graph.nodes:
        if node.target in _LIKE:  # a constant, of which another tensor lends the device
            node.target, node.args = _LIKE[node.target], node.args[1:]
    return graph


# -- what the blocks say ---------------------------------------------------------------------------


def _blocks_say_no_more(lowered: Lowered, args: Sequence[Any]) -> bool:
    """Whether the blocks let through what the mask's function does, found by execution."""
    query, key, _, _, blocks, *_, of_mask = args
    _, _, partial, partial_at, full, full_at, *_, rows, columns, function = blocks
    lengths = [lowered.shape(node)[2] for node in (query, key)]
    sizes = {s: _LENGTH for length in lengths for s in length.free_symbols}
    if any(length not in sizes for length in lengths):
        return False
    wanted = (partial, partial_at, full, full_at, tuple(of_mask))
    with disable_proxy_modes_tracing():
        try:
            *listed, buffers = _evaluated(lowered, wanted, sizes)
            batch, heads = listed[0].shape[:2]
            with TransformGetItemToIndex():
                seen = create_mask(
                    lambda b, h, q, k: function(b, h, q, k, *buffers), batch, heads,
                    _LENGTH, _LENGTH, listed[0].device,
                )  # fmt: skip
            let_through = _spread(*listed[:2], rows, columns) & seen
            if full is not None:
                let_through = let_through | _spread(*listed[2:], rows, columns)
        except Exception:  # then it is not proved
            return False
    return torch.equal(let_through, seen)


def _spread(count: Tensor, at: Tensor, rows: int, columns: int) -> Tensor:
    """``[B, H, T, T]``: whether a pair is in one of the blocks listed, ``count`` for each row."""
    listed = torch.arange(at.shape[-1], device=at.device) < count.unsqueeze(-1)
    blocks = torch.zeros_like(at).scatter_add(-1, at.long(), listed.to(at.dtype)) > 0
    places = torch.arange(_LENGTH, device=at.device)
    return blocks[:, :, places // rows][..., places // columns]


def _evaluated(lowered: Lowered, wanted: Any, sizes: dict[sympy.Symbol, int]) -> Any:
    """Values of nodes for a short sequence and random inputs."""
    needed = {node for node in pytree.tree_leaves(wanted) if isinstance(node, fx.Node)}
    stack = list(needed)
    while stack:
        fresh = set(stack.pop().all_input_nodes) - needed
        needed |= fresh
        stack.extend(fresh)
    generator, known = torch.Generator().manual_seed(0), {}

    def number(expr: sympy.Expr) -> int:
        return int(expr.xreplace({s: sizes.get(s, 2) for s in expr.free_symbols}))

    for node in lowered.graph.nodes:
        if node not in needed:
            continue
        held = node.meta.get("val")
        if isinstance(held, torch.SymInt):
            known[node] = number(lowered.expr(held))
        elif node.op == "placeholder":
            shape = [number(size) for size in lowered.shape(node)]
            value = torch.randint(0, 3, shape, generator=generator)
            known[node] = value.to(held.device, held.dtype)
        elif node.op == "get_attr":
            known[node] = getattr(lowered.module, node.target)
        else:
            call = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*call[0], **call[1])
    return pytree.tree_map_only(fx.Node, known.__getitem__, wanted)
