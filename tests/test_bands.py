"""What is claimed of a mask holds for the mask: keys outside the claimed interval never pass."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import output_of, trace
from seqsplit.passes.analysis.bands import Band, Bands, Bias
from seqsplit.passes.analysis.facts import propagate

T = 9


def known(function):
    """What is known of ``function(length)``'s mask, traced with a symbolic length."""
    lowered = trace(lambda x: function(x.shape[0]), torch.zeros(T))
    sequence = next(iter(lowered.hints))
    return Bands(propagate(lowered, sequence)).of(output_of(lowered))


def visible(mask):
    """The distances key - query that a mask lets through somewhere, and everywhere."""
    by_distance = {}
    for query in range(T):
        for key in range(T):
            by_distance.setdefault(key - query, []).append(bool(mask[query, key]))
    somewhere = {d for d, seen in by_distance.items() if any(seen)}
    everywhere = {d for d, seen in by_distance.items() if all(seen)}
    return somewhere, everywhere


def assert_sound(band, mask):
    somewhere, everywhere = visible(mask)
    assert (band.query, band.key) == (0, 1)
    assert all(band.possible[0] <= d <= band.possible[1] for d in somewhere)
    if band.certain is not None:
        certain = {d for d in range(1 - T, T) if band.certain[0] <= d <= band.certain[1]}
        assert certain <= everywhere


def rows(length):
    return torch.arange(length)[:, None]


def columns(length):
    return torch.arange(length)[None, :]


COMPARISONS = st.tuples(st.sampled_from(["le", "lt", "ge", "gt", "eq"]), st.integers(-3, 3))
MASKS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.tuples(st.just("and"), inner, inner),
        st.tuples(st.just("or"), inner, inner),
        st.tuples(st.just("not"), inner),
        st.tuples(st.just("unknown"), inner),
        st.tuples(st.sampled_from(["tril", "triu"]), inner, st.integers(-2, 2)),
    ),
    max_leaves=5,
)


def build(spec, length):
    name, *rest = spec
    if name == "and":
        return build(rest[0], length) & build(rest[1], length)
    if name == "or":
        return build(rest[0], length) | build(rest[1], length)
    if name == "not":
        return ~build(rest[0], length)
    if name == "unknown":  # a condition on something that is not a position
        return build(rest[0], length) & (torch.sin(3.0 * rows(length)) < 0.5)
    if name in ("tril", "triu"):
        return getattr(torch, name)(build(rest[0], length), rest[1])
    return getattr(torch, name)(columns(length), rows(length) + rest[0])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MASKS)
def test_claims_about_random_masks_hold(spec):
    band = known(lambda length: build(spec, length))
    if isinstance(band, Band):
        assert_sound(band, build(spec, T))


@pytest.mark.parametrize(
    ("name", "function", "possible", "exact"),
    [
        ("compared", lambda n: columns(n) <= rows(n), (-math.inf, 0), True),
        ("mirrored", lambda n: rows(n) >= columns(n), (-math.inf, 0), True),
        ("tril", lambda n: torch.tril(torch.ones(n, n, dtype=torch.bool)), (-math.inf, 0), True),
        (
            "window",
            lambda n: (columns(n) <= rows(n)) & (columns(n) > rows(n) - 4),
            (-3, 0),
            True,
        ),
        ("not_future", lambda n: ~(columns(n) > rows(n)), (-math.inf, 0), True),
        (
            "padded",
            lambda n: (columns(n) <= rows(n)) & (torch.sin(columns(n)) > 0),
            (-math.inf, 0),
            False,
        ),
        (
            "as_numbers",
            lambda n: torch.tril(torch.ones(n, n)) == 1,
            (-math.inf, 0),
            True,
        ),
    ],
)
def test_usual_boolean_masks_are_recognised(name, function, possible, exact):
    band = known(function)
    assert isinstance(band, Band), name
    assert band.possible == possible
    assert band.exact == exact


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("triu", lambda n: torch.triu(torch.full((n, n), -math.inf), 1)),
        ("where", lambda n: torch.where(columns(n) <= rows(n), 0.0, -math.inf)),
        (
            "masked_fill",
            lambda n: torch.zeros(n, n).masked_fill(columns(n) > rows(n), -math.inf),
        ),
        (
            "times_minimum",
            lambda n: (1.0 - torch.tril(torch.ones(n, n))) * torch.finfo(torch.float32).min,
        ),
        (
            "added_to_scores",
            lambda n: (
                torch.sin(rows(n) * columns(n)) + torch.triu(torch.full((n, n), -math.inf), 1)
            ),
        ),
    ],
)
def test_usual_additive_masks_are_recognised(name, function):
    bias = known(function)
    assert isinstance(bias, Bias), name
    assert bias.band.possible == (-math.inf, 0)
    hidden = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
    assert (function(T)[hidden] <= -1e30).all()


def test_a_mask_that_sees_the_future_is_not_called_causal():
    prefix = known(lambda n: (columns(n) <= rows(n)) | (columns(n) < 3))
    assert not isinstance(prefix, Band) or prefix.possible[1] > 0
    assert known(lambda n: torch.triu(torch.full((n, n), -5.0), 1)) is None


def test_positions_in_half_precision_are_not_trusted():
    """From 257 on bfloat16 skips integers: neighbours look equal."""
    function = lambda n: columns(n).to(torch.bfloat16) <= rows(n).to(torch.bfloat16)  # noqa: E731
    assert known(function) is None
