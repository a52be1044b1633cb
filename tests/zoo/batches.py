"""Batches of tokens with labels and padding. B, T and the vocabulary are small and unequal."""

import torch

VOCAB = 61


def tokens(batch, length, vocab=VOCAB, seed=0):
    """Random token ids, int64 [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (batch, length), generator=generator)


def with_labels(batch, length, vocab=VOCAB, seed=0):
    """(ids, labels): labels equal the ids with a few positions ignored."""
    ids = tokens(batch, length, vocab, seed)
    labels = ids.clone()
    labels[:, 3::5] = -100
    return ids, labels


def padded(side, batch=3, length=13, vocab=VOCAB, seed=0):
    """(ids, keep, labels) for side "left", "right" or "none"; rows are padded unequally.

    keep: int64 [batch, length], 0 at pads, where labels are -100 too. Row 0 is full.
    """
    ids, labels = with_labels(batch, length, vocab, seed)
    keep = torch.ones_like(ids)
    for row in range(batch if side != "none" else 0):
        pads = min(2 * row, length - 1)
        where = slice(0, pads) if side == "left" else slice(length - pads, length)
        keep[row, where] = 0
    ids[keep == 0] = 0
    labels[keep == 0] = -100
    return ids, keep, labels
