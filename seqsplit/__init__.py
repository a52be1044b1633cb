"""seqsplit: train causal decoders on long sequences in a fraction of the memory, exactly."""

from seqsplit.api import compile, disable, recurrent, rule  # noqa: A004 - named after torch.compile
from seqsplit.errors import SeqsplitError
from seqsplit.explain import Report, explain
from seqsplit.ir.placement import Chunk, Sum, Whole
from seqsplit.memory import track_memory
from seqsplit.planner import TrainingPlan, plan
from seqsplit.schedule import Schedule
from seqsplit.verify import Verification, verify

__all__ = [
    "Chunk",
    "Report",
    "Schedule",
    "SeqsplitError",
    "Sum",
    "TrainingPlan",
    "Verification",
    "Whole",
    "compile",
    "disable",
    "explain",
    "plan",
    "recurrent",
    "rule",
    "track_memory",
    "verify",
]

__version__ = "0.1.0"
