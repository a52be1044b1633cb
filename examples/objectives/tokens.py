"""What objectives are made of: one number per token."""

import torch.nn.functional as F
from torch import Tensor


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, T - 1, V], the tokens [B, T - 1] that follow them, and which of these count."""
    targets = labels[:, 1:]
    counts = targets != -100
    return logits[:, :-1], targets.masked_fill(~counts, 0), counts


def token_log_probs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each next token [B, T - 1], zero where none counts, and which do."""
    logits, targets, counts = shifted(logits, labels)
    logits = logits / temperature
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (chosen - logits.logsumexp(-1)) * counts, counts


def sequence_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of all tokens that count [B], and how many do."""
    values, counts = token_log_probs(logits, labels)
    return values.sum(-1), counts.sum(-1)


def entropy(logits: Tensor) -> Tensor:
    """Of each token's distribution, in nats, [B, T]."""
    values = F.log_softmax(logits, dim=-1)
    return -(values.exp() * values).sum(-1)
