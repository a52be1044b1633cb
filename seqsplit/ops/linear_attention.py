"""Linear attention with a decay: ``y[t] = sum over s <= t of decayed (q[t] . k[s]) v[s]``.

State-space layers with one decay per head come down to it. What earlier rows leave behind is a
matrix per head, so that rows are computed in blocks, and from block to block the matrix follows
:mod:`.linear_scan`. It exists twice: for the whole sequence, and for the rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from seqsplit.ops.caches import Carry, handed_on, received
from seqsplit.ops.linear_scan import linear_scan

__all__ = ["linear_attention", "linear_attention_rows"]

_BLOCK = 64  # positions that are compared with each other


def linear_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """All rows: ``y[t] = sum over s <= t of d[s, t] (q[t] . k[s]) v[s]`` where ``log d[s, t]`` is
    ``log_decay[s + 1] + ... + log_decay[t]``.

    Args:
        q: ``[B, T, H, N]``.
        k: ``[B, T, H, N]``.
        v: ``[B, T, H, P]``.
        log_decay: ``[B, T, H]``.

    Returns:
        ``[B, T, H, P]``.
    """
    if not isinstance(v.shape[1], int):  # a symbol, of a tensor without data
        return torch.empty_like(v)

    def states(gates: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        after = linear_scan(gates, added, 1)
        return torch.zeros_like(added[:, :1]), after

    return _rows(q, k, v, log_decay, states)


def linear_attention_rows(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, carry: Carry, dim: int, start: int
) -> Tensor:
    """Rows of :func:`linear_attention` for the chunk that begins at ``start``; ``dim`` is 1."""
    dtype, wide = v.dtype, torch.promote_types(v.dtype, carry.accumulate_dtype)
    if v.shape[dim] == 0:
        return v
    q, k, v, log_decay = (x.to(wide) for x in (q, k, v, log_decay))

    def states(gates: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.zeros_like(added[:, :1])
        if start > 0:
            anchor = next((x for x in (added, gates) if x.requires_grad), added)
            before = received(anchor, carry, start, before)
            first = added[:, :1] + gates[:, :1] * before
            added = torch.cat([first, added[:, 1:]], 1)
        return before, handed_on(linear_scan(gates, added, 1), carry, 1)

    return _rows(q, k, v, log_decay, states).to(dtype)


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    states: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Block by block, ``states`` giving the state before the first block and after each."""
    length = v.shape[1]
    block = min(_BLOCK, length)
    q, k, v = (_in_blocks(x, block) for x in (q, k, v))
    decayed = _in_blocks(log_decay, block).cumsum(2)  # from the beginning of the block
    between = decayed[:, :, :, None] - decayed[:, :, None]  # [B, blocks, t, s, H]
    later = torch.ones(block, block, dtype=torch.bool, device=v.device).triu(1)
    weights = between.masked_fill(later[:, :, None], float("-inf")).exp()
    scores = torch.einsum("bcthn,bcshn->bctsh", q, k) * weights
    own = torch.einsum("bctsh,bcshp->bcthp", scores, v)
    left = k * (decayed[:, :, -1:] - decayed).exp()[..., None]
    added = torch.einsum("bcshn,bcshp->bchnp", left, v)
    before, after = states(decayed[:, :, -1].exp()[..., None, None], added)
    before = torch.cat([before, after[:, :-1]], 1)
    others = torch.einsum("bcthn,bchnp->bcthp", q * decayed.exp()[..., None], before)
    return (own + others).flatten(1, 2)[:, :length]


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """``[B, T, ...] -> [B, blocks, block, ...]``, with rows of zeros after the last."""
    return F.pad(x, [0, 0] * (x.dim() - 2) + [0, -x.shape[1] % block]).unflatten(1, (-1, block))
