"""Functionalize: writes into tensors become new values.

An in-place op on a view is its out-of-place twin, whose result is put back into what the view was
taken of, and so on up to the tensor that owns the memory. Whatever is used after the write then
refers to the new values: other views of the same memory are taken again. A write into an input (a
buffer that counts calls) becomes one more result of the graph, for the caller to copy back. Giving
an input other memory (``weight.data = other``) writes nothing: from there on, and after the call,
its name stands for the other tensor. A write through a detached name (``weight.data.clamp_()``)
gives a tensor other values, and leaves where its gradient goes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from seqsplit.errors import CaptureError
from seqsplit.ir.plan import Write
from seqsplit.ops.weights import with_values

__all__ = ["functionalize"]

aten = torch.ops.aten


def functionalize(graph: fx.Graph) -> list[Write]:
    """Rewrite all writes, in place.

    Returns:
        Which inputs are written to. Their new values are the last outputs.

    Raises:
        CaptureError: a write whose effect on other names of the memory cannot be told.
    """
    written: list[fx.Node] = []
    rebound: set[fx.Node] = set()
    (output,) = (node for node in graph.nodes if node.op == "output")

    def give_back(name: fx.Node, value: fx.Node) -> None:
        # At once: like every later use, it is then of what later writes make of the value.
        output.args = ((*output.args[0], value),)
        written.append(name)

    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if _is_view(twin := _functional_twin(node.target)):
            _reshape(graph, node, twin)
        elif node.target is aten.set_.source_Tensor:
            name, other = node.args
            if name.op != "placeholder" or name in written:
                raise CaptureError("a value inside the graph is given other memory")
            give_back(name, _rebind(graph, node, other))
            rebound.add(name)
        elif node.target._schema.is_mutable:
            base, value = _Rewriting(graph, node).rewrite()
            if base.op == "placeholder":
                give_back(base, value)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [Write(inputs.index(node), node in rebound) for node in written]


def _rebind(graph: fx.Graph, node: fx.Node, other: fx.Node) -> fx.Node:
    """From here on, the name of an input stands for another tensor."""
    for user in list(node.args[0].users):
        if node < user:
            user.replace_input_with(node.args[0], other)
    node.replace_all_uses_with(other)
    graph.erase_node(node)
    return other


def _is_view(twin: torch._ops.OpOverload | None) -> bool:
    return twin is not None and twin._schema.returns[0].alias_info is not None


def _reshape(graph: fx.Graph, node: fx.Node, twin: torch._ops.OpOverload) -> None:
    """An op that changes a tensor's shape in place (``unsqueeze_``) writes nothing: from there on
    the tensor's name stands for a view of it."""
    with graph.inserting_before(node):
        view = graph.call_function(twin, node.args, dict(node.kwargs))
    view.meta = dict(node.meta)
    for user in list(node.args[0].users):
        if node < user:
            user.replace_input_with(node.args[0], view)
    node.replace_all_uses_with(view)
    graph.erase_node(node)


