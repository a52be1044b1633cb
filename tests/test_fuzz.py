"""A fixed draw of random decoders in every run; `make fuzz` tries as many as one likes."""

import hypothesis
import pytest

from fuzzing import check, examples

SHARDS, EACH = 8, 20


@pytest.mark.parametrize("shard", range(SHARDS))
def test_drawn_decoders_are_exact(shard):
    @hypothesis.seed(shard)
    @hypothesis.settings(max_examples=EACH, derandomize=False, database=None)
    @hypothesis.given(examples)
    def exact(example):
        check(*example)

    exact()
