"""Gradients, loss and outputs equal eager's in float64, for every decoder, chunk and padding.

One compiled model serves several lengths: with chunks of 7 the length 17 is not a multiple, 7 is
one chunk exactly, and 5 is shorter than a chunk.
"""

import pytest

from compare import Pair, every_output
from zoo import HANDWRITTEN, batches, hf

LENGTHS = {1: [13], 2: [13], 7: [17, 7, 5]}
SIDES = ["left", "right", "none"]
every_hf = pytest.mark.parametrize("family, attention", hf.COMBINATIONS)
every_handwritten = pytest.mark.parametrize("name", HANDWRITTEN)
every_chunk = pytest.mark.parametrize("chunk_size", LENGTHS)


@every_hf
@pytest.mark.parametrize("chunk_size", [1, 7])
def test_hf_unpadded(family, attention, chunk_size):
    pair = Pair(hf.builder(family, attention), chunk_size=chunk_size)
    for length in LENGTHS[chunk_size]:
        ids, labels = batches.with_labels(3, length)
        pair.check(input_ids=ids, labels=labels)


@every_hf
@pytest.mark.parametrize("chunk_size", [2, 7])
def test_hf_padded(family, attention, chunk_size):
    pair = Pair(hf.builder(family, attention), chunk_size=chunk_size)
    for length in LENGTHS[chunk_size]:
        for side in SIDES:
            ids, keep, labels = batches.padded(side, length=length)
            pair.check(input_ids=ids, attention_mask=keep, labels=labels)


@every_handwritten
@every_chunk
def test_handwritten_unpadded(name, chunk_size):
    entry = HANDWRITTEN[name]
    pair = Pair(entry.build, step=entry.step, chunk_size=chunk_size)
    for length in LENGTHS[chunk_size]:
        pair.check(*batches.with_labels(3, length))


@pytest.mark.parametrize("name", [n for n, entry in HANDWRITTEN.items() if entry.padding])
@pytest.mark.parametrize("chunk_size", [2, 7])
def test_handwritten_padded(name, chunk_size):
    entry = HANDWRITTEN[name]
    pair = Pair(entry.build, step=entry.step, chunk_size=chunk_size)
    for length in LENGTHS[chunk_size]:
        for side in SIDES:
            ids, keep, labels = batches.padded(side, length=length)
            pair.check(ids, labels, keep)


@pytest.mark.parametrize("batch, length", [(1, 13), (3, 1), (1, 1)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hf_smallest_sizes(family, batch, length):
    """A batch or a length of 1, where a capture with symbolic sizes specialises."""
    pair = Pair(hf.builder(family), chunk_size=3)
    pair.check(input_ids=batches.tokens(batch, length), objective=every_output)


@pytest.mark.parametrize("batch, length", [(1, 13), (3, 2)])
@every_handwritten
def test_handwritten_smallest_sizes(name, batch, length):
    entry = HANDWRITTEN[name]
    pair = Pair(entry.build, step=entry.step, chunk_size=3)
    ids = batches.tokens(batch, length)
    pair.check(ids, ids)


@pytest.mark.parametrize(
    "name, length",
    [
        ("nano-manual", 20),
        ("sequence-first", 20),
        ("alibi-einsum", 20),
        ("rope-fused", 4),
        ("rope-fused", 6),
        ("rope-fused", 61),
    ],
)
def test_length_equals_another_size(name, length):
    """The length at capture is the number of heads, a head's size, the width, the vocabulary."""
    entry = HANDWRITTEN[name]
    pair = Pair(entry.build, step=entry.step, chunk_size=5)
    pair.check(*batches.with_labels(3, length))
    pair.check(*batches.with_labels(3, 13))


@pytest.mark.parametrize("name", ["nano-manual", "rope-fused", "alibi-einsum", "sequence-first"])
def test_batch_equals_length(name):
    """Batch and length share one symbol in the capture; neither may be taken for the other."""
    entry = HANDWRITTEN[name]
    pair = Pair(entry.build, step=entry.step, chunk_size=2)
    pair.check(*batches.with_labels(5, 5))
    pair.check(*batches.with_labels(3, 13))
    pair.check(*batches.with_labels(13, 3))


@pytest.mark.parametrize("options", [{}, {"head_chunk_size": 2}, {"segment_layers": 2}])
@pytest.mark.parametrize("name", ["nano-fused", "rope-manual"])
def test_options_change_no_value(name, options):
    """`chunk_size="auto"`, a head chunk of its own, several layers in one segment."""
    entry = HANDWRITTEN[name]
    pair = Pair(lambda: entry.build(layers=3), step=entry.step, **options)
    pair.check(*batches.with_labels(3, 13), explain=True)
