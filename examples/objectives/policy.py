"""Policy gradients: sampled answers with advantages [B], and their old log-probabilities."""

import torch
from torch import Tensor

from .tokens import token_log_probs


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The pessimistic one of the plain and the clipped gain, as a loss."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def grpo(
    logits: Tensor,
    labels: Tensor,
    old: Tensor,
    reference_logits: Tensor,
    advantages: Tensor,
    *,
    beta: float = 0.04,
    clip: float = 0.2,
    temperature: float = 0.9,
) -> Tensor:
    """Group-relative policy optimisation: the mean over sequences of means over tokens."""
    values, counts = token_log_probs(logits, labels, temperature)
    with torch.no_grad():
        reference, _ = token_log_probs(reference_logits, labels, temperature)
    ratio = (values - old).exp()
    kl = (reference - values).exp() - (reference - values) - 1
    per_token = clipped(ratio, advantages.unsqueeze(-1), clip, clip) + beta * kl
    return ((per_token * counts).sum(-1) / counts.sum(-1)).mean()


def dapo(
    logits: Tensor, labels: Tensor, old: Tensor, advantages: Tensor, low=0.2, high=0.28
) -> Tensor:
    """The mean over all tokens, with a wider clip upwards and no KL."""
    values, counts = token_log_probs(logits, labels)
    per_token = clipped((values - old).exp(), advantages.unsqueeze(-1), low, high)
    return (per_token * counts).sum() / counts.sum()


def dr_grpo(
    logits: Tensor, labels: Tensor, old: Tensor, advantages: Tensor, longest: int = 64
) -> Tensor:
    """A constant divisor, so that short answers are not favoured."""
    values, counts = token_log_probs(logits, labels)
    per_token = clipped((values - old).exp(), advantages.unsqueeze(-1), 0.2, 0.2)
    return (per_token * counts).sum() / (len(labels) * longest)


def gspo(logits: Tensor, labels: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """One importance ratio per sequence."""
    values, counts = token_log_probs(logits, labels)
    ratio = (((values - old) * counts).sum(-1) / counts.sum(-1)).exp()
    return clipped(ratio, advantages, 3e-4, 4e-4).mean()


def ppo(
    logits: Tensor,
    estimates: Tensor,
    labels: Tensor,
    old: Tensor,
    advantages: Tensor,
    returns: Tensor,
    value_weight: float = 0.5,
) -> Tensor:
    """With a value head's estimates [B, T], advantages and returns [B, T - 1]."""
    values, counts = token_log_probs(logits, labels)
    policy = clipped((values - old).exp(), advantages, 0.2, 0.2)
    error = (estimates[:, :-1] - returns).square()
    return ((policy + value_weight * error) * counts).sum() / counts.sum()
