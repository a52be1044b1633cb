"""Graph breaks: where Dynamo ended a graph and began another, and what to do about it.

Dynamo says so itself, at the capture: in an attribute of the graph that it ended, or in the error
that it raises where only one graph is allowed. Nothing is asked of a training step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import Unsupported, UserError

__all__ = ["GraphBreak", "break_after", "break_at"]


@dataclass(frozen=True)
class GraphBreak:
    """A place at which the capture broke.

    Attributes:
        line: of the user's code, as ``path:12  code``; empty if Dynamo does not say.
        why: what could not be captured.
        fix: how to remove the break.
    """

    line: str
    why: str
    fix: str


def break_after(captured: fx.GraphModule) -> GraphBreak | None:
    """The break that ended a captured graph, ``None`` if the user's function ended there."""
    reason = getattr(captured, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return _told(reason.reason, reason.user_stack)


def break_at(error: Unsupported | UserError) -> GraphBreak:
    """The break that was refused, from the error that Dynamo raised."""
    return _told(str(error), getattr(error, "real_stack", None) or ())


_BRANCH = (
    "the branch depends on a tensor's values, which are not known before the graph runs",
    "compute both sides and choose with torch.where, or decide before the model is called",
)
_ANY = "take the line out of the forward, or say the same in operations on tensors"
# Hints for the authors of Dynamo, words that say that there is none, and settings that are ours.
_NO_HINT = (
    "report an issue",
    "fundamental",
    "caused by an earlier graph break",
    "error when runn",
    "torch._dynamo.config",
)


def _told(message: str, stack: Sequence[FrameSummary]) -> GraphBreak:
    line = _user_line(stack)
    if message.startswith(("generic_jump", "Data-dependent branching")):
        return GraphBreak(line, *_BRANCH)
    head = message.strip().partition("\n")[0]
    told = _paragraphs("Explanation", message)
    hints = [h for h in _paragraphs("Hint", message) if not any(word in h for word in _NO_HINT)]
    why = f"{head}: {told[0]}" if told else head
    return GraphBreak(line, why, hints[0] if hints else _ANY)


def _paragraphs(label: str, message: str) -> list[str]:
    """What stands under a label, each on one line."""
    found = re.findall(rf"^ *{label}: (.*?)(?=^ *\w[\w ]*: |^\s*$|\Z)", message, re.M | re.S)
    return [" ".join(text.split()) for text in found]


def _user_line(stack: Sequence[FrameSummary]) -> str:
    """The innermost line outside of PyTorch."""
    ours = str(Path(torch.__file__).parent)
    frames = [frame for frame in stack if not frame.filename.startswith(ours)] or list(stack)
    return _written(frames[-1]) if frames else ""


def _written(frame: Any) -> str:
    return f"{frame.filename}:{frame.lineno}  {frame.line}"
