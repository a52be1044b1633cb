"""Functions that expose their state: one node, called on chunks with the state carried."""

import pytest

import recurrences
from compare import Pair
from seqsplit.passes import stand_in
from zoo import batches, probe

CHUNKS = (1, 4, 5, 20)


def check(function, chunk_size=4, lengths=(13, 8, 37), **options):
    model = {k: options.pop(k) for k in ("layers", "own_state") if k in options}
    pair = Pair(
        lambda: recurrences.build(function, **model),
        step=probe.step,
        chunk_size=chunk_size,
        **options,
    )
    for length in lengths:
        pair.check(*batches.with_labels(3, length), explain=pair.streamed)
    return pair


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_blocks_in_a_loop(chunk_size):
    check(recurrences.gated_delta_rule, chunk_size)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_loop_over_positions_under_other_names(chunk_size):
    check(recurrences.step_by_step, chunk_size)


@pytest.mark.parametrize("chunk_size", (4, 5))
def test_opaque(chunk_size):
    check(recurrences.kernel, chunk_size)


@pytest.mark.parametrize("chunk_size", (4, 5))
def test_the_model_gives_the_first_state(chunk_size):
    check(recurrences.gated_delta_rule, chunk_size, own_state=True)


@pytest.mark.parametrize("function", recurrences.LIARS, ids=lambda f: f.__name__)
def test_what_is_not_so_is_not_believed(function, monkeypatch):
    """Without the node, the code is traced through, as it would be under other names."""
    asked = spy(monkeypatch)
    check(function, 4, lengths=(13,), streamed=False)
    assert asked == {function.__name__: False}


def test_what_is_so_is_believed(monkeypatch):
    asked = spy(monkeypatch)
    check(recurrences.gated_delta_rule, 4, lengths=(13,))
    assert asked == {"gated_delta_rule": True}


def spy(monkeypatch):
    """Which functions were asked for while they were traced, and whether they were proved."""
    asked, proves = {}, stand_in.recurrence_of_call

    def noted(function, *call):
        found = proves(function, *call)
        asked[function.__name__] = found is not None
        return found

    monkeypatch.setattr(stand_in, "recurrence_of_call", noted)
    return asked
