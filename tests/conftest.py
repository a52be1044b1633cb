"""Settings of all tests: threads, reproducible hypothesis, honest float64, clean captures."""

import hypothesis
import pytest
import torch

from zoo import float64

pytest.register_assert_rewrite("compare")

torch.set_num_threads(1)  # tests run in several processes
hypothesis.settings.register_profile(
    "seqsplit",
    deadline=None,  # the first example pays for the capture
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("seqsplit")


@pytest.fixture(autouse=True, scope="session")
def honest_float64():
    """Keep float32 islands inside float64 models out of the comparisons."""
    with float64.honest():
        yield


@pytest.fixture(autouse=True)
def clean_captures():
    """Dynamo keeps a few captures per code object and then gives up: start each test afresh."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
