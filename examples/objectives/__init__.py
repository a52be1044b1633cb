"""Training objectives in plain PyTorch: nothing in here knows of seqsplit.

Each takes logits [B, T, V] as a model gives them, and labels [B, T] that are -100 where a token
does not count. Compile the model alone (`seqsplit.compile(model)`) and compute them outside, or
compile a function that holds both: the logits are never there as a whole, and gradients are exact.
"""

from .distill import forward_kl, reverse_kl
from .finetune import label_smoothed, multi_token, supervised, with_z_loss
from .policy import dapo, dr_grpo, grpo, gspo, ppo
from .preference import dpo, hinge, ipo, kto, orpo
from .reward import bradley_terry
from .tokens import entropy, token_log_probs

__all__ = [
    "bradley_terry",
    "dapo",
    "dpo",
    "dr_grpo",
    "entropy",
    "forward_kl",
    "grpo",
    "gspo",
    "hinge",
    "ipo",
    "kto",
    "label_smoothed",
    "multi_token",
    "orpo",
    "ppo",
    "reverse_kl",
    "supervised",
    "token_log_probs",
    "with_z_loss",
]
