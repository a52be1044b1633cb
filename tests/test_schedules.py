"""Every schedule gives the same gradients; each keeps, and computes again, what it says."""

import copy
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqsplit
from benchmarks import common
from benchmarks.batches import make_batch
from benchmarks.floor import floor
from benchmarks.flops import FlopCounter
from benchmarks.models import DecoderShape
from seqsplit import Schedule
from seqsplit.errors import InvalidOptionError
from seqsplit.passes.split.schedule import reverse_chain
from zoo import batches, nano

SHAPE = DecoderShape(d=64, layers=6, heads=4, kv_heads=2, ff=96, vocab=211)
SCHEDULES = {
    "checkpoints": Schedule(),
    "3 forwards": Schedule(forwards=3),
    "5 forwards": Schedule(forwards=5),
    "keys": Schedule(keep_keys=True),
    "attention": Schedule(keep_attention=True),
    "offload": Schedule(offload="cpu"),
    "all": Schedule(forwards=3, keep_keys=True, keep_attention=True, offload="cpu"),
}


@pytest.fixture(scope="module")
def model():
    return common.make_model(SHAPE, torch.float64, "cpu")


@pytest.fixture(scope="module")
def expected(model):
    loss, grads = gradients(model, copy.deepcopy(model))
    return loss, grads


def gradients(model, run, batch=None):
    batch = batch or make_batch(SHAPE, 37, 2)
    run.zero_grad(set_to_none=True)
    loss = run(*batch)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in run.parameters()]


def compiled(model, schedule, **options):
    options = {"chunk_size": 8, "head_chunk_size": 8, "strict": True, **options}
    return seqsplit.compile(copy.deepcopy(model), schedule=schedule, **options)


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one - other).norm() <= 1e-9 * other.norm()


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_the_same_under_every_schedule(model, expected, name):
    mine = compiled(model, SCHEDULES[name])
    assert_same(gradients(model, mine), expected)
    assert_same(gradients(model, mine), expected)  # nothing is left over from a step


@pytest.mark.parametrize("name", ["3 forwards", "all"])
def test_several_layers_per_segment(model, expected, name):
    assert_same(gradients(model, compiled(model, SCHEDULES[name], segment_layers=2)), expected)


