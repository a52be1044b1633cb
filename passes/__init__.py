"""The compiler: how a captured graph becomes a plan (see :mod:`seqsplit.passes.pipeline`)."""

from .facts import NothingToSplit
from .pipeline import Executor, build_plan
from .rules import rule

__all__ = ["Executor", "NothingToSplit", "build_plan", "rule"]
