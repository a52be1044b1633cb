"""Settings of all tests: threads, reproducible hypothesis, honest float64, clean captures."""

import hypothesis
import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

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


def pytest_configure(config):
    config.addinivalue_line("markers", "stock: library models as they are, float32 islands and all")


@pytest.fixture(autouse=True)
def honest_float64(request):
    """Keep float32 islands inside the library's float64 models out of the comparisons."""
    if not hasattr(request.module, "hf") or request.node.get_closest_marker("stock"):
        yield
        return
    from zoo import float64  # imports the library, which few test files need

    with float64.honest():
        yield


@pytest.fixture(autouse=True)
def clean_captures():
    """Dynamo keeps a few captures per code object and then gives up: start each test afresh.

    Caches of methods keep every capture's symbolic sizes alive: millions of objects in the end,
    which every garbage collection walks through. They are emptied too.
    """
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()