class Skipping(nn.Module):
    """Layers joined as in a U-net, with the embedding mixed into each: many values live at once."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.mix = nn.Parameter(torch.linspace(0.1, 0.9, len(inner.layers), dtype=torch.float64))

    def forward(self, ids, labels):
        x, rotary = self.inner.begin(ids)
        first, waiting = x, []
        half = len(self.inner.layers) // 2
        for index, layer in enumerate(self.inner.layers):
            if index >= half:
                x = x + waiting.pop()
            x = layer(x + self.mix[index] * first, rotary)
            if index < half:
                waiting.append(x)
        logits = self.inner.head(self.inner.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("name", ["3 forwards", "offload", "all"])
def test_values_that_skip_many_layers(model, name):
    skipping = Skipping(copy.deepcopy(model))
    expected = gradients(skipping, skipping)
    assert_same(gradients(skipping, compiled(skipping, SCHEDULES[name])), expected)


@pytest.mark.parametrize("name", ["3 forwards", "attention", "keys", "all"])
def test_dropout_is_drawn_once(name):
    ids, labels = batches.with_labels(3, 13)
    batch = ids, torch.where(labels == -100, -1, labels)
    model = nano.build(fused=True, dropout=0.1, layers=4).double()
    runs = []
    for schedule in (Schedule(), SCHEDULES[name]):
        mine = compiled(model, schedule, chunk_size=4)
        torch.manual_seed(3)
        loss = mine(*batch)[1]
        loss.backward()
        runs.append((loss.item(), [p.grad for p in mine.parameters()]))
    assert_same(runs[1], runs[0])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_graph_that_is_kept_is_differentiated_twice(model, expected, name):
    mine = compiled(model, SCHEDULES[name])
    loss = mine(*make_batch(SHAPE, 37, 2))
    loss.backward(retain_graph=True)
    mine.zero_grad(set_to_none=True)
    loss.backward()
    assert_same((loss.item(), [p.grad for p in mine.parameters()]), expected)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_outlives_the_backward(model, name):
    mine = compiled(model, SCHEDULES[name])
    gradients(model, mine)
    batch = make_batch(SHAPE, 37, 2)
    mine.zero_grad(set_to_none=True)
    gc.disable()
    try:
        with seqsplit.track_memory() as memory:
            loss = mine(*batch)
            loss.backward()
            mine.zero_grad(set_to_none=True)
            assert memory.live_bytes <= 64  # the loss
    finally:
        gc.enable()


def test_frozen_layers_and_an_unfinished_backward(model):
    """The lower layers need no gradient: their segments are not run again."""
    frozen = copy.deepcopy(model)
    for parameter in [*frozen.embedding.parameters(), *frozen.layers[:3].parameters()]:
        parameter.requires_grad_(False)
    batch = make_batch(SHAPE, 37, 2)
    frozen(*batch).backward()
    for schedule in (SCHEDULES["3 forwards"], SCHEDULES["all"]):
        mine = compiled(frozen, schedule)
        mine.zero_grad(set_to_none=True)
        mine(*batch).backward()
        for one, other in zip(mine.parameters(), frozen.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                assert (one.grad - other.grad).norm() <= 1e-9 * other.grad.norm()
        loss, (weight,) = mine(*batch), mine.layers[5].mlp.up.parameters()
        (grad,) = torch.autograd.grad(loss, [weight])
        assert (grad - weight.grad).norm() <= 1e-9 * grad.norm()


def test_weights_that_only_a_run_for_others_needs_are_noticed_to_have_changed(model):
    """A gradient of later layers alone: the earlier ones are run again, and have no backward."""
    twin = compiled(model, SCHEDULES["3 forwards"])
    loss = twin(*make_batch(SHAPE, 37, 2))
    weights = [next(layer.mlp.up.parameters()) for layer in twin.layers]
    expected = torch.autograd.grad(loss, weights, retain_graph=True)
    with torch.no_grad():
        weights[0].mul_(2)
    refused = 0
    for weight, grad in zip(weights[2:], expected[2:]):
        try:
            (found,) = torch.autograd.grad(loss, weight, retain_graph=True)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            refused += 1
        else:
            assert (found - grad).norm() <= 1e-9 * grad.norm()
    assert refused


def test_saved_tensor_hooks_of_the_user_are_respected(model, expected):
    put_away = []

    def pack(tensor):
        put_away.append(tensor.numel())
        return tensor.clone()

    mine = compiled(model, Schedule(forwards=3, keep_attention=True))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert_same(gradients(model, mine), expected)
    assert put_away


# --- how often what is computed -------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 5, 36, 64])
@pytest.mark.parametrize("forwards", [2, 3, 4, 5])
def test_equal_layers_need_no_more_than_binomial_checkpointing(layers, forwards):
    """C(c + r - 1, r - 1) >= L states suffice for r forwards of every layer; the first state is
    the chain's input, the last one is used at once."""
    reversal = reverse_chain([1.0] * layers, [1.0] * layers, forwards)
    least = next(c for c in range(1, 99) if math.comb(c + forwards - 1, forwards - 1) >= layers)
    held, cost = replayed(reversal, layers)
    assert cost == reversal.cost <= (forwards - 2) * layers
    assert held <= least or forwards == 2


def replayed(reversal, layers):
    """Walk backward through a chain. Returns how many states were held at once, the chain's input
    among them and the one in use not, and how many forwards were run again."""
    stored, cost, most = {0, *reversal.stored}, 0, 0
    for place in reversed(range(layers)):
        if place not in stored:
            again = reversal.again[place]
            assert again.first in stored and again.first == max(p for p in stored if p < place)
            assert all(again.first < p <= place for p in again.stored)
            cost += place - again.first
            stored |= again.stored
        most = max(most, len(stored - {place}))
        stored.discard(place)
    return most, cost


def test_unequal_layers_store_what_is_small():
    """Storing the small states costs no more forwards than storing the large ones would."""
    costs, sizes = [1.0] * 12, [4.0, 1.0] * 6
    reversal = reverse_chain(costs, sizes, 3)
    odd = sum(place % 2 for place in reversal.stored - {11})
    assert odd == len(reversal.stored - {11}) > 0
    _, cost = replayed(reversal, 12)
    assert cost == reversal.cost <= 12


