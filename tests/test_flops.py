"""The FLOP counter against hand arithmetic, and seqsplit's FLOPs against checkpointing's."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks import common
from benchmarks.baselines import checkpointed_chunked
from benchmarks.batches import make_batch
from benchmarks.flops import ATTENTION, FlopCounter, attention_flops, causal_pairs
from benchmarks.methods import build
from benchmarks.models import SHAPES
from benchmarks.names import CHECKPOINTED, CHECKPOINTED_FULL, EAGER, OURS
from benchmarks.suite.figures import head_flops, units

aten = torch.ops.aten
SHAPE = SHAPES["tiny"]


@pytest.fixture(scope="module")
def model():
    return common.make_model(SHAPE, torch.float32, "cpu")


def count(method, model, chunk, data):
    """FLOPs of a second step of a method: the first may compile."""
    loss, trained = build(method, model, chunk)
    common.train_step(loss, trained, data)
    with FlopCounter() as counter:
        common.train_step(loss, trained, data)
    return counter


# --- formulas -----------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", range(6))
@pytest.mark.parametrize("keys", range(6))
def test_causal_pairs_are_those_of_the_mask(queries, keys):
    ones = torch.ones(queries, keys)
    assert causal_pairs(queries, keys, "top_left") == ones.tril().sum()
    assert causal_pairs(queries, keys, "bottom_right") == ones.tril(keys - queries).sum()


def test_causal_pairs_refuse_an_unknown_alignment():
    with pytest.raises(ValueError, match='must be "top_left" or "bottom_right"'):
        causal_pairs(2, 2, "centre")


def test_a_chunk_and_its_prefix_add_up_to_the_square():
    rows = [causal_pairs(16, end, "bottom_right") for end in range(16, 65, 16)]
    assert sum(rows) == causal_pairs(64, 64, "top_left") == 64 * 65 // 2


def test_attention_flops_by_hand():
    q, k, v = (2, 8, 10, 16), (2, 4, 10, 16), (2, 4, 10, 32)
    square = 2 * 2 * 8 * 10 * 10  # two per multiply-add, batch, heads, pairs
    options = {"align": "top_left", "causal": False}
    assert attention_flops(q, k, v, backward=False, **options) == square * (16 + 32)
    assert attention_flops(q, k, v, backward=True, **options) == square * (3 * 16 + 2 * 32)
    options["causal"] = True
    assert attention_flops(q, k, v, backward=False, **options) == square * 48 * 55 // 100


def test_a_product_that_is_added_in_place_counts():
    total, left, right = torch.zeros(3, 5), torch.ones(3, 4), torch.ones(4, 5)
    with FlopCounter() as counter:
        total.addmm_(left, right)
    assert counter.linear == counter.total == 2 * 3 * 4 * 5


# --- ops ----------------------------------------------------------------------------------------


def test_a_linear_counts_one_product_forward_and_two_backward():
    linear = torch.nn.Linear(16, 32)
    x = torch.ones(3, 5, 16, requires_grad=True)
    with FlopCounter() as forward:
        y = linear(x)
    with FlopCounter() as backward:
        y.sum().backward()
    assert forward.total == forward.linear == 2 * 15 * 16 * 32
    assert backward.total == backward.linear == 2 * forward.total


def test_products_over_a_batch_are_apart():
    with FlopCounter() as counter:
        torch.ones(4, 2, 3) @ torch.ones(4, 3, 5)
    assert (counter.linear, counter.batched, counter.attention) == (0, 2 * 4 * 2 * 3 * 5, 0)
    assert counter.total == counter.batched


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (16, 64), (64, 16)])
def test_fused_attention_on_cpu_forward_and_backward(queries, keys, causal):
    q = torch.ones(2, 8, queries, 16, requires_grad=True)
    k = torch.ones(2, 2, keys, 16, requires_grad=True)
    pairs = causal_pairs(queries, keys, "top_left") if causal else queries * keys
    with FlopCounter() as forward:
        out = F.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True)
    with FlopCounter() as backward:
        out.sum().backward()
    assert forward.total == forward.attention == 2 * 2 * 8 * pairs * 2 * 16
    assert backward.total == backward.attention == 2 * 2 * 8 * pairs * 5 * 16


def test_a_mask_counts_the_whole_rectangle():
    q = torch.ones(1, 2, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    with FlopCounter() as counter:
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert counter.attention == 2 * 2 * 64 * 2 * 16


def test_fused_attention_of_a_gpu_by_its_shapes():
    """The ops of CUDA, run on the meta device: a causal rectangle aligned as each of them does."""
    q, k = torch.ones(2, 4, 16, 32, device="meta"), torch.ones(2, 4, 64, 32, device="meta")
    work = 2 * 2 * 4 * 2 * 32
    with FlopCounter() as counter:
        aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True)
    assert counter.attention == work * causal_pairs(16, 64, "bottom_right")
    with FlopCounter() as counter:
        aten._scaled_dot_product_efficient_attention(q, k, k, None, True, 0.0, True)
    assert counter.attention == work * causal_pairs(16, 64, "top_left")
    with FlopCounter() as counter:
        aten._scaled_dot_product_flash_attention(q, k, k, 0.0, False)
    assert counter.attention == work * 16 * 64


def test_packed_sequences_count_by_their_own_lengths():
    heads, d = 4, 32
    offsets_q, offsets_k = torch.tensor([0, 3, 10]), torch.tensor([0, 5, 12])
    arguments = {
        "query": torch.ones(10, heads, d),
        "key": torch.ones(12, heads, d),
        "value": torch.ones(12, heads, d),
    }
    pairs = causal_pairs(3, 5, "bottom_right") + causal_pairs(7, 7, "bottom_right")
    flash = arguments | {"cum_seq_q": offsets_q, "cum_seq_k": offsets_k, "is_causal": True}
    assert ATTENTION[aten._flash_attention_forward](flash) == 2 * heads * pairs * 2 * d
    assert ATTENTION[aten._flash_attention_backward](flash) == 2 * heads * pairs * 5 * d
    efficient = arguments | {"cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k}
    efficient["custom_mask_type"] = 1
    pairs = causal_pairs(3, 5, "top_left") + causal_pairs(7, 7, "top_left")
    assert ATTENTION[aten._efficient_attention_forward](efficient) == 2 * heads * pairs * 2 * d
    efficient["custom_mask_type"] = 0
    assert ATTENTION[aten._efficient_attention_forward](efficient) == 2 * heads * 64 * 2 * d


def test_code_that_is_compiled_counts_while_it_runs():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        inputs[0] @ inputs[0]  # the compiler's own work does not count
        return graph.forward

    compiled = torch.compile(lambda x: x @ x, backend=backend)
    with FlopCounter() as counter:
        compiled(torch.ones(8, 8))
    assert len(graphs) == 1
    assert counter.total == 2 * 8**3


# --- whole steps --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "layers", "attention"),
    [
        (lambda model: build(EAGER, model, 64)[0], 3, 3.5),
        (lambda model: build(CHECKPOINTED_FULL, model, 64)[0], 4, 4.5),
        (lambda model: checkpointed_chunked(model, 64, early_stop=False), 4, 4.5),
    ],
)
def test_a_decoder_s_step_is_what_the_units_say(model, make, layers, attention):
    length, batch = 257, 2
    data = make_batch(SHAPE, length, batch)
    with FlopCounter() as counter:
        common.train_step(make(model), model, data)
    forward, attended = units(SHAPE, length, batch)
    head = head_flops(SHAPE, length, batch)
    assert head == 3 * 2 * batch * length * SHAPE.vocab * SHAPE.d
    assert counter.linear + counter.batched == layers * forward + head
    assert counter.attention == attention * attended


def test_early_stop_spares_the_last_matmul_of_each_layer(model):
    data = make_batch(SHAPE, 257)
    full = count(CHECKPOINTED_FULL, model, 64, data)
    stopping = count(CHECKPOINTED, model, 64, data)
    spared = SHAPE.layers * 2 * 257 * SHAPE.ff * SHAPE.d
    assert full.linear - stopping.linear == spared
    assert full.attention == stopping.attention


@pytest.mark.parametrize(("chunk", "batch"), [(64, 1), (100, 2), (2048, 1)])
def test_seqsplit_needs_no_more_than_checkpointing(model, chunk, batch):
    data = make_batch(SHAPE, 1024, batch)
    ours = count(OURS, model, chunk, data)
    reference = count(CHECKPOINTED, model, chunk, data)  # which stops early
    assert ours.linear == reference.linear
    assert ours.attention <= reference.attention
