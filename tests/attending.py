"""What the tests of single attention mechanisms share: one comparison, positions and scores."""

import math

import torch

from compare import Pair
from zoo import batches, probe

HEADS, HEAD_DIM = 4, 6


def check_probe(attend, *, chunk_sizes=(4,), streamed=True, extras=None, **options):
    """Compare a `Probe` with this attention, on 3 rows of 13 tokens and of other lengths.

    With chunks of 4, 13 leaves a chunk of one token, 4 is one chunk and 3 is less than one.
    `extras` (masks and the like) are made for 13 tokens, so with them there is only that length.
    """
    lengths = (13,) if extras else (13, 4, 3)
    for chunk_size in chunk_sizes:
        pair = Pair(
            lambda: probe.build(attend, **options),
            step=probe.step,
            chunk_size=chunk_size,
            streamed=streamed,
        )
        for length in lengths:
            pair.check(*batches.with_labels(3, length), **(extras or {}))


def positions(scores):
    """Row and column numbers of scores [..., T, T], as [T, 1] and [1, T]."""
    index = torch.arange(scores.shape[-1], device=scores.device)
    return index[:, None], index[None, :]


def scores_of(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
