"""The compiler: how a captured graph becomes a plan (see :mod:`seqsplit.passes.pipeline`)."""

from .facts import NothingToSplit
from .pipeline import Executor, build_plan
from .rules import rule
from .stateful.calls import recurrent
from .stateful.stand_in import keeps_recurrent, recurrent_functions, standing_in

__all__ = [
    "Executor",
    "NothingToSplit",
    "build_plan",
    "keeps_recurrent",
    "recurrent",
    "recurrent_functions",
    "rule",
    "standing_in",
]
