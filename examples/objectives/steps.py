"""Each objective as one training step on one kind of batch: what the tests and the table run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from handwritten import Decoder

from . import distill, finetune, policy, preference, reward
from .models import ManyTokens, Scores, WithValues


@dataclass(frozen=True)
class Batch:
    """Two sequences (or one pair) with everything that some objective asks for.

    Attributes:
        ids, labels: int64 [B, T]; the prompts' labels are -100, and so are the pads' at the end.
        lengths: [B].
        old, returns: per next token, [B, T - 1].
        advantages: [B].
    """

    ids: Tensor
    labels: Tensor
    lengths: Tensor
    old: Tensor
    returns: Tensor
    advantages: Tensor

    @property
    def counts(self) -> Tensor:
        return self.labels != -100


def make_batch(
    length: int, vocab: int, batch: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Batch:
    """Random tokens behind prompts of unequal length, the last rows padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (batch, length), generator=generator)
    labels, lengths = ids.clone(), torch.full((batch,), length)
    for row in range(batch):
        lengths[row] -= row * length // 8
        labels[row, : length // 4 + row] = -100
        labels[row, lengths[row] :] = -100
    old = -torch.rand(batch, length - 1, generator=generator, dtype=dtype) * 8
    returns = torch.randn(batch, length - 1, generator=generator, dtype=dtype)
    advantages = torch.randn(batch, generator=generator, dtype=dtype)
    return Batch(ids, labels, lengths, old, returns, advantages)


@dataclass(frozen=True)
class Objective:
    """A step of training.

    Attributes:
        loss: of a model, a frozen reference model and a batch.
        model: the class of the model it trains.
    """

    loss: Callable[[Callable, Callable, Batch], Tensor]
    model: type[nn.Module] = Decoder


def _referred(function: Callable) -> Callable:
    """An objective that compares with what the reference gives without gradients."""

    def loss(model: Callable, reference: Callable, batch: Batch) -> Tensor:
        with torch.no_grad():
            reference_logits = reference(batch.ids)
        return function(model(batch.ids), batch, reference_logits)

    return loss


def _plain(function: Callable) -> Callable:
    def loss(model: Callable, reference: Callable, batch: Batch) -> Tensor:
        return function(model(batch.ids), batch)

    return loss


OBJECTIVES = {
    "SFT": Objective(_plain(lambda x, b: finetune.supervised(x, b.labels))),
    "SFT, tokens counted over micro-batches": Objective(
        _plain(lambda x, b: finetune.supervised(x, b.labels, 2 * b.counts.sum()))
    ),
    "label smoothing": Objective(_plain(lambda x, b: finetune.label_smoothed(x, b.labels))),
    "z-loss": Objective(_plain(lambda x, b: finetune.with_z_loss(x, b.labels))),
    "multi-token prediction": Objective(
        _plain(lambda x, b: finetune.multi_token(x, b.labels)), ManyTokens
    ),
    "DPO": Objective(_referred(lambda x, b, r: preference.dpo(x, b.labels, r))),
    "IPO": Objective(_referred(lambda x, b, r: preference.ipo(x, b.labels, r))),
    "hinge": Objective(_referred(lambda x, b, r: preference.hinge(x, b.labels, r))),
    "KTO": Objective(_referred(lambda x, b, r: preference.kto(x, b.labels, r))),
    "ORPO": Objective(_plain(lambda x, b: preference.orpo(x, b.labels))),
    "GRPO": Objective(_referred(lambda x, b, r: policy.grpo(x, b.labels, b.old, r, b.advantages))),
    "DAPO": Objective(_plain(lambda x, b: policy.dapo(x, b.labels, b.old, b.advantages))),
    "Dr. GRPO": Objective(_plain(lambda x, b: policy.dr_grpo(x, b.labels, b.old, b.advantages))),
    "GSPO": Objective(_plain(lambda x, b: policy.gspo(x, b.labels, b.old, b.advantages))),
    "PPO": Objective(
        _plain(
            lambda xv, b: policy.ppo(*xv, b.labels, b.old, b.advantages.unsqueeze(-1), b.returns)
        ),
        WithValues,
    ),
    "distillation, forward KL": Objective(_referred(lambda x, b, r: distill.forward_kl(x, r))),
    "distillation, reverse KL": Objective(
        _referred(lambda x, b, r: distill.reverse_kl(x, r, b.counts))
    ),
    "reward model": Objective(_plain(lambda x, b: reward.bradley_terry(x, b.lengths)), Scores),
}
