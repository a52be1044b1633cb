"""How Dynamo is set while it captures for us."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch import nn

__all__ = ["MAX_CAPTURES", "capture_settings", "without_generation_cache"]

# Captures of one target (train and eval mode, with and without a mask, other numbers) before
# Dynamo gives up and leaves it in eager.
MAX_CAPTURES = 64
_RECOMPILE_LIMIT = (
    "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
)


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    settings: dict[str, Any] = {
        _RECOMPILE_LIMIT: MAX_CAPTURES,
        "specialize_float": True,  # Python numbers of the model are constants of its graph
        "specialize_int": True,
        "skip_nnmodule_hook_guards": False,  # a hook that is added later is not to be missed
    }
    for name in ("ignore_logging_functions", "ignore_logger_methods"):
        if hasattr(torch._dynamo.config, name):
            settings[name] = getattr(torch._dynamo.config, name) | _logging_functions()
            break
    with (
        torch._dynamo.config.patch(**settings),
        warnings.catch_warnings(),
        # Two dims of the same size (a batch as long as the sequence) stay two symbols.
        symbolic_shapes_config.patch(use_duck_shape=False),
    ):
        # Dynamo looks at .grad of every input.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        yield


def _logging_functions() -> set[Callable]:
    """Methods of loggers, those included that libraries add, and warnings: no graph breaks."""
    names = ("debug", "info", "warn", "error", "critical", "exception", "log")
    return {warnings.warn} | {
        function
        for name, function in vars(logging.Logger).items()
        if callable(function) and name.startswith(names)
    }


@contextlib.contextmanager
def without_generation_cache(modules: list[nn.Module]) -> Iterator[None]:
    """Models with a generation cache do not fill it in a training call.

    Such models read the default from their configuration; a caller who passes ``use_cache=True``
    still gets a cache.
    """
    configs = {
        id(config): config
        for root in modules
        for module in root.modules()
        if getattr(config := getattr(module, "config", None), "use_cache", None) is True
    }
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True
