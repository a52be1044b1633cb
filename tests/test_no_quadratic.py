"""Nothing of size T x T or T x V is allocated where only the loss is used.

The sizes are such that everything legitimate (weights, hidden states, one chunk's logits, one
chunk's scores for all heads) is smaller than T*T single bytes, the smallest mask there could be.
"""

import pytest

import seqsplit
from zoo import HANDWRITTEN, batches, hf

BATCH, LENGTH, CHUNK, VOCAB, WIDTH, HEADS = 2, 1024, 15, 2048, 32, 4
SMALLEST_SQUARE_BYTES = LENGTH * LENGTH
LOGITS_BYTES = BATCH * LENGTH * VOCAB * 4

HF_SIZES = {"vocab_size": VOCAB}
LONG = {
    "gpt2": {"n_positions": LENGTH, "n_embd": WIDTH, "n_inner": 64},
    "gpt_neox": {"max_position_embeddings": LENGTH, "hidden_size": WIDTH},
}
DEFAULT_LONG = {"max_position_embeddings": LENGTH, "hidden_size": WIDTH, "intermediate_size": 64}


def largest_bytes(run):
    """The largest allocation of one training step, after one that may capture and validate."""
    run().backward()
    with seqsplit.track_memory() as memory:
        run().backward()
    return memory.largest_bytes


def test_the_sizes_tell_quadratic_from_legitimate():
    weights = VOCAB * WIDTH * 4
    hidden_states = BATCH * LENGTH * WIDTH * 4
    chunk_logits = BATCH * CHUNK * VOCAB * 4
    chunk_scores = BATCH * HEADS * CHUNK * LENGTH * 4
    legitimate = max(weights, hidden_states, chunk_logits, chunk_scores)
    assert 2 * legitimate < SMALLEST_SQUARE_BYTES < LOGITS_BYTES


@pytest.mark.stock
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", hf.SDPA)
def test_hf(family, padded):
    sizes = HF_SIZES | LONG.get(family, DEFAULT_LONG)
    model = hf.build(family, "sdpa", **sizes)
    seqsplit.compile(model, chunk_size=CHUNK, head_chunk_size=CHUNK, strict=True)
    ids, keep, labels = batches.padded("left", batch=BATCH, length=LENGTH, vocab=VOCAB)
    mask = {"attention_mask": keep} if padded else {}
    used = largest_bytes(lambda: model(input_ids=ids, labels=labels, **mask).loss)
    assert used < SMALLEST_SQUARE_BYTES


@pytest.mark.parametrize("name", [n for n, entry in HANDWRITTEN.items() if entry.fused])
def test_handwritten(name):
    entry = HANDWRITTEN[name]
    sizes = {"vocab": VOCAB}
    if name != "parallel":  # it has no positions
        sizes["max_positions"] = LENGTH
    model = entry.build(**sizes)

    def loss(ids, labels):
        return entry.step(model, ids, labels)

    step = seqsplit.compile(loss, chunk_size=CHUNK, head_chunk_size=CHUNK, strict=True)
    ids, labels = batches.with_labels(BATCH, LENGTH, vocab=VOCAB)
    assert largest_bytes(lambda: step(ids, labels)) < SMALLEST_SQUARE_BYTES


@pytest.mark.parametrize("name", ["nano-fused", "rope-fused"])
def test_handwritten_with_a_padding_mask(name):
    """The model's own code builds a T x T mask; it is asked for by rows and prefixes instead."""
    entry = HANDWRITTEN[name]
    model = entry.build(vocab=VOCAB, max_positions=LENGTH)

    def loss(ids, labels, keep):
        return entry.step(model, ids, labels, keep)

    step = seqsplit.compile(loss, chunk_size=CHUNK, head_chunk_size=CHUNK, strict=True)
    ids, keep, labels = batches.padded("right", batch=BATCH, length=LENGTH, vocab=VOCAB)
    assert largest_bytes(lambda: step(ids, labels, keep)) < SMALLEST_SQUARE_BYTES


def test_eager_does_allocate_them():
    """The measure itself: without compiling, both the logits and the mask are seen."""
    entry = HANDWRITTEN["rope-fused"]
    model = entry.build(vocab=VOCAB, max_positions=LENGTH)
    ids, keep, labels = batches.padded("right", batch=BATCH, length=LENGTH, vocab=VOCAB)
    assert largest_bytes(lambda: entry.step(model, ids, labels, keep)) >= LOGITS_BYTES
