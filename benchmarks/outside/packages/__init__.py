"""The packages that are tried, most used first, each with its option sets.

A module here is imported where its package is not installed (to list the option sets), so it
imports the package inside its functions only.
"""

from __future__ import annotations

import importlib
from types import ModuleType

# The package's name on the index, and the module here that describes it.
_MODULES = {
    "x-transformers": "x_transformers",
    "litgpt": "litgpt",
    "torchtune": "torchtune",
    "local-attention": "local_attention",
    "mambapy": "mambapy",
    "ibm-fms": "ibm_fms",
    "ai2-olmo": "ai2_olmo",
    "yet-another-retnet": "yet_another_retnet",
    "xlstm": "xlstm",
    "gateloop-transformer": "gateloop_transformer",
}


def names() -> list[str]:
    return list(_MODULES)


def describe(package: str) -> ModuleType:
    """The module with ``REQUIREMENTS``, ``IMPORTS`` and ``option_sets()`` of a package."""
    return importlib.import_module(f"{__name__}.{_MODULES[package]}")