class _Rewriting:
    """One mutable op.

    Args:
        graph: which it is part of.
        node: the op.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph, self._node = graph, node

    def rewrite(self) -> tuple[fx.Node, fx.Node]:
        """Replace the op.

        Returns:
            The tensor that owns the memory, and its new value.
        """
        node = self._node
        twin = _functional_twin(node.target)
        if twin is None or not node.args or not isinstance(node.args[0], fx.Node):
            raise self._refusal("there is no such op that leaves its operand alone")
        chain = [node.args[0]]
        while _alias(chain[-1]):
            if chain[-1].target not in _PUT_BACK:
                raise self._refusal(f"it writes through {chain[-1].target}")
            chain.append(chain[-1].args[0])
        base = chain[-1]
        if any(alias.target is aten.detach.default for alias in chain):
            if self._may_be_saved(base):
                raise self._refusal("it is behind autograd's back, which may keep the old one")
        elif base.op == "placeholder" and base.meta.get("requires_grad"):
            raise self._refusal("it writes into an input that needs a gradient")
        if base.op not in ("placeholder", "call_function"):
            raise self._refusal("it writes into a constant")
        with self._graph.inserting_before(node):
            new = value = self._out_of_place(twin)
            for view in chain[:-1]:
                value = self._put_back(view, value)
            if chain[0] is not base and self._is_written_again(base):
                new = self._again(chain[0], {base: value})  # a view still, of what changes again
            node.replace_all_uses_with(new)
            self._take_views_again(base, value, {chain[0]: new})
        self._graph.erase_node(node)
        return base, value

    def _is_written_again(self, base: fx.Node) -> bool:
        """Whether there is a later write into the same memory, through whatever name."""
        names = [base, self._node]
        for name in names:
            users = [user for user in name.users if user.args and user.args[0] is name]
            if any(self._node < user and _writes(user) for user in users):
                return True
            names += [user for user in users if _alias(user)]
        return False

    def _may_be_saved(self, base: fx.Node) -> bool:
        """Whether the op that gave a tensor, or one before the write, may keep it."""
        names = [base]
        for name in names:
            earlier = [user for user in name.users if user < self._node]
            names += [user for user in earlier if _alias(user)]
            if any(not _alias(user) for user in earlier):
                return True
        return base.op != "placeholder" and base.target is not with_values

    def _take_views_again(
        self, base: fx.Node, value: fx.Node, known: dict[fx.Node, fx.Node]
    ) -> None:
        """Everything later refers to the new value, through views of it."""
        again = {**known, base: value}
        stack = [base]
        while stack:
            alias = stack.pop()
            stack += [
                user
                for user in alias.users
                if user < self._node and user.args[0] is alias and _alias(user)
            ]
            later = [user for user in alias.users if self._node < user]
            if later:
                new = self._again(alias, again)
                for user in later:
                    user.replace_input_with(alias, new)

    def _again(self, alias: fx.Node, again: dict[fx.Node, fx.Node]) -> fx.Node:
        if alias not in again:
            if _alias(alias) == "maybe":
                raise self._refusal(f"{alias.target} may or may not be a view of what it changes")
            source = self._again(alias.args[0], again)
            new = self._graph.node_copy(alias, lambda n: source if n is alias.args[0] else n)
            again[alias] = new
        return again[alias]

    def _out_of_place(self, twin: torch._ops.OpOverload) -> fx.Node:
        node = self._node
        written = node.args[0].meta["val"]
        if node.target is aten.copy_.default:
            new = self._call(aten.to.dtype, node.args[1], written.dtype)
            new = self._call(aten.expand_as.default, new, node.args[0])
            return self._call(aten.clone.default, new)  # with memory of its own
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        new = self._graph.call_function(twin, node.args, dict(node.kwargs))
        new.meta = {**node.meta, "val": twin(*args, **kwargs)}
        if new.meta["val"].dtype != written.dtype:  # what is written takes the dtype of its place
            new = self._call(aten.to.dtype, new, written.dtype)
        return new

    def _put_back(self, view: fx.Node, value: fx.Node) -> fx.Node:
        return _PUT_BACK[view.target](self._call, view, value)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        new = self._graph.call_function(target, args)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        new.meta = {**self._node.meta, "val": target(*values)}
        return new

    def _refusal(self, why: str) -> CaptureError:
        return CaptureError(f"{self._node.target} changes a value in place, and {why}")


_TO_THE_END = 2**63 - 1

Call = Callable[..., fx.Node]


def _back_from_slice(call: Call, view: fx.Node, value: fx.Node) -> fx.Node:
    source, *rest = view.args
    if tuple(rest[1:]) in ((0, _TO_THE_END), (None, None), ()):
        return value  # all of it
    return call(aten.slice_scatter.default, source, value, *rest)


def _back_from_select(call: Call, view: fx.Node, value: fx.Node) -> fx.Node:
    source, *rest = view.args
    return call(aten.select_scatter.default, source, value, *rest)


def _back_from_view(call: Call, view: fx.Node, value: fx.Node) -> fx.Node:
    source = view.args[0]
    sizes = [
        call(aten.sym_size.int, source, dim) if isinstance(size, torch.SymInt) else size
        for dim, size in enumerate(source.meta["val"].shape)
    ]
    return call(aten.view.default, value, sizes)


def _back_from_squeeze(call: Call, view: fx.Node, value: fx.Node) -> fx.Node:
    source, dim = view.args
    one = source.meta["val"].shape[dim] == 1
    return call(aten.unsqueeze.default, value, dim) if one else value


def _back_from_detach(call: Call, view: fx.Node, value: fx.Node) -> fx.Node:
    new = call(with_values, view.args[0], value)
    new.meta["region"] = replace(new.meta["region"], grad=True)
    return new


def _back_from_permute(call: Call, view: fx.Node, value: fx.Node) -> fx.Node:
    dims = [dim % len(view.args[1]) for dim in view.args[1]]
    return call(aten.permute.default, value, [dims.index(dim) for dim in range(len(dims))])


# How a changed view is put back into what it was taken of.
_PUT_BACK: dict[Any, Callable[[Call, fx.Node, fx.Node], fx.Node]] = {
    aten.alias.default: lambda call, view, value: value,
    aten.detach.default: _back_from_detach,
    aten.dropout.default: lambda call, view, value: value,  # of nothing, else it is no view
    aten.permute.default: _back_from_permute,
    aten.select.int: _back_from_select,
    aten.slice.Tensor: _back_from_slice,
    aten.squeeze.dim: _back_from_squeeze,
    aten.t.default: lambda call, view, value: call(aten.t.default, value),
    aten.transpose.int: lambda call, view, value: call(view.target, value, *view.args[1:]),
    aten.unsqueeze.default: lambda call, view, value: call(
        aten.squeeze.dim, value, view.args[1]
    ),
    aten.view.default: _back_from_view,
}  # fmt: skip


_CASTS = {aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten.to.other}
_COPIES_IF_NEEDED = {aten.contiguous.default, aten.flatten.using_ints, aten.reshape.default}


def _alias(node: fx.Node) -> str | None:
    """``"view"`` or ``"maybe"`` for another name of its first operand's memory."""
    if node.target is operator.getitem:
        return _alias(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target is aten.dropout.default:
        _, p, train = node.args
        return None if train and p > 0 else "view"
    if node.target in _CASTS and node.args[0].meta["val"].dtype != node.meta["val"].dtype:
        return None
    if node.target in _COPIES_IF_NEEDED | _CASTS:
        return "maybe"
    if node.target.is_view:
        return "view"
    return "maybe" if torch.Tag.maybe_aliasing_or_mutating in node.target.tags else None


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _functional_twin(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    if op is aten.transpose_.default:
        return aten.transpose.int
    name = op._schema.name.split("::")[1]
    if not name.endswith("_") or op.namespace != "aten":
        return None
    packet = getattr(aten, name[:-1], None)
    if packet is None or op._overloadname not in packet.overloads():
        return None
    return getattr(packet, op._overloadname)
