"""Preferences: of two answers, stacked as [chosen..., rejected...], the first is better.

`reference_logits` come from a frozen model, or from the same one with its adapter disabled.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .tokens import sequence_log_probs


def gains(logits: Tensor, labels: Tensor, reference_logits: Tensor) -> tuple[Tensor, Tensor]:
    """How much more likely than under the reference: chosen [B / 2], rejected [B / 2]."""
    with torch.no_grad():
        reference, _ = sequence_log_probs(reference_logits, labels)
    values, _ = sequence_log_probs(logits, labels)
    chosen, rejected = (values - reference).chunk(2)
    return chosen, rejected


def dpo(logits: Tensor, labels: Tensor, reference_logits: Tensor, beta: float = 0.1) -> Tensor:
    """Direct preference optimisation."""
    chosen, rejected = gains(logits, labels, reference_logits)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def ipo(logits: Tensor, labels: Tensor, reference_logits: Tensor, beta: float = 0.1) -> Tensor:
    """Identity preference optimisation, on means per token."""
    with torch.no_grad():
        reference, _ = sequence_log_probs(reference_logits, labels)
    values, lengths = sequence_log_probs(logits, labels)
    chosen, rejected = ((values - reference) / lengths).chunk(2)
    return (chosen - rejected - 1 / (2 * beta)).square().mean()


def hinge(logits: Tensor, labels: Tensor, reference_logits: Tensor, beta: float = 0.1) -> Tensor:
    """A margin of one between the two (SLiC)."""
    chosen, rejected = gains(logits, labels, reference_logits)
    return F.relu(1 - beta * (chosen - rejected)).mean()


def kto(logits: Tensor, labels: Tensor, reference_logits: Tensor, beta: float = 0.1) -> Tensor:
    """Kahneman-Tversky optimisation: each answer against the batch's mean gain."""
    chosen, rejected = gains(logits, labels, reference_logits)
    baseline = torch.cat([chosen, rejected]).mean().clamp(min=0).detach()
    good = 1 - torch.sigmoid(beta * (chosen - baseline))
    bad = 1 - torch.sigmoid(beta * (baseline - rejected))
    return torch.cat([good, bad]).mean()


def orpo(logits: Tensor, labels: Tensor, weight: float = 0.1) -> Tensor:
    """Odds-ratio preference optimisation: no reference, and the likelihood of the chosen one."""
    values, lengths = sequence_log_probs(logits, labels)
    chosen, rejected = (values / lengths).chunk(2)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen.mean() - weight * F.logsigmoid(odds).mean()
