"""The compiler: how a captured graph becomes a plan (see :mod:`seqsplit.passes.pipeline`)."""

from seqsplit.passes.analysis.facts import NothingToSplit
from seqsplit.passes.driver import Executor, watching
from seqsplit.passes.pipeline import build_plan
from seqsplit.passes.rules import rule
from seqsplit.passes.stateful.calls import recurrent
from seqsplit.passes.stateful.stand_in import keeps_recurrent, recurrent_functions, standing_in

__all__ = [
    "Executor",
    "NothingToSplit",
    "build_plan",
    "keeps_recurrent",
    "recurrent",
    "recurrent_functions",
    "rule",
    "standing_in",
    "watching",
]
