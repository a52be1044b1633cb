"""Normalise: say a few ops in the terms the rules speak, before placements are sought.

- A mean over the sequence, and a loss with ``reduction="mean"``, become a sum divided by a
  count: the sum can be shared among chunks, the count is taken over the whole sequence.
- An op that takes another tensor only for its shape, dtype or device (``zeros_like``,
  ``expand_as``, ``type_as``, ``new_ones``) takes them as arguments: it does not depend on that
  tensor's values.
- A slice that takes everything is what it was taken of.
- A view becomes a reshape: a chunk of what could be viewed may lie in memory so that it cannot.
  So does taking apart a dim whose size is not fixed, which may be the sequence.
- A squeeze names the dims that it drops: in a chunk of one row the sequence's is of size 1 too.
- What holds nothing is no part of a ``cat`` (a cache before it is filled).
- An op that has two names goes by the usual one; a single row that is repeated is expanded.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.graph.lowered import Lowered, fake_mode_of
from seqsplit.passes.rules.loss import ELEMENTWISE_LOSSES, MEAN, SUM
from seqsplit.passes.rules.registry import arguments_of

__all__ = ["Writer", "drop_whole_slices", "normalize", "normalize_means", "size_of"]

aten = torch.ops.aten

_FILLS = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.empty_like.default: 0,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_empty.default: 0,
    aten.full_like.default: None,
    aten.new_full.default: None,
}


_OTHER_NAMES = {
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "true_divide": "div",
}


_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


class Writer:
    """Adds ops before a node, computing their values' shapes and dtypes."""

    def __init__(self, node: fx.Node) -> None:
        self._node = node
        self._graph = node.graph
        self._mode = fake_mode_of(node.graph)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_before(self._node):
            new = self._graph.call_function(target, args, kwargs)
        new.meta = {
            key: value
            for key, value in self._node.meta.items()
            if key in ("region", "stack_trace", "nn_module_stack")
        }
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode, enable_python_dispatcher():
            new.meta["val"] = target(*values[0], **values[1])
        return new


def normalize(lowered: Lowered) -> None:
    """Cut dependencies on tensors that only lend their shape or dtype (in place)."""
    drop_whole_slices(lowered)
    for node in list(lowered.graph.nodes):
        if node.op != "call_function":
            continue
        node.target = _usual_name(node.target)
        if not node.meta["region"].grad and (same := _itself(node)) is not None:
            _replace(node, same)
        elif node.target in _FILLS:
            _replace(node, _filled(node))
        elif node.target in (aten.expand_as.default, aten.view_as.default, aten.reshape_as.default):
            write = Writer(node)
            sizes = [size_of(write, node.args[1], dim) for dim in range(node.meta["val"].ndim)]
            op = aten.expand if node.target is aten.expand_as.default else aten.reshape
            _replace(node, write(op.default, node.args[0], sizes))
        elif node.target in _SQUEEZES:
            _replace(node, _squeezed(lowered, node))
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target is aten.unflatten.int and _grows(lowered, node):
            write, (source, dim, sizes) = Writer(node), node.args
            dim %= source.meta["val"].ndim
            shape = [size_of(write, source, d) for d in range(source.meta["val"].ndim)]
            shape[dim : dim + 1] = sizes
            _replace(node, write(aten.reshape.default, source, shape))
        elif node.target in (aten.type_as.default, aten.to.other):
            other = node.args[1].meta["val"]
            _replace(node, Writer(node)(aten.to.device, node.args[0], other.device, other.dtype))
        elif node.target is aten.repeat.default and (sizes := _repeats_ones(node, lowered)):
            _replace(node, Writer(node)(aten.expand.default, node.args[0], sizes))
        elif node.target is aten.cat.default and (full := _filled_parts(lowered, node)):
            dim = arguments_of(node)["dim"]
            new = full[0] if len(full) == 1 else Writer(node)(aten.cat.default, full, dim)
            _replace(node, new)
        elif node.target in (aten.eye.default, aten.eye.m):
            _replace(node, _eye(node))
    lowered.graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output")
    )
    lowered.graph.lint()


