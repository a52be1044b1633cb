"""Tensors kept for the backward outside of autograd's own list of saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Hooks", "Held", "may_release", "own_saved_tensors"]

# How a tensor is put away and brought back, as in ``torch.autograd.graph.saved_tensors_hooks``.
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Held:
    """A tensor that is kept for the backward.

    Args:
        tensor: its value is kept, not its history: what is held by a node of the autograd graph
            must not hold the graph.
        hooks: how to put it away; those on saved tensors that the user has set if ``None``.
    """

    def __init__(self, tensor: Tensor, hooks: Hooks | None = None) -> None:
        tensor = tensor.detach()
        hooks = hooks or torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            self._kept, self._unpack, self._version = tensor, None, tensor._version
        else:
            self._kept, self._unpack = hooks[0](tensor), hooks[1]

    def get(self) -> Tensor:
        """An alias of the tensor: what is done with it must not give the kept one a history.

        Raises:
            RuntimeError: it was written to in the meantime.
        """
        if self._unpack is not None:
            return self._unpack(self._kept)
        if self._kept._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {list(self._kept.shape)} is at version "
                f"{self._kept._version}, expected version {self._version}"
            )
        return self._kept.detach()

    def prefetch(self) -> None:
        """Begin to bring it back, if that takes time."""
        prefetch = getattr(self._kept, "prefetch", None)
        if self._unpack is not None and prefetch is not None:
            prefetch()


def may_release() -> bool:
    """Whether the running backward is the last one through its graph (no ``retain_graph``)."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def own_saved_tensors() -> contextlib.AbstractContextManager:
    """A context in which hooks on saved tensors (offloading, say) do not see what is saved: a
    chunk's graph is differentiated at once, and fake tensors are nothing to hand out."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor
