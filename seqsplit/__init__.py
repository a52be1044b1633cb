"""seqsplit: train causal decoders on long sequences in a fraction of the memory, exactly."""

from .api import compile, disable, recurrent, rule  # noqa: A004 - named after torch.compile
from .errors import SeqsplitError
from .explain import Report, explain
from .memory import track_memory
from .placement import Chunk, Sum, Whole
from .planner import TrainingPlan, plan
from .schedule import Schedule
from .verify import Verification, verify

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