def test_flops_are_those_that_the_schedule_says(model):
    def flops(schedule):
        mine, batch = compiled(model, schedule), make_batch(SHAPE, 96, 1)
        gradients(model, mine, batch)
        with FlopCounter() as counter:
            gradients(model, mine, batch)
        return counter

    base, attention, keys = (flops(SCHEDULES[n]) for n in ("checkpoints", "attention", "keys"))
    assert attention.linear == base.linear
    # Forward 1, again 1, backward 2.5: without the second forward 3.5 of 4.5.
    assert attention.attention == pytest.approx(base.attention * 3.5 / 4.5, rel=0.01)
    assert keys.attention == base.attention
    assert keys.linear < base.linear
    three = flops(SCHEDULES["3 forwards"])
    reversal = reverse_chain([1.0] * SHAPE.layers, [1.0] * SHAPE.layers, 3)
    layer = 2 * 96 * SHAPE.layer_weights
    assert three.linear - base.linear == reversal.cost * layer


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def growth():
    """Bytes per token of each schedule where layers are what memory goes to."""
    shape = DecoderShape(d=64, layers=10, heads=4, kv_heads=2, ff=96, vocab=64)
    model = common.make_model(shape, torch.float32, "cpu")
    found = {}
    for name, schedule in SCHEDULES.items():
        mine = compiled(model, schedule, chunk_size=64, head_chunk_size=64)
        peaks = []
        for length in (128, 512, 1024):
            batch = make_batch(shape, length, 1)
            mine.zero_grad(set_to_none=True)
            with seqsplit.track_memory() as memory:
                common.train_step(mine, mine, batch)
            peaks.append(memory.peak_bytes)
        found[name] = (peaks[2] - peaks[1]) / 512
    return shape, found


def test_stored_inputs_grow_as_the_floor_says(growth):
    shape, found = growth
    assert found["checkpoints"] <= 1.05 * (floor(shape, torch.float32).total + tables(shape))


def test_fewer_stored_inputs_grow_as_the_arithmetic_says(growth):
    shape, found = growth
    for name, states in (("3 forwards", 4), ("5 forwards", 3)):
        # c stored inputs, the input of the running segment, its K, V, dK, dV, and dx and dy.
        arithmetic = 4 * (states * shape.d + shape.d + 4 * shape.kv + 2 * shape.d)
        assert found[name] <= 1.10 * (arithmetic + tables(shape))


def test_kept_keys_and_attention_grow_by_what_they_are(growth):
    shape, found = growth
    keys = 4 * shape.layers * 2 * shape.kv
    attention = 4 * shape.layers * (shape.d + shape.heads)
    assert found["keys"] - found["checkpoints"] <= 1.10 * keys
    assert found["attention"] - found["checkpoints"] <= 1.10 * attention


def test_offloaded_inputs_leave_one_layer_on_the_device(growth):
    shape, found = growth
    live = 4 * (4 * shape.kv + 3 * shape.d)
    assert found["offload"] <= 1.10 * (live + tables(shape))


def test_all_layers_in_one_segment_keep_nothing_but_keys():
    """Chunk by chunk through all layers: for narrow keys less than the layers' inputs."""
    shape = DecoderShape(d=64, layers=10, heads=8, kv_heads=1, ff=96, vocab=64)
    model = common.make_model(shape, torch.float32, "cpu")
    options = {"chunk_size": 64, "head_chunk_size": 64, "segment_layers": shape.layers}
    mine = compiled(model, Schedule(keep_keys=True), **options)
    double, batch = copy.deepcopy(model).double(), make_batch(shape, 100, 2)
    expected = gradients(double, copy.deepcopy(double), batch)
    assert_same(
        gradients(double, compiled(double, Schedule(keep_keys=True), **options), batch), expected
    )
    report = seqsplit.explain(mine, *batch)
    assert len(report.segments) == 2  # the layers, the head
    peaks = []
    for length in (512, 1024):
        batch = make_batch(shape, length, 1)
        mine.zero_grad(set_to_none=True)
        with seqsplit.track_memory() as memory:
            common.train_step(mine, mine, batch)
        peaks.append(memory.peak_bytes)
    # K, V, dK, dV of all layers, the embeddings and the last hidden states with their gradients.
    arithmetic = 4 * (shape.layers * 4 * shape.kv + 4 * shape.d)
    assert (peaks[1] - peaks[0]) / 512 <= 1.10 * (arithmetic + tables(shape))
    assert arithmetic < floor(shape, torch.float32).total


def tables(shape):
    """Rotary tables (sine and cosine), tokens and labels: there once, whatever the schedule."""
    return 4 * shape.head_dim + 2 * 8


def test_a_schedule_is_checked():
    for wrong in ({"forwards": 1}, {"forwards": 2.5}, {"offload": "disk"}):
        with pytest.raises(InvalidOptionError, match="cannot mean anything"):
            Schedule(**wrong)
    with pytest.raises(InvalidOptionError, match="seqsplit.Schedule"):
        seqsplit.compile(torch.nn.Linear(1, 1), schedule="fast")