def drop_whole_slices(lowered: Lowered) -> None:
    """Users of a slice that takes everything get what it was taken of (in place)."""
    for node in list(lowered.graph.nodes):
        if _takes_all(lowered, node) and node.meta["region"].grad:
            _replace(node, node.args[0])


def _grows(lowered: Lowered, node: fx.Node) -> bool:
    return bool(lowered.shape(node.args[0])[node.args[1]].free_symbols)


def _usual_name(target: Any) -> Any:
    """The op under the name that the rules know, the overload being the same."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target
    usual = getattr(aten, _OTHER_NAMES.get(target._schema.name.split("::")[1], ""), None)
    name = "int" if usual is aten.transpose else target._overloadname
    return getattr(usual, name, target) if usual is not None else target


def _squeezed(lowered: Lowered, node: fx.Node) -> fx.Node:
    source, shape, write = node.args[0], lowered.shape(node.args[0]), Writer(node)
    asked = arguments_of(node).get("dim", list(range(len(shape))))
    asked = [asked] if isinstance(asked, int) else asked
    dims = sorted({dim % len(shape) for dim in asked if shape[dim] == 1} if shape else ())
    if len(dims) > 1:
        return write(aten.squeeze.dims, source, dims)
    return write(aten.squeeze.dim, source, *dims) if dims else write(aten.alias.default, source)


def _itself(node: fx.Node) -> fx.Node | None:
    """The operand that a call gives back as it is (a cast to the dtype it has).

    Under ``no_grad`` it matters: the result is no new tensor without a history, but the old one.
    """
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if not operands or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return operands[0] if _draws_nothing(node) else None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with operands[0].meta["val"].fake_mode, enable_python_dispatcher(), torch.no_grad():
        result = node.target(*args, **kwargs)
    return next((operand for operand in operands if operand.meta["val"] is result), None)


def _draws_nothing(node: fx.Node) -> bool:
    """Whether a random op is a dropout that leaves everything."""
    arguments = arguments_of(node)
    return arguments.get("train") is False or arguments.get("p") == 0


def _takes_all(lowered: Lowered, node: fx.Node) -> bool:
    """Whether a node is a slice from the first to the last entry, or of as many last ones."""
    if node.target is not aten.slice.Tensor:
        return False
    arguments = arguments_of(node)
    start, end = arguments["start"], arguments["end"]
    if isinstance(start, fx.Node):
        size = lowered.shape(arguments["self"])[arguments["dim"]]
        start = 0 if lowered.expr(start.meta["val"]) + size == 0 else start
    return (
        start in (0, None)
        and (end is None or (isinstance(end, int) and end == 2**63 - 1))
        and arguments["step"] in (1, None)
    )


def _filled_parts(lowered: Lowered, node: fx.Node) -> list[fx.Node]:
    """The parts of a ``cat`` that hold something, where others do not."""
    parts = arguments_of(node)["tensors"]
    full = [part for part in parts if 0 not in lowered.shape(part)]
    if len(full) == len(parts) or not node.meta["region"].grad:
        return []
    held = node.meta["val"]  # nothing may have had a say in its dtype
    return full if all(part.meta["val"].dtype == held.dtype for part in full) else []


def _repeats_ones(node: fx.Node, lowered: Lowered) -> list[Any]:
    """The sizes to expand to, where all that is repeated are dims of size one."""
    source, repeats = node.args
    shape = lowered.shape(source)
    if len(repeats) != len(shape):
        return []
    if any(size != 1 and repeat != 1 for size, repeat in zip(shape, repeats)):
        return []
    return [repeat if size == 1 else -1 for size, repeat in zip(shape, repeats)]


def _eye(node: fx.Node) -> fx.Node:
    """The unit matrix as a comparison of positions, which can be cut."""
    write, held = Writer(node), node.meta["val"]
    rows, columns = (
        write(aten.arange.default, size, device=held.device)
        for size in (node.args[0], node.args[1] if len(node.args) > 1 else node.args[0])
    )
    same = write(aten.eq.Tensor, write(aten.unsqueeze.default, rows, 1), columns)
    return write(aten.to.dtype, same, held.dtype)


def size_of(write: Writer, source: fx.Node, dim: int) -> int | fx.Node:
    """A size as a number or a node."""
    size = source.meta["val"].shape[dim]
    return size if isinstance(size, int) else write(aten.sym_size.int, source, dim)


def _filled(node: fx.Node) -> fx.Node:
    write = Writer(node)
    arguments = arguments_of(node)
    value = _FILLS[node.target]
    if value is None:
        value = arguments["fill_value"]
    like = node.meta["val"]
    if "size" in arguments:
        sizes = list(arguments["size"])
    else:
        sizes = [size_of(write, node.args[0], dim) for dim in range(like.ndim)]
    return write(aten.full.default, sizes, value, dtype=like.dtype, device=like.device)


def normalize_means(facts: Facts) -> bool:
    """Rewrite means over the sequence as sum / count (in place).

    Returns:
        Whether anything was rewritten (facts then have to be propagated again).
    """
    changed = False
    for node in list(facts.lowered.graph.nodes):
        if node.op != "call_function":
            continue
        new = None
        if node.target in (aten.mean.default, aten.mean.dim):
            new = _mean(facts, node)
        elif node.target is aten.cross_entropy_loss.default or node.target in (
            aten.nll_loss_nd.default,
            aten.nll_loss.default,
        ):
            new = _mean_of_classes(facts, node)
        elif node.target in ELEMENTWISE_LOSSES:
            new = _mean_of_elements(facts, node)
        if new is not None:
            _replace(node, new)
            changed = True
    if changed:
        facts.lowered.graph.lint()
    return changed


def _mean(facts: Facts, node: fx.Node) -> fx.Node | None:
    arguments = arguments_of(node)
    source = arguments["self"]
    dims = arguments.get("dim")
    ndim = source.meta["val"].ndim
    reduced = [dim % ndim for dim in dims] if dims else list(range(ndim))
    if not set(reduced) & set(facts.sequence_dims(source)):
        return None
    write = Writer(node)
    total = write(
        aten.sum.dim_IntList,
        source,
        reduced,
        bool(arguments.get("keepdim")),
        dtype=arguments.get("dtype"),
    )
    return write(aten.div.Tensor, total, _count(write, source, reduced, total.meta["val"].dtype))


def _count(write: Writer, source: fx.Node, dims: list[int], dtype: torch.dtype) -> fx.Node:
    """The number of elements along some dims, as a tensor (its size is only known at run time)."""
    number: int | fx.Node = 1
    for dim in dims:
        size = size_of(write, source, dim)
        if isinstance(number, int) and isinstance(size, int):
            number *= size
        else:
            number = size if number == 1 else write(operator.mul, number, size)
    return write(aten.full.default, [], number, dtype=dtype, device=source.meta["val"].device)


def _mean_of_elements(facts: Facts, node: fx.Node) -> fx.Node | None:
    arguments = arguments_of(node)
    source = arguments["self"]
    if arguments["reduction"] != MEAN or not facts.sequence_dims(source):
        return None
    write = Writer(node)
    total = write(node.target, *{**arguments, "reduction": SUM}.values())
    dims = list(range(source.meta["val"].ndim))
    return write(aten.div.Tensor, total, _count(write, source, dims, node.meta["val"].dtype))


def _mean_of_classes(facts: Facts, node: fx.Node) -> fx.Node | None:
    """``reduction="mean"`` over class indices divides by the (weighted) number of valid labels."""
    arguments = arguments_of(node)
    scores, target, weight = arguments["self"], arguments["target"], arguments["weight"]
    if arguments["reduction"] != MEAN or not facts.sequence_dims(scores):
        return None
    write = Writer(node)
    total = write(node.target, *{**arguments, "reduction": SUM}.values())
    dtype = node.meta["val"].dtype
    if target.meta["val"].is_floating_point():  # class probabilities: by the number of rows
        rows = [dim for dim in range(scores.meta["val"].ndim) if dim != 1]
        return write(aten.div.Tensor, total, _count(write, scores, rows, dtype))
    valid = write(aten.ne.Scalar, target, arguments["ignore_index"])
    if weight is not None:
        classes = write(aten.mul.Tensor, target, valid)  # an ignored label may not be a class
        weights = write(aten.index.Tensor, weight, [classes])
        valid = write(aten.mul.Tensor, weights, valid)
    count = write(aten.sum.default, valid)
    return write(aten.div.Tensor, total, write(aten.to.dtype, count, dtype))


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
