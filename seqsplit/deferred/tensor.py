"""Deferred values: outputs of the size of logits, of which only what is asked for is computed.

A model's logits are as large as everything else together, and hardly anybody wants *them*: a loss
takes one number per token, or one in all. So a compiled model hands out logits that have not been
computed. Calls on them are recorded as long as they treat each token by itself; what has been
recorded is computed, chunk by chunk, when somebody looks at a value of moderate width or sums it
up. A call that mixes tokens, or a look at something wide, computes the whole tensor, as eager
would have, and says so.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqsplit.deferred.evaluate import compute, fits_one_chunk
from seqsplit.deferred.expression import Layout, Node, Source, detached
from seqsplit.errors import MaterializedWarning, format_message
from seqsplit.options import Options

__all__ = ["DeferredTensor", "current", "look"]

_live: weakref.WeakSet[DeferredTensor] = weakref.WeakSet()


@dataclass(frozen=True)
class _Recipe:
    """How a deferred tensor is computed; a write into it gives it another one."""

    node: Node
    layout: Layout
    options: Options

    def rows(self, together: list[Node] | None = None) -> Tensor:
        """The node's rows, computed now if they are not there."""
        if self.node.computed is None:
            nodes = together or [self.node]
            for node, rows in zip(nodes, compute(nodes, self.options)):
                node.keep(rows)
        return self.node.computed

    def values(self) -> Tensor:
        """The tensor without its history, for code that runs below autograd. It is not kept:
        what is kept has to have a history."""
        rows = self.node.computed
        if rows is None:
            with torch.no_grad():
                (rows,) = compute([self.node], self.options)
        return self.layout.arrange(rows.detach())


@dataclass
class _Memory:
    """What tensors that are views of one another have in common.

    Attributes:
        recipe: of the tensor that all are views of.
        members: those that still exist.
    """

    recipe: _Recipe
    members: weakref.WeakSet[DeferredTensor]


