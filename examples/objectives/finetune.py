"""Supervised fine-tuning and what is added to it."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from .tokens import shifted


def supervised(logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Mean cross entropy of the next tokens.

    num_items: how many tokens count in all micro-batches of a step, to divide by their number.
    """
    reduction = "mean" if num_items is None else "sum"
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = F.cross_entropy(logits, labels, reduction=reduction)
    return loss if num_items is None else loss / num_items


def label_smoothed(logits: Tensor, labels: Tensor, smoothing: float = 0.1) -> Tensor:
    """Cross entropy against targets of which a part is spread over the vocabulary."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], label_smoothing=smoothing)


def with_z_loss(logits: Tensor, labels: Tensor, weight: float = 1e-2) -> Tensor:
    """Cross entropy, and a pull of the normaliser towards one (PaLM)."""
    logits, targets, counts = shifted(logits, labels)
    normaliser = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    per_token = (normaliser - chosen + weight * normaliser.square()) * counts
    return per_token.sum() / counts.sum()


def multi_token(many_logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Each head predicts one token further ahead; the mean over heads."""
    losses = []
    for ahead, logits in enumerate(many_logits, start=1):
        targets = labels[:, ahead:].flatten()
        losses.append(F.cross_entropy(logits[:, :-ahead].flatten(0, 1), targets))
    return sum(losses) / len(losses)
