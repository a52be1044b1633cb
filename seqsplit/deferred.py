"""Deferred values: outputs of the size of logits that are computed when somebody looks.

A model that computes its loss inside usually hands out its logits as well. They are as large as
everything else together, and most training loops never touch them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .errors import StaleLogitsError, format_message

__all__ = ["DeferredTensor"]


class DeferredTensor(Tensor):
    """A tensor that is computed at its first use, then behaves like the result.

    It knows its shape, dtype and device without being computed. Any operation on it, printing and
    indexing included, computes it once and goes on with the ordinary tensor, which is part of the
    autograd graph if gradients are being recorded at that moment.
    """

    _compute: Callable[[], Tensor]
    _versions: list[tuple[Tensor, int]]
    _result: Tensor | None

    @staticmethod
    def __new__(
        cls, like: Tensor, compute: Callable[[], Tensor], depends_on: Sequence[Tensor]
    ) -> DeferredTensor:
        """Defer ``compute``.

        Args:
            like: a tensor (on the meta device, say) with the shape and dtype of the result.
            compute: makes the result.
            depends_on: tensors that must not have changed when it is called.
        """
        self = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            dtype=like.dtype,
            device=depends_on[0].device,
            requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in depends_on),
        )
        self._compute = compute
        self._versions = [(tensor, tensor._version) for tensor in depends_on]
        self._result = None
        return self

    def materialize(self) -> Tensor:
        """The ordinary tensor.

        Raises:
            StaleLogitsError: a weight has changed since the forward (an optimizer step, usually).
        """
        if self._result is None:
            if any(tensor._version != version for tensor, version in self._versions):
                raise StaleLogitsError(
                    format_message(
                        f"deferred values of shape {list(self.shape)} were looked at too late",
                        why="they are computed at first use, and a weight they depend on has "
                        "changed since the forward",
                        fix="use them (or call .detach() on them) before the optimizer steps",
                    )
                )
            self._result = self._compute()
            del self._versions, self._compute
        return self._result

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(
            DeferredTensor, DeferredTensor.materialize, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(
            DeferredTensor, DeferredTensor.materialize, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.materialize().detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.materialize().__deepcopy__(memo)


_METADATA = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.element_size,
    Tensor.__len__,
    Tensor.shape.__get__,
    Tensor.ndim.__get__,
    Tensor.dtype.__get__,
    Tensor.device.__get__,
    Tensor.layout.__get__,
    Tensor.requires_grad.__get__,
    Tensor.is_cuda.__get__,
    Tensor.is_leaf.__get__,
    Tensor.is_sparse.__get__,
    Tensor.is_quantized.__get__,
    Tensor.is_meta.__get__,
}
