"""Values that are longer than the sequence for a while: a row before it, and cut off again."""

import pytest
import torch
import torch.nn.functional as F

from attending import check_probe


def decays(q, k, v):
    """Weights fall by a gate per token, summed up over the stretch between key and query."""
    gates = F.logsigmoid(q[..., :1])
    before = torch.zeros(*gates.shape[:2], 1, 1, dtype=q.dtype)
    sums = torch.cat([before, gates.cumsum(-2)], dim=-2).repeat(1, 1, 1, q.shape[2] + 1)
    stretches = (sums - sums.transpose(-2, -1))[:, :, 1:, 1:]
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return ((q @ k.mT) * torch.where(seen, stretches, float("-inf")).exp()) @ v


def constant_sums(q, k, v):
    """The sums are made without gradients, and cut off with them."""
    with torch.no_grad():
        before = torch.zeros_like(q[:, :, :1])
        sums = 2 * torch.cat([before, q.cumsum(2)], dim=2)
    return (k + sums[:, :, 1:] * q).tanh() * v


@pytest.mark.parametrize("attend", [decays, constant_sums])
def test_a_row_before_the_sequence(attend):
    check_probe(attend, streamed=attend is decays)
