"""The exceptions of seqsplit, and the one format in which they speak.

Every message says what happened, where in the user's code, what was seen, why it matters, what
was done instead and how to mend it; a line without content is left out.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "DoubleBackwardError",
    "InvalidOptionError",
    "MaterializedWarning",
    "NoRuleError",
    "NotStreamedError",
    "SeqsplitError",
    "SequenceNotFoundError",
    "StaleLogitsError",
    "UnfinishedPlanWarning",
    "format_message",
    "invalid_option",
]


def format_message(what: str, **lines: str | None) -> str:
    """Lay out an error message: the sentence ``what``, then one aligned line per keyword.

    The keywords are the labels of the lines (``at``, ``got``, ``why``, ``now``, ``fix``), in the
    order given; those whose value is ``None`` or empty are dropped.
    """
    rows = [f"  {label + ':':<5} {text}" for label, text in lines.items() if text]
    return "\n".join([what, *rows])


class SeqsplitError(Exception):
    """Base of all errors raised by seqsplit."""


class InvalidOptionError(SeqsplitError, ValueError):
    """An option of :func:`seqsplit.compile` has a value that cannot mean anything."""


def invalid_option(name: str, value: object, wanted: str) -> InvalidOptionError:
    """The error for an option out of range; ``wanted`` says what would be in it."""
    return InvalidOptionError(
        format_message(f"{name}={value!r} cannot mean anything", fix=f"give {wanted}")
    )


class UnfinishedPlanWarning(UserWarning):
    """Seqsplit itself failed on a captured graph, which then runs as it is."""


class MaterializedWarning(UserWarning):
    """A deferred tensor (logits, usually) had to be computed as a whole."""


class CaptureError(SeqsplitError):
    """The target could not be captured as a graph."""


class SequenceNotFoundError(SeqsplitError):
    """No input dimension could be recognised as the sequence."""


class NoRuleError(SeqsplitError):
    """An op has no sequence rule for what is asked of it, so it cannot run chunk by chunk."""


class NotStreamedError(SeqsplitError):
    """``strict=True`` and a part of the model would have to run whole."""


class DoubleBackwardError(SeqsplitError, RuntimeError):
    """Gradients of gradients were asked through a streamed segment."""


class StaleLogitsError(SeqsplitError, RuntimeError):
    """Deferred logits were looked at after the weights they depend on had changed."""
