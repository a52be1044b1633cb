"""Attention whose scores and mask are functions of places, for a chunk of queries.

The functions are the model's own; a chunk counts its queries and keys from its own first ones, so
they are given the places shifted. Where the op has a kernel (on CUDA) it is compiled for it, as it
has to be; elsewhere it is computed densely, chunk by keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

__all__ = ["FlexAttention"]

_LARGEST_BLOCK = 128
_MAX_CAPTURES = 64


class FlexAttention:
    """One call of the op, with what it is given besides tensors.

    Attributes:
        backend: what compiles the op for its kernel.
        dense: never to use it.

    Args:
        score: ``score(score, b, h, q, k, *buffers)``, scalars all.
        mask: ``mask(b, h, q, k, *buffers)``, whether a query sees a key.
        num_score_buffers: how many of the buffers are the first one's; the rest are the mask's.
        mask_dims: whether the mask differs between sequences, and between heads.
        blocks: rows and columns of a mask's blocks.
        scale: of the products.
        options: for the kernel.
        dense: never to use a kernel.
    """

    backend = "inductor"

    def __init__(
        self,
        score: Callable,
        mask: Callable,
        num_score_buffers: int,
        mask_dims: tuple[bool, bool],
        blocks: tuple[int, int],
        scale: float,
        options: dict[str, Any],
        dense: bool = False,
    ) -> None:
        self.score, self.mask = score, mask
        self._num_score_buffers, self._mask_dims = num_score_buffers, mask_dims
        self._blocks = tuple(min(block, _LARGEST_BLOCK) for block in blocks)
        self._scale = scale
        # Which blocks are empty differs from chunk to chunk.
        self._options = {**options, "BLOCKS_ARE_CONTIGUOUS": False}
        self.dense = dense
        self._compiled: Callable | None = None

    def checked_by(self, score: Callable, mask: Callable) -> FlexAttention:
        """The same call, computed densely, with other functions in the place of its own."""
        return FlexAttention(
            score, mask, self._num_score_buffers, self._mask_dims, self._blocks, self._scale,
            self._options, dense=True,
        )  # fmt: skip

    def __call__(
        self, start: int, first: int, query: Tensor, key: Tensor, value: Tensor, *buffers: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend.

        Args:
            start: the place of the first query.
            first: the place of the first key.
            query: ``[B, H, c, E]``.
            key, value: ``[B, G, s, E]``; ``G`` divides ``H``.
            buffers: what the functions take besides places.

        Returns:
            The output ``[B, H, c, E]``, the log-sum-exp and the largest score ``[B, H, c]``.
        """
        places = [torch.tensor(x, dtype=torch.int32, device=query.device) for x in (start, first)]
        of_score = (*places, *buffers[: self._num_score_buffers])
        of_mask = (*places, *buffers[self._num_score_buffers :])
        blocks = self._block_mask(query, key, of_mask)
        call = self._by_kernel if self.uses_kernel(query.device) else self._densely
        return call(query, key, value, blocks, of_score, of_mask)

    def uses_kernel(self, device: torch.device) -> bool:
        """Whether the op is compiled; on CPU its kernel has no backward."""
        return not self.dense and device.type != "cpu"

    def _block_mask(self, query: Tensor, key: Tensor, buffers: tuple) -> tuple:
        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self._shifted_mask(b, h, q, k, *buffers)

        batch, heads = (
            size if differs else None for size, differs in zip(query.shape, self._mask_dims)
        )
        with torch.no_grad():
            made = create_block_mask(
                mask, batch, heads, query.shape[2], key.shape[2], query.device, self._blocks
            )
        return made.as_tuple()[:-1]  # without the function

    def _densely(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: tuple, of_score: tuple,
        of_mask: tuple,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        # Buffers that the functions closed over would get no gradient here.
        return torch.ops.higher_order.flex_attention(
            query, key, value, self._shifted_score, (*blocks, self._shifted_mask), self._scale,
            self._options, of_score, of_mask,
        )  # fmt: skip

    def _by_kernel(self, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        if self._compiled is None:
            self._compiled = torch.compile(
                self._captured, dynamic=True, fullgraph=True, backend=self.backend
            )
        for tensor in operands[:3]:  # kernels are made for a number of heads and their width
            torch._dynamo.mark_static(tensor, -3)
            torch._dynamo.mark_static(tensor, -1)
        # Sizes of one are captures of their own.
        with torch._dynamo.config.patch(recompile_limit=_MAX_CAPTURES):
            return self._compiled(*operands)

    def _captured(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: tuple, of_score: tuple,
        of_mask: tuple,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """What is compiled: there the functions have to close over their buffers."""

        def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self._shifted_score(score, b, h, q, k, *of_score)

        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self._shifted_mask(b, h, q, k, *of_mask)

        return torch.ops.higher_order.flex_attention(
            query, key, value, score, (*blocks, mask), self._scale, self._options
        )

    def _shifted_score(
        self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor,
        start: Tensor, first: Tensor, *buffers: Any,
    ) -> Tensor:  # fmt: skip
        return self.score(score, b, h, q + start, k + first, *buffers)

    def _shifted_mask(
        self, b: Tensor, h: Tensor, q: Tensor, k: Tensor,
        start: Tensor, first: Tensor, *buffers: Any,
    ) -> Tensor:  # fmt: skip
        return self.mask(b, h, q + start, k + first, *buffers)
