"""Attention with functions for scores and mask: split, each chunk given its own places.

The op refuses gradients on CPU before it is called; what it calls computes them there too, so
these tests take the refusal away.
"""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from compare import Pair
from seqsplit.ops.flex import FlexAttention
from zoo import batches, hf, probe
from zoo.weights import randomise

# What the eager side says of itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def gradients_on_cpu(monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


@pytest.fixture
def seen(monkeypatch):
    """The (queries, keys) of every call of the dense computation."""
    op = sys.modules["torch._higher_order_ops.flex_attention"]
    calls, dense = [], op._math_attention_inner

    def noted(query, key, *rest, **more):
        calls.append((query.shape[2], key.shape[2]))
        return dense(query, key, *rest, **more)

    monkeypatch.setattr(op, "_math_attention_inner", noted)
    return calls


class Decoder(nn.Module):
    """Two layers with two key heads of four query heads.

    `functions(model, **extras)` gives the functions of the mask and of the scores, or None.
    """

    def __init__(self, functions, mask_differs=False, **options):
        super().__init__()
        self.functions, self.mask_differs, self.options = functions, mask_differs, options
        self.embed = nn.Embedding(batches.VOCAB, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 8 * 5) for _ in range(2))
        self.mix = nn.Linear(20, 20)
        self.head = nn.Linear(20, batches.VOCAB)
        self.slopes = nn.Parameter(torch.rand(4))

    def forward(self, ids, **extras):
        mask, score = self.functions(self, **extras)
        length, batch = ids.shape[1], ids.shape[0] if self.mask_differs else None
        blocks = mask and create_block_mask(mask, batch, None, length, length, device="cpu")
        x = self.embed(ids)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (8, 5)).split([4, 2, 2], 2)
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            y = flex_attention(
                q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True, **self.options
            )
            x = x + self.mix(y.transpose(1, 2).flatten(2))
        return self.head(x)


def is_causal(b, h, q, k):
    return q >= k


def causal(model):
    return is_causal, None


def window(model):
    return lambda b, h, q, k: (q >= k) & (q - k < 3), None


def softcap(model):
    return is_causal, lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0)


def learned_slopes(model):
    slopes = model.slopes
    return is_causal, lambda score, b, h, q, k: score + slopes[h] * (k - q)


def hidden_scores(model):
    """Without a mask: the function of the scores hides what comes later."""
    return None, lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf"))


def everything(model):
    return None, None


def documents(model, owner):
    return lambda b, h, q, k: (q >= k) & (owner[b, q] == owner[b, k]), None


def owners(length):
    return torch.tensor([0] * 3 + [1] * (length - 5) + [2] * 2).repeat(3, 1)


CASES = {  # functions, options, keys before a query's own, chunk size
    "causal": (causal, {}, 13, 4),
    "window": (window, {"scale": 0.3}, 2, 4),
    "window, other chunks": (window, {}, 2, 5),
    "softcap": (softcap, {}, 13, 4),
    "learned slopes": (learned_slopes, {}, 13, 5),
    "hidden scores": (hidden_scores, {}, 13, 4),
    "everything": (everything, {}, None, 4),
    "documents": (documents, {"mask_differs": True}, 13, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_flex(name, seen):
    functions, options, reach, chunk_size = CASES[name]
    pair = Pair(
        lambda: randomise(Decoder(functions, **options)), step=probe.step, chunk_size=chunk_size
    )
    for length in (13, 9):
        args = batches.with_labels(3, length)
        extras = {"owner": owners(length)} if functions is documents else {}
        pair.check(*args, **extras)
    seen.clear()
    pair.run_mine(*args, **extras).backward()
    ends = [(s, min(s + chunk_size, 9)) for s in range(0, 9, chunk_size)]
    assert set(seen) == {(e - s, 9 if reach is None else e - max(0, s - reach)) for s, e in ends}


def test_compiled_for_a_kernel(monkeypatch):
    """What is called where the op has a kernel, but for the code generation."""
    monkeypatch.setattr(FlexAttention, "backend", "aot_eager")
    monkeypatch.setattr(FlexAttention, "uses_kernel", lambda self, device: not self.dense)
    pair = Pair(lambda: randomise(Decoder(learned_slopes)), step=probe.step, chunk_size=4)
    for length in (13, 9):
        pair.check(*batches.with_labels(3, length))


def test_blocks_that_say_more_than_their_function(seen):
    """A mask given by its blocks alone is not made anew for chunks: the op stays as it is."""

    def sparse(model):
        return None, None

    class Sparse(Decoder):
        def forward(self, ids):
            count = torch.ones(1, 1, 1, dtype=torch.int32)
            blocks = BlockMask.from_kv_blocks(
                count * 0, count[..., None] * 0, BLOCK_SIZE=128, seq_lengths=(ids.shape[1],) * 2
            )
            x = self.embed(ids)
            q, k, v = self.layers[0](x).unflatten(-1, (8, 5)).split([4, 2, 2], 2)
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            y = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
            return self.head(x + self.mix(y.transpose(1, 2).flatten(2)))

    pair = Pair(lambda: randomise(Sparse(sparse)), step=probe.step, chunk_size=4, streamed=False)
    pair.check(*batches.with_labels(3, 13))
    seen.clear()
    pair.run_mine(*batches.with_labels(3, 13)).backward()
    assert set(seen) == {(13, 13)}


def test_a_decoder_of_the_library(seen, monkeypatch):
    """Its own masks, which it makes in its forward."""
    if inspect.unwrap(torch.compile) is not torch.compile:
        # A library that this process has imported wraps it, and Dynamo, which the mask is compiled
        # in, does not know the wrapper: once more, in a process without it.
        test = f"{__file__}::test_a_decoder_of_the_library"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        subprocess.run(command, check=True, cwd=Path(__file__).parent)
        return
    # Compiled, as it calls the op outside of a capture, the op has no kernel for float64.
    monkeypatch.setattr(
        "transformers.integrations.flex_attention.WrappedFlexAttention",
        lambda training: lambda: flex_attention,
    )
    pair = Pair(hf.builder("llama", "flex_attention"), chunk_size=4)
    ids, labels = batches.with_labels(2, 13)
    pair.check(ids, labels=labels)
    seen.clear()
    pair.run_mine(ids, labels=labels).loss.backward()
    assert set(seen) == {(4, 4), (4, 8), (4, 12), (1, 13)}
