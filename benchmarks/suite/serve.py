"""A process that runs training steps of one case when asked to.

Each line it is sent is a command, each answer one line of JSON. It imports nothing of seqsplit:
a method may need versions of torch that seqsplit does not run on.
"""

from __future__ import annotations

import gc
import importlib
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..dry import SkipArithmetic
from ..flops import FlopCounter
from .cases import Case

ANSWER = "@ "
WARM_UP = 512  # positions of the first step, which compiles
_POINTS = 200  # kept of a timeline
_MEMORY = Path(__file__).resolve().parents[2] / "seqsplit" / "memory.py"


@dataclass
class Subject:
    """What a case runs.

    Attributes:
        module: whose gradients a step adds to.
        step: one forward and backward at a length; returns the loss.
        generated: whether generated code runs, which only the allocator's records see.
        prepare: called before steps of another length, outside of what is measured.
    """

    module: nn.Module
    step: Callable[[int], float]
    generated: bool = False
    prepare: Callable[[int], None] = lambda length: None


def serve(case: Case, build: Callable[[Case], Subject]) -> None:
    """Build, take a first, short step, say so, and answer until there are no more commands.

    Commands, each followed by a length: ``measure`` (memory and FLOPs of a step), ``time`` (a
    step), ``gradients`` (those of a step, saved at a path as a list in the parameters' order).
    """
    torch.set_num_threads(case.threads)
    subject = build(case)
    first = _timed(subject, WARM_UP)
    _answer({"first": first, "versions": _versions()})
    prepared = WARM_UP
    for line in sys.stdin:
        command, length, *arguments = line.strip().split(maxsplit=2)
        if int(length) != prepared:
            subject.prepare(prepared := int(length))
        _answer(_COMMANDS[command](subject, int(length), *arguments))


def _measure(subject: Subject, length: int) -> dict[str, Any]:
    """Memory and FLOPs, which do not depend on values: without arithmetic, where those can be
    seen. Gradients exist already: a peak is what a step needs beyond weights and gradients.
    """
    _clear(subject)
    memory = _memory_module().track_memory(allocator=subject.generated)
    counter = FlopCounter()
    if subject.generated:
        with memory:
            subject.step(length)
    else:
        with SkipArithmetic(), memory, counter:
            subject.step(length)
    return {
        "peak_bytes": memory.peak_bytes,
        "largest_bytes": memory.largest_bytes,
        "largest_op": memory.largest_op,
        "gradient_bytes": sum(p.grad.nbytes for p in _trained(subject)),
        "timeline": _thinned(memory.timeline),
        "flops": None if subject.generated else _flops(counter),
    }


def _flops(counter: FlopCounter) -> dict[str, int]:
    products = counter.linear + counter.batched
    return {"products": products, "attention": counter.attention, "total": counter.total}


def _time(subject: Subject, length: int) -> dict[str, float]:
    _clear(subject)
    return _timed(subject, length)


def _gradients(subject: Subject, length: int, path: str) -> dict[str, float]:
    _clear(subject)
    loss = subject.step(length)
    torch.save([p.grad for p in _trained(subject)], path)
    return {"loss": loss}


_COMMANDS = {"measure": _measure, "time": _time, "gradients": _gradients}


def _timed(subject: Subject, length: int) -> dict[str, float]:
    """Seconds by the clock, and of processor time (which a busy machine disturbs less)."""
    seconds, cpu_seconds = time.perf_counter(), time.process_time()
    subject.step(length)
    return {
        "seconds": time.perf_counter() - seconds,
        "cpu_seconds": time.process_time() - cpu_seconds,
    }


def _clear(subject: Subject) -> None:
    subject.module.zero_grad(set_to_none=False)
    gc.collect()


def _trained(subject: Subject) -> list[nn.Parameter]:
    return [parameter for parameter in subject.module.parameters() if parameter.requires_grad]


def _thinned(timeline: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The highest point of each of some intervals, as (share of the step's events, bytes).

    By events and not by seconds, which mean nothing in a step without arithmetic.
    """
    highest: dict[int, int] = {}
    for event, (_, live) in enumerate(timeline):
        place = event * _POINTS // len(timeline)
        highest[place] = max(highest.get(place, live), live)
    return [(place / _POINTS, live) for place, live in sorted(highest.items())]


def _memory_module() -> ModuleType:
    """seqsplit's tracker, loaded by its path in a package that has nothing else: it does not need
    the rest, which may not be installed here."""
    package = ModuleType("benchmarks_tracker")
    package.__path__ = [str(_MEMORY.parent)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{_MEMORY.stem}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if "transformers" in sys.modules:
        found["transformers"] = sys.modules["transformers"].__version__
    return found


def _answer(content: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(content), flush=True)