class DeferredTensor(Tensor):
    """A tensor of which each token's part can be computed by itself, and has not been yet.

    Shape, dtype and device are known. A call on it gives another deferred tensor if it treats
    tokens one by one (or chooses some of them); any other call computes the tensor first. It is a
    part of the autograd graph like any other.

    Attributes:
        is_wide: whether it is larger than the hidden states that it is computed from.
        is_used: whether others were derived from it whose history leaves its own node out.
    """

    _recipe: _Recipe
    _hidden_width: int
    _result: Tensor | None
    # Those it is a view of, the nearest first, each with what makes this one from it.
    _ancestors: list[tuple[weakref.ref[DeferredTensor], Callable[[Tensor], Tensor]]]
    _is_true_view: bool
    is_used: bool
    _memory: _Memory

    @staticmethod
    def make(node: Node, layout: Layout, options: Options, hidden_width: int) -> DeferredTensor:
        """A deferred tensor for the rows of ``node``.

        Args:
            node: what to compute.
            layout: how the rows lie in it.
            options: of the compilation it comes from.
            hidden_width: elements per token of the hidden states.
        """
        if node.requires_grad and not torch.is_grad_enabled():
            node = detached(node)  # a slice that is taken under no_grad has no history
        recipe = _Recipe(node, layout, options)
        recorded = node.requires_grad
        made = _Recorded.apply(recipe, None, *node.leaves) if recorded else _plain(recipe)
        made._recipe, made._hidden_width = recipe, hidden_width
        made._result, made._ancestors = None, []
        made._is_true_view = made.is_used = False
        made._memory = _Memory(recipe, weakref.WeakSet([made]))
        _live.add(made)
        return made

    def rewrite(self, node: Node) -> None:
        """Have other values from now on; who has used the old ones keeps their history."""
        self._recipe = _Recipe(node, self._layout, self._options)
        if torch.is_grad_enabled() and node.requires_grad:
            _Recorded.apply(self._recipe, self, *node.leaves)
            self.is_used = False

    def own_result(self) -> None:
        """Compute it as a tensor that is nobody else's, and may be written to."""
        with torch.set_grad_enabled(self.materialize().requires_grad):
            self._result = self._result.clone()

    def follow_result(self) -> None:
        """Have the history of the computed tensor, which is no longer that of the recipe."""
        if self._result.requires_grad and self.requires_grad:
            _Following.apply(self, self._result)

    def be_view_of(self, parent: DeferredTensor, again: Callable[[Tensor], Tensor]) -> None:
        """Lie in the memory of another tensor, from which ``again`` makes this one."""
        self._ancestors = [(weakref.ref(parent), again)]
        for ancestor, further in parent._ancestors:
            self._ancestors.append((ancestor, functools.partial(_in_turn, further, again)))
        self._memory = parent._memory
        self._memory.members.add(self)
        if not parent._ancestors:
            self._memory.recipe = parent._recipe

    def whole(self) -> DeferredTensor | None:
        """The tensor in whose memory it lies, made anew if it is gone; ``None`` if that was
        computed, and so cannot be made again."""
        if not self._ancestors:
            return self
        found = self._ancestors[-1][0]()
        if found is None and all(m._result is None for m in self._memory.members):
            recipe = self._memory.recipe
            found = DeferredTensor.make(
                recipe.node, recipe.layout, recipe.options, self._hidden_width
            )
            found._memory = self._memory
            for member in self._memory.members:
                member._ancestors[-1] = weakref.ref(found), member._ancestors[-1][1]
            self._memory.members.add(found)
        return found

    def parent(self) -> tuple[DeferredTensor, Callable[[Tensor], Tensor]] | None:
        """The nearest tensor it is a view of that still exists, and what makes it from that."""
        for ancestor, again in self._ancestors:
            found = ancestor()
            if found is not None:
                return found, again
        return None

    @property
    def _node(self) -> Node:
        return self._recipe.node

    @property
    def _layout(self) -> Layout:
        return self._recipe.layout

    @property
    def _options(self) -> Options:
        return self._recipe.options

    @property
    def is_wide(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self._node.width > self._hidden_width

    def materialize(self) -> Tensor:
        """The ordinary tensor.

        Raises:
            StaleLogitsError: a tensor it depends on (a weight, after an optimizer step) has
                changed since the forward.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self._result is None and self.requires_grad and not self._node.requires_grad:
                # An autograd function gave it away as its own: the gradient is that function's.
                with torch.enable_grad():
                    self._result = _Given.apply(self)
            if self._result is None:
                parent, again = self.parent() or (None, None)
                if parent is not None and parent._result is not None:
                    with torch.set_grad_enabled(self._node.requires_grad):
                        self._result, self._is_true_view = again(parent._result), True
                else:
                    rows = self._recipe.rows(self._together())
                    with torch.set_grad_enabled(rows.requires_grad):
                        self._result = self._layout.arrange(rows)
            return self._result

    def _together(self) -> list[Node]:
        """What is computed along with this value: all that has been recorded over the same rows
        and is narrow enough to be kept."""
        if self._node.width > self._hidden_width:
            return [self._node]
        anchor = _anchor(self._node)
        nodes = {self._node: None}
        for other in list(_live):
            node = other._node
            if other._result is not None or node.computed is not None or node in nodes:
                continue
            narrow = node.width <= other._hidden_width and node.num_rows == self._node.num_rows
            if narrow and _anchor(node).same_rows(anchor):
                nodes[node] = None
        return list(nodes)

    @classmethod
    @torch.compiler.disable  # where a graph break gives one to the rest of a captured function
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                computed = args[0]._result
                return func(args[0] if computed is None else computed, *args[1:], **kwargs)
            from seqsplit.deferred.record import HOOKS, record  # which makes deferred tensors

            recorded = record(func, args, kwargs)
            if recorded is not NotImplemented:
                return recorded
            name = getattr(func, "__name__", str(func))
            computed = functools.partial(look, name=name)
            asked = args[0] if name in HOOKS else None
            args, kwargs = pytree.tree_map_only(DeferredTensor, computed, (args, kwargs))
            if asked is not None:
                asked.follow_result()  # for whoever bypasses the recording, too
        return func(*args, **kwargs)

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(DeferredTensor, _values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.materialize().detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.materialize().__deepcopy__(memo)


def _in_turn(first: Callable, then: Callable, value: Tensor) -> Tensor:
    return then(first(value))


def _plain(recipe: _Recipe) -> DeferredTensor:
    node, shape = recipe.node, recipe.layout.shape(recipe.node.features)
    return Tensor._make_wrapper_subclass(
        DeferredTensor, shape, dtype=node.dtype, device=node.device
    )


class _Recorded(torch.autograd.Function):
    """Ties a deferred tensor to what it is computed from, for whoever looks at its graph and not
    at its values: autograd itself, and functions that bypass the recording."""

    @staticmethod
    def forward(
        ctx: Any, recipe: _Recipe, written: DeferredTensor | None, *leaves: Tensor
    ) -> DeferredTensor:
        ctx.recipe, ctx.leaves = recipe, leaves
        ctx.set_materialize_grads(False)
        if written is None:
            return _plain(recipe)
        ctx.mark_dirty(written)
        return written

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, ...]:
        if cotangent is None:  # it was written to before anyone used it
            return None, None, *(None for _ in ctx.leaves)
        kept = ctx.recipe.node.computed is not None  # others go back through its history, too
        with torch.enable_grad():
            value = ctx.recipe.layout.arrange(ctx.recipe.rows())
        grads = torch.autograd.grad(
            value, ctx.leaves, cotangent, allow_unused=True, retain_graph=kept
        )
        return None, None, *grads


class _Following(torch.autograd.Function):
    """Ties a deferred tensor to its computed one, which was changed."""

    @staticmethod
    def forward(ctx: Any, tensor: DeferredTensor, result: Tensor) -> DeferredTensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[None, Tensor | None]:
        return None, cotangent


class _Given(torch.autograd.Function):
    """The values of a deferred tensor, with the history of the tensor itself."""

    @staticmethod
    def forward(ctx: Any, tensor: DeferredTensor) -> Tensor:
        return tensor._recipe.values()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


def _values(tensor: DeferredTensor) -> Tensor:
    return tensor._recipe.values() if tensor._result is None else tensor._result.detach()


def current(tensor: DeferredTensor) -> Tensor:
    """The computed tensor where there is one: it may have become a leaf, or changed its shape."""
    if tensor._result is None and tensor.requires_grad and not tensor._node.requires_grad:
        return tensor.materialize()
    return tensor if tensor._result is None else tensor._result


def _anchor(node: Node) -> Source:
    """The first source of an expression: the hidden states, whose rows all others follow."""
    while not isinstance(node, Source):
        node = next(iter(node.operation.operands)).node
    return node


def look(tensor: DeferredTensor, name: str) -> Tensor:
    """The ordinary tensor, with a warning if it is large; ``name`` is the function that asks."""
    if (
        tensor._result is None
        and tensor.is_wide
        and not fits_one_chunk(tensor._node, tensor._options)
    ):
        node, shape = tensor._node, list(tensor._layout.shape(tensor._node.features))
        size = node.num_rows * node.width * node.dtype.itemsize / 2**20
        warnings.warn(
            format_message(
                f"{name} computes a deferred tensor of shape {shape} as a whole: {size:.0f} MiB",
                why="it was not found to treat each token by itself",
                fix="write it with ops along the last dim, or use it on the tokens you need only",
            ),
            MaterializedWarning,
            stacklevel=_user_level(),
        )
    return tensor.materialize()


def _user_level() -> int:
    """How far up the stack the first frame outside torch and this package is."""
    frame, level = sys._getframe(1), 1
    own = __name__.rpartition(".")[0].rpartition(".")[0]
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith((own, "torch")):
            return level
        frame, level = frame.f_back, level + 1
    return level


_METADATA = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.element_size,
    Tensor.stride,
    Tensor.__len__,
    Tensor.__hash__,
    *(
        getattr(Tensor, name).__get__
        for name in (
            "_version", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf",
            "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr",
            "is_xla", "is_xpu", "itemsize", "layout",  "nbytes", "ndim", "output_nr",
            "requires_grad", "retains_grad", "shape",
        )
    ),
}  # fmt: skip
