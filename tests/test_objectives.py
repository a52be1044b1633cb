"""Objectives of fine-tuning and reinforcement learning, against eager in float64: with the loss
in the compiled function, and outside of a compiled model."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch

import seqsplit
from compare import relative_error
from seqsplit.errors import MaterializedWarning

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from handwritten import Decoder, DecoderConfig
from objectives.steps import OBJECTIVES, make_batch

LENGTH, CHUNK = 300, 7
SIZES = DecoderConfig(
    vocab_size=61, dim=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=29
)


def models(objective):
    """The same model twice, and a reference twice."""
    torch.manual_seed(0)
    model = objective.model(SIZES).double()
    reference = Decoder(SIZES).double().requires_grad_(False)
    for parameter in (*model.parameters(), *reference.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    return model, copy.deepcopy(model), reference, copy.deepcopy(reference)


def check(objective, mine, expected_model, compiled_loss, expected_loss):
    compiled_loss.backward()
    expected_loss.backward()
    assert type(compiled_loss) is torch.Tensor
    assert relative_error(expected_loss.detach(), compiled_loss.detach()) <= 1e-12
    pairs = zip(expected_model.named_parameters(), mine.parameters())
    errors = {name: relative_error(p.grad, q.grad) for (name, p), q in pairs if p.grad is not None}
    assert max(errors.values()) <= 1e-9, errors


@pytest.mark.parametrize("name", OBJECTIVES)
def test_outside(name):
    """`seqsplit.compile(model)`, and the loss in a loop of one's own."""
    objective = OBJECTIVES[name]
    eager, mine, reference, frozen = models(objective)
    batch = make_batch(LENGTH, SIZES.vocab_size, dtype=torch.float64)
    expected = objective.loss(eager, reference, batch)
    seqsplit.compile(mine, chunk_size=CHUNK, head_chunk_size=CHUNK, strict=True)
    seqsplit.compile(frozen, head_chunk_size=CHUNK)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedWarning)
        loss = objective.loss(mine, frozen, batch)
    check(objective, mine, eager, loss, expected)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_inside(name):
    """The function that computes the loss is compiled, with all that is in it."""
    objective = OBJECTIVES[name]
    eager, mine, reference, frozen = models(objective)
    batch = make_batch(LENGTH, SIZES.vocab_size, dtype=torch.float64)
    expected = objective.loss(eager, reference, batch)

    def loss(ids, labels, lengths, old, returns, advantages):
        inner = type(batch)(ids, labels, lengths, old, returns, advantages)
        return objective.loss(mine, frozen, inner)

    step = seqsplit.compile(loss, chunk_size=CHUNK, head_chunk_size=CHUNK)
    check(objective, mine, eager, step(*vars(batch).values()), expected)
