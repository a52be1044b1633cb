"""Distillation: a student's distribution against a teacher's, both over the whole vocabulary."""

import torch.nn.functional as F
from torch import Tensor


def forward_kl(logits: Tensor, teacher_logits: Tensor, temperature: float = 2.0) -> Tensor:
    """KL(teacher || student), the mean over tokens."""
    student = F.log_softmax(logits / temperature, dim=-1).flatten(0, 1)
    teacher = F.log_softmax(teacher_logits.detach() / temperature, dim=-1).flatten(0, 1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean") * temperature**2


def reverse_kl(logits: Tensor, teacher_logits: Tensor, counts: Tensor) -> Tensor:
    """KL(student || teacher), the mean over the tokens that count [B, T]."""
    student = F.log_softmax(logits, dim=-1)
    teacher = F.log_softmax(teacher_logits.detach(), dim=-1)
    per_token = (student.exp() * (student - teacher)).sum(-1)
    return (per_token * counts).sum() / counts.sum()
