"""Calls without gradients: the model runs as it is, but for the logits of long sequences.

Without gradients a layer's activations are gone when it has run; what remains of the size of
everything else are the logits. They come from the model's widest linear map, and are deferred
there. The model's own code, its cache included, runs untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from seqsplit.deferred.evaluate import fits_one_chunk
from seqsplit.deferred.expression import Layout, Operand, Source, Value
from seqsplit.deferred.rowwise import apply
from seqsplit.deferred.tensor import DeferredTensor
from seqsplit.options import Options

__all__ = ["defer_logits"]

_WIDEST = 2**62  # no vocabulary is larger


def defer_logits(
    modules: Iterable[nn.Module], options: Options, inputs: Any
) -> contextlib.AbstractContextManager:
    """A context in which the widest linear map of ``modules`` gives a deferred tensor.

    Args:
        modules: that are going to be called, with nothing wider.
        options: of the compilation; results that fit into one chunk are not deferred.
        inputs: arguments of the call. If they hold too few tokens for two chunks (a step of
            ``generate()``), the context does nothing at all.
    """
    num_tokens = max(
        (
            torch.Size(leaf.shape[:2]).numel()
            for leaf in pytree.tree_leaves(inputs)
            if isinstance(leaf, Tensor)
        ),
        default=0,
    )
    # A step of generation ends here: it is not to pay for a look at all parameters.
    if num_tokens <= options.head_rows(_WIDEST) or torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    # [out, in], or an embedding [V, d] that is tied to the head; [n, 1] is a packed weight
    parameters = (p for m in modules for p in m.parameters())
    width = max((p.shape[0] for p in parameters if p.ndim == 2 and p.shape[1] > 1), default=0)
    if num_tokens <= options.head_rows(width):
        return contextlib.nullcontext()
    return _Deferring(width, options)


class _Deferring(TorchFunctionMode):
    def __init__(self, width: int, options: Options) -> None:
        super().__init__()
        self._width, self._options = width, options

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and not torch.is_grad_enabled():
            made = self._deferred(*args)
            if made is not None:
                return made
        return func(*args, **kwargs)

    def _deferred(self, x: Tensor, weight: Tensor, *bias: Tensor | None) -> DeferredTensor | None:
        if weight.ndim != 2 or weight.shape[0] != self._width or x.ndim < 2 or not x.numel():
            return None
        if type(x) is not Tensor or x.shape[-1] >= self._width:
            return None
        layout = Layout.leading(x.shape[:-1])
        rows = Source(layout.rows_of(x))
        leaves, structure = pytree.tree_flatten(((Operand(rows, layout), weight, *bias), {}))
        found = apply(F.linear, leaves, structure, exact=False)
        if found is None:
            return None
        node = Value(found[0], 0)
        if fits_one_chunk(node, self._options):
            return None
        return DeferredTensor.make(node, layout, self._options, x.shape[-1])
