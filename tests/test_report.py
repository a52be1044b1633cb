"""What `explain` says: nothing whole for ordinary decoders, few bodies, the numbers of the run."""

import pytest
import torch
from torch import nn

import seqsplit
from compare import assert_streamed
from seqsplit.passes.checks import samples
from zoo import HANDWRITTEN, batches, hf, probe

LAYERS, CHUNK, LENGTH = 12, 5, 13
NUM_CHUNKS = 3


def check(report):
    assert_streamed(report)
    assert report.num_chunks == NUM_CHUNKS
    assert 1 <= report.distinct_bodies <= 3, report
    assert report.distinct_bodies <= len(report.segments)
    text = str(report)
    for expected in (f"{NUM_CHUNKS} chunks of {CHUNK}", f"T={LENGTH}", "whole"):
        assert expected in text, text


@pytest.mark.parametrize("family, attention", hf.COMBINATIONS)
def test_twelve_hf_layers_share_bodies(family, attention):
    model = hf.build(family, attention, layers=LAYERS)
    seqsplit.compile(model, chunk_size=CHUNK, segment_layers=1)
    ids, labels = batches.with_labels(3, LENGTH)
    report = seqsplit.explain(model, input_ids=ids, labels=labels)
    check(report)
    assert len(report.segments) >= LAYERS


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_twelve_handwritten_layers_share_bodies(name):
    entry = HANDWRITTEN[name]
    model = entry.build(layers=LAYERS)

    def loss(ids, labels):
        return entry.step(model, ids, labels)

    step = seqsplit.compile(loss, chunk_size=CHUNK, segment_layers=1)
    report = seqsplit.explain(step, *batches.with_labels(3, LENGTH))
    check(report)
    assert len(report.segments) >= LAYERS


@pytest.mark.parametrize("name", ["nano-fused", "rope-manual"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_keeps_it_streamed(name, side):
    entry = HANDWRITTEN[name]
    model = entry.build(layers=3)

    def loss(ids, labels, keep):
        return entry.step(model, ids, labels, keep)

    ids, keep, labels = batches.padded(side, length=LENGTH)
    step = seqsplit.compile(loss, chunk_size=CHUNK)
    check(seqsplit.explain(step, ids, labels, keep))


@pytest.mark.parametrize("length, chunk_size", [(13, 1), (13, 4), (13, 13), (13, 20), (12, 4)])
def test_num_chunks_covers_the_sequence_once(length, chunk_size):
    model = seqsplit.compile(probe.build(), chunk_size=chunk_size)
    report = seqsplit.explain(model, batches.tokens(2, length))
    assert report.num_chunks == -(-length // chunk_size)


def test_a_target_need_not_be_compiled_and_stays_as_it_is():
    model = probe.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = seqsplit.explain(model, batches.tokens(2, LENGTH))
    assert_streamed(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model._compiled_call_impl is None


def test_explaining_does_not_disturb_the_random_state_or_gradients():
    model = seqsplit.compile(probe.build(), chunk_size=CHUNK)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    seqsplit.explain(model, batches.tokens(2, LENGTH))
    assert torch.equal(torch.get_rng_state(), before)
    assert all((parameter.grad == 1).all() for parameter in model.parameters())


class Spectral(nn.Module):
    """Mixes all positions by a Fourier transform: nothing to stream here."""

    def forward(self, x):
        return torch.fft.fft(x, dim=1, norm="ortho").real


class WithSpectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = probe.build(layers=2)
        self.spectral = Spectral()

    def forward(self, ids):
        return self.body.head(self.spectral(self.body.hidden(ids)))


def test_what_stays_whole_is_named_with_a_reason():
    model = seqsplit.compile(WithSpectral(), chunk_size=CHUNK)
    report = seqsplit.explain(model, batches.tokens(2, LENGTH))
    assert not report.fully_streamed
    scopes = [scope for scope, _ in report.whole]
    assert any("spectral" in scope for scope in scopes), report.whole
    assert all(reason for _, reason in report.whole)
    assert all(scope in str(report) for scope in scopes)


class LongOnly(torch.nn.Module):
    """Takes another branch where the sequence is short."""

    def __init__(self, least):
        super().__init__()
        self.inner, self.least = probe.build(), least

    def forward(self, ids):
        logits = self.inner(ids)
        return logits * 2 if ids.shape[1] >= self.least else logits


def test_the_report_says_whether_bodies_were_tried(monkeypatch):
    ids, _ = batches.with_labels(3, 40)
    model = seqsplit.compile(LongOnly(30), chunk_size=8)
    report = seqsplit.explain(model, ids)
    assert not report.unchecked and "checks" not in str(report)
    monkeypatch.setattr(samples, "_LONGEST", 20)
    torch._dynamo.reset()
    report = seqsplit.explain(seqsplit.compile(LongOnly(30), chunk_size=8), ids)
    assert report.unchecked and "checks  not done" in str(report)
