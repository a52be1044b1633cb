"""Memory of a streamed step grows with the sequence as the floor says, and nothing is square."""

import contextlib

import pytest
import torch

from benchmarks import common
from benchmarks.batches import make_batch
from benchmarks.dry import SkipArithmetic
from benchmarks.floor import floor
from benchmarks.flops import FlopCounter
from benchmarks.methods import build
from benchmarks.models import SHAPES
from benchmarks.names import CHECKPOINTED, CHUNKED, EAGER, OURS
from benchmarks.suite.figures import expected_bytes, longest, slopes
from seqsplit.memory import track_memory

SHAPE = SHAPES["tiny"]
LENGTHS = (1024, 2048, 4096)
CHUNK = 128


def measure(method: str, lengths: tuple[int, ...], batch_size: int = 1) -> list[dict]:
    """A step at each length: its peak, and the largest allocation."""
    model = common.make_model(SHAPE, torch.float32, "cpu")
    loss, trained = build(method, model, CHUNK)
    common.train_step(loss, trained, make_batch(SHAPE, 2 * CHUNK, batch_size))  # compiles
    runs = []
    for length in lengths:
        batch = make_batch(SHAPE, length, batch_size)
        trained.zero_grad(set_to_none=True)
        with track_memory() as memory:
            common.train_step(loss, trained, batch)
        runs.append(
            {
                "length": length,
                "peak_bytes": memory.peak_bytes,
                "largest_bytes": memory.largest_bytes,
                "largest_op": memory.largest_op,
            }
        )
    return runs


@pytest.fixture(scope="module")
def streamed() -> list[dict]:
    return measure(OURS, LENGTHS)


def test_the_floor_by_hand():
    # 8 checkpoints of 512, K V dK dV of 2 heads of 64, dx and dy of 512, 4 bytes each.
    least = floor(SHAPES["small"], torch.float32)
    assert least.checkpoints == 4 * 8 * 512
    assert least.live_set == 4 * (4 * 128 + 2 * 512)
    assert least.total == 22_528
    assert floor(SHAPES["small"], torch.bfloat16).total == 11_264
    assert floor(SHAPES["small"], torch.float32, segments=2).checkpoints == 4 * 2 * 512


def test_slopes_and_what_they_foretell():
    runs = [(n, 1000 + 7 * n) for n in (10, 20, 40)]
    assert slopes(runs) == [7.0, 7.0]
    assert expected_bytes(runs, 80) == 1000 + 7 * 80
    assert expected_bytes(runs[:1], 20) == 2 * 1070
    assert expected_bytes([], 80) == 0
    assert longest(runs, 1000 + 7 * 80) == 80
    assert longest(runs[:1], 10_000) is None


def test_growth_is_at_most_1_15_times_the_floor(streamed):
    least = floor(SHAPE, torch.float32).total
    assert len(streamed) == len(LENGTHS)
    for slope in slopes(points(streamed)):
        assert slope <= 1.15 * least


def test_nothing_is_of_size_t_by_t_or_t_by_vocabulary(streamed):
    check_largest(streamed[-1], rows=LENGTHS[-1])


def test_a_batch_grows_as_its_sequences_together():
    runs = measure(OURS, (1024, 2048), batch_size=2)
    (slope,) = slopes(points(runs))
    assert slope <= 1.15 * 2 * floor(SHAPE, torch.float32).total
    check_largest(runs[-1], rows=2 * 2048)


@pytest.mark.parametrize("method", [CHUNKED, OURS])
def test_a_step_without_arithmetic_needs_and_counts_the_same(method):
    """Nor does it take part in anything else: the loss of a step after it is what it was."""
    model = common.make_model(SHAPE, torch.float32, "cpu")
    loss, trained = build(method, model, CHUNK)
    batch = make_batch(SHAPE, 640)
    expected = common.train_step(loss, trained, batch)
    found = []
    for skipped in (contextlib.nullcontext(), SkipArithmetic()):
        trained.zero_grad(set_to_none=True)
        with skipped, track_memory() as memory, FlopCounter() as counter:
            common.train_step(loss, trained, batch)
        found.append((memory.peak_bytes, memory.largest_bytes, counter.by_op))
    assert found[0] == found[1]
    assert common.train_step(loss, trained, batch) == expected


def points(runs: list[dict]) -> list[tuple[int, int]]:
    return [(run["length"], run["peak_bytes"]) for run in runs]


def check_largest(run: dict, rows: int) -> None:
    made_by = run["largest_op"]
    assert run["largest_bytes"] < 4 * rows * SHAPE.vocab, made_by
    assert run["largest_bytes"] < rows * run["length"], made_by  # not even of bools
    # The largest there may be: one value of the residual stream, a weight's gradient.
    residual, head = 4 * rows * SHAPE.d, 4 * SHAPE.vocab * SHAPE.d
    assert run["largest_bytes"] <= max(residual, head), made_by


def test_the_baselines_grow_faster():
    """The measure tells methods apart: checkpointing is above the floor by far, eager by more."""
    least = floor(SHAPE, torch.float32).total
    lengths = (512, 1024)
    (checkpointed,) = slopes(points(measure(CHUNKED, lengths)))
    (whole_loss,) = slopes(points(measure(CHECKPOINTED, lengths)))
    (eager,) = slopes(points(measure(EAGER, lengths)))
    assert 2 * least < checkpointed <= whole_loss < eager
    assert eager > 8 * least
