"""seqsplit: train causal decoders on long sequences in a fraction of the memory, exactly."""

from .api import compile, disable  # noqa: A004 - named after torch.compile
from .errors import SeqsplitError

__all__ = ["SeqsplitError", "compile", "disable"]

__version__ = "0.1.0"
