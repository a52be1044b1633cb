"""Fused attention behind a custom op or an ``autograd.Function``: split like any other."""

import pytest
import torch
from torch import nn

import reference_kernels as kernels
import seqsplit
from compare import Pair, compare
from zoo import batches, probe
from zoo.weights import randomise

CHUNKS = (4, 5)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def dense(**arguments):
    """An attention of the zoo's `Probe` through the kernel."""

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return kernels.attention(q, k, v, **arguments).transpose(1, 2)

    return attend


def check(build, batches, chunk_size, **options):
    """Compare, and give the (queries, keys) that the kernel saw in one step."""
    pair = Pair(build, step=probe.step, chunk_size=chunk_size, **options)
    for args, kwargs in batches:
        pair.check(*args, **kwargs)
    args, kwargs = batches[0]
    kernels.SEEN.clear()
    pair.run_mine(*args, **kwargs).backward()
    return set(kernels.SEEN)


def bounds(length, chunk_size):
    return [(start, min(start + chunk_size, length)) for start in range(0, length, chunk_size)]


DENSE = {
    "causal": ({"causal": True}, None),
    "window": ({"causal": True, "window_size": (4, 4)}, 5),
    "window by its right end": ({"window_size": (2, 0)}, 3),
    "softcap and scale": ({"causal": True, "softcap": 1.5, "softmax_scale": 0.7}, None),
    "slopes": ({"causal": True, "alibi_slopes": SLOPES}, None),
    "slopes and window": ({"causal": True, "alibi_slopes": SLOPES, "window_size": (3, 0)}, 4),
}


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("name", DENSE)
def test_dense(name, chunk_size):
    arguments, window = DENSE[name]
    inputs = [(batches.with_labels(3, length), {}) for length in (13, 8)]
    seen = check(lambda: probe.build(dense(**arguments)), inputs, chunk_size)
    reach = 13 if window is None else window - 1
    assert seen == {(e - s, e - max(0, s - reach)) for s, e in bounds(13, chunk_size)}


class Grouped(nn.Module):
    """Two layers with fewer key heads than query heads."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(batches.VOCAB, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 8 * 5) for _ in range(2))
        self.mix = nn.Linear(20, 20)
        self.head = nn.Linear(20, batches.VOCAB)

    def attend(self, q, k, v, **extras):
        return kernels.attention(q, k, v, causal=True, alibi_slopes=extras["slopes"])

    def forward(self, ids, **extras):
        x = self.embed(ids)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (8, 5)).split([4, 2, 2], 2)
            y = self.attend(q, k, v, **extras)
            x = x + self.mix(y.flatten(2))
        return self.head(x)


def test_grouped_heads_and_slopes_of_each_sequence():
    slopes = torch.rand(3, 4, dtype=torch.float64)
    inputs = [(batches.with_labels(3, length), {"slopes": slopes}) for length in (13, 8)]
    seen = check(lambda: randomise(Grouped()), inputs, 4)
    assert seen == {(4, 4), (4, 8), (4, 12), (1, 13)}


def test_not_causal():
    """All keys at once: still a chunk of queries at a time."""
    inputs = [(batches.with_labels(3, length), {}) for length in (13, 8)]
    seen = check(lambda: probe.build(dense()), inputs, 4)
    assert seen == {(4, 13), (1, 13)}


@pytest.mark.parametrize("arguments", [{"window_size": (2, 2)}, {"alibi_slopes": SLOPES}])
def test_what_counts_from_the_last_query_and_sees_beyond_a_chunk_runs_whole(arguments):
    inputs = [(batches.with_labels(3, 13), {})]
    seen = check(lambda: probe.build(dense(**arguments)), inputs, 4, streamed=False)
    assert seen == {(13, 13)}


def test_half_precision():
    """The kernel itself is proved in the dtype that it is called in."""
    pair = Pair(lambda: probe.build(dense(causal=True)), step=probe.step, chunk_size=4, dtype=None)
    own = pair.mine.to(torch.bfloat16)
    kernels.SEEN.clear()
    pair.run_mine(*batches.with_labels(3, 13)).backward()
    seen = [queries for queries, _ in kernels.SEEN if queries < 13]
    assert seen and all(p.grad is not None for p in own.parameters())


# -- documents -------------------------------------------------------------------------------------


class Documents(Grouped):
    """The same for documents laid end to end, `[1, T]`."""

    def __init__(self, attend):
        super().__init__()
        self.kernel = attend

    def attend(self, q, k, v, **extras):
        y = self.kernel(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **extras)
        return y.unflatten(0, q.shape[:2])


def starts(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def by_function(**arguments):
    def attend(q, k, v, starts_q, starts_k, longest):
        return kernels.varlen_attention(q, k, v, starts_q, starts_k, longest, longest, **arguments)

    return attend


def by_op(**arguments):
    def attend(q, k, v, starts_q, longest):
        return kernels.packed_attention(q, k, v, starts_q, longest, gqa=True, **arguments)

    return attend


def packed(length, *lengths, twice):
    own = starts(*lengths)
    extras = {"starts_q": own, "longest": max(lengths)}
    if twice:
        extras["starts_k"] = own.clone()
    return batches.with_labels(1, length), extras


DOCUMENTS = {
    "causal": (by_function(causal=True), True, None),
    "window": (by_function(causal=True, window_size=(3, 3)), True, 4),
    "slopes, softcap": (by_function(causal=True, alibi_slopes=SLOPES, softcap=2.0), True, None),
    "op": (by_op(window_size=(-1, 0)), False, None),
    "op with a window": (by_op(window_size=(2, 0)), False, 3),
}


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name, chunk_size):
    """Chunks begin and end inside documents, and some hold several."""
    attend, twice, window = DOCUMENTS[name]
    inputs = [packed(13, 5, 2, 6, twice=twice), packed(17, 1, 12, 4, twice=twice)]
    seen = check(lambda: randomise(Documents(attend)), inputs, chunk_size)
    reach = 13 if window is None else window - 1
    assert seen == {(e - s, e - max(0, s - reach)) for s, e in bounds(13, chunk_size)}


def test_documents_that_are_not_causal():
    inputs = [packed(13, 5, 2, 6, twice=False)]
    seen = check(lambda: randomise(Documents(by_op())), inputs, 4)
    assert seen == {(4, 13), (1, 13)}


def test_keys_divided_in_another_way():
    """That both divisions are the same is checked at each call."""

    def build():
        return randomise(Documents(by_function(causal=True)))

    pair = Pair(build, step=probe.step, chunk_size=4, streamed=False)
    (args, extras), (_, others) = packed(13, 5, 2, 6, twice=True), packed(13, 4, 3, 6, twice=True)
    differing = {**extras, "starts_k": others["starts_k"], "longest": 7}
    for given, expected in ((extras, {1, 4}), (differing, {13}), (extras, {1, 4})):
        pair.check(*args, **given)
        kernels.SEEN.clear()
        pair.run_mine(*args, **given).backward()
        assert {queries for queries, _ in kernels.SEEN} == expected


# -- what only looks like it -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aligned_first", "shifted", "blockwise"])
def test_what_only_has_the_signature_runs_whole(name):
    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return getattr(kernels, name)(q, k, v, q.shape[-1] ** -0.5, True).transpose(1, 2)

    pair = compare(
        lambda: probe.build(attend, layers=1),
        *batches.with_labels(3, 13),
        step=probe.step,
        chunk_size=4,
        streamed=False,
    )
    report = seqsplit.explain(pair.run_mine, *batches.with_labels(3, 13))
    assert any(name in f"{where} {why}" for where, why in report.whole)
