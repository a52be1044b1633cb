"""``seqsplit.plan``: what a training step will need, before there is a GPU or a weight."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from seqsplit.errors import InvalidOptionError, format_message, invalid_option
from seqsplit.frontend.handle import Handle, executor_running
from seqsplit.ir.plan import Plan, Segment
from seqsplit.memory import track_memory
from seqsplit.options import Options
from seqsplit.planning.configurations import model_on_meta
from seqsplit.planning.forecast import Forecast, Parts, parts_of_stretches
from seqsplit.planning.rehearsal import rehearse_segment
from seqsplit.schedule import Schedule

__all__ = ["OPTIMIZERS", "SCHEDULES", "Choice", "TrainingPlan", "plan"]

Step = Callable[[nn.Module, Tensor], Tensor]

# From the fastest to the one with the least memory.
SCHEDULES = {
    "attention kept": Schedule(keep_attention=True),
    "checkpoints": Schedule(),
    "offload": Schedule(offload="cpu"),
    "3 forwards": Schedule(forwards=3),
    "4 forwards": Schedule(forwards=4),
}

# Bytes per trained element, besides weights and gradients; ``None``: two states like the weight.
OPTIMIZERS = {"none": 0, "sgd": 0, "adamw": None, "adamw8bit": 2, "adamw32": 8}
_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
# The lengths that are rehearsed, in chunks: from here on what a chunk needs besides the sequence's
# own buffers is the same for all of them.
_CHUNKS = (6, 9)
_LEAST_ROWS = 128  # of a chunk, when chunks are made smaller to fit


@dataclass(frozen=True)
class Choice:
    """A schedule, and what it needs.

    Attributes:
        name: of the schedule.
        schedule: to be given to :func:`seqsplit.compile`.
        parts: bytes at the peak, besides weights and optimizer.
        peak_bytes: everything together.
        longest: the longest sequence that fits.
        growth_bytes: per further token.
    """

    name: str
    schedule: Schedule
    parts: Parts
    peak_bytes: float
    longest: int
    growth_bytes: float


@dataclass(frozen=True)
class TrainingPlan:
    """What :func:`plan` returns; ``str()`` of it is a table.

    Attributes:
        seq_len, batch_size: of the step.
        memory_bytes: what there is to use.
        weight_bytes, optimizer_bytes: what is there all the time.
        choices: the schedules, from the fastest to the one with the least memory.
        chunk_size: rows per chunk of a layer.
        head_chunk_size: the same for the head.
    """

    seq_len: int
    batch_size: int
    memory_bytes: float
    weight_bytes: int
    optimizer_bytes: int
    choices: tuple[Choice, ...]
    chunk_size: int
    head_chunk_size: int

    @property
    def recommended(self) -> Choice | None:
        """The fastest schedule that fits."""
        fitting = (c for c in self.choices if c.peak_bytes <= self.memory_bytes)
        return next(fitting, None)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for :func:`seqsplit.compile`: the recommended schedule, and the chunks.

        Raises:
            ValueError: nothing fits.
        """
        if self.recommended is None:
            raise ValueError(
                f"no schedule fits {self.seq_len} tokens into {_gib(self.memory_bytes)}; "
                f"the longest sequence is {max(c.longest for c in self.choices):,}"
            )
        return {
            "schedule": self.recommended.schedule,
            "chunk_size": self.chunk_size,
            "head_chunk_size": self.head_chunk_size,
        }

    def __str__(self) -> str:
        columns = ("peak", "stored", "working", "gradients", "KiB/token", "longest")
        table = Table("schedule", title=f"{self.batch_size} x {self.seq_len:,} tokens")
        for column in columns:
            table.add_column(column, justify="right")
        for choice in self.choices:
            mark = " *" if choice is self.recommended else ""
            parts = choice.parts
            table.add_row(
                choice.name + mark,
                *map(_gib, (choice.peak_bytes, parts.stored, parts.working, parts.gradients)),
                f"{choice.growth_bytes / 2**10:,.1f}",
                f"{choice.longest:,}",
            )
        console = Console(file=io.StringIO(), width=100)
        console.print(table)
        lines = [
            console.file.getvalue().rstrip(),
            f"weights {_gib(self.weight_bytes)}, optimizer {_gib(self.optimizer_bytes)}, "
            f"of {_gib(self.memory_bytes)} that can be used",
            f"chunks of {self.chunk_size} in layers, {self.head_chunk_size} in the head",
            "* the fastest that fits" if self.recommended else "nothing fits",
        ]
        return "\n".join(lines)


def plan(
    model: Any,
    *,
    seq_len: int,
    batch_size: int = 1,
    memory: str | float = "80GB",
    optimizer: str | float = "adamw",
    dtype: torch.dtype = torch.bfloat16,
    headroom: float = 0.03,
    accumulate: bool = False,
    chunk_size: int | str = "auto",
    head_chunk_size: int | str = "auto",
    segment_layers: int | str = "auto",
    schedules: dict[str, Schedule] | None = None,
    step: Step | None = None,
    progress: Callable[[str], None] | None = None,
) -> TrainingPlan:
    """Predict the memory of a compiled training step, without a GPU and without weights.

    The step runs on tensors that have shapes only, with the real plan on the real runtime, at two
    short lengths; every stretch of it grows linearly from there.

    Args:
        model: a module (on any device; it is left as it is), or a configuration from which one
            is made.
        seq_len: tokens per sequence.
        batch_size: sequences per step.
        memory: of the device: bytes, or a text such as ``"80GB"`` (of 2**30 bytes, as makers of
            GPUs count).
        optimizer: ``"adamw"`` (two states in the weights' dtype), ``"adamw8bit"``, ``"adamw32"``
            (two states in float32), ``"sgd"``, ``"none"``, or bytes per trained element.
        dtype: of the weights, where ``model`` is a configuration.
        headroom: the part of the memory that is not to be used: the device's own context, and
            fragmentation.
        accumulate: whether gradients are there already when the step begins (gradient
            accumulation), instead of being made by it.
        chunk_size, head_chunk_size: rows per chunk. ``"auto"`` plans with as many as keep the
            device busy, and with half of them again and again as long as nothing fits.
        segment_layers: as for :func:`seqsplit.compile`.
        schedules: by name, from the fastest to the one with the least memory; a choice of usual
            ones by default.
        step: ``step(model, ids)`` returns the loss for token ids ``[batch, seq]``; by default the
            next-token loss.
        progress: called with the name of what is done next.

    Returns:
        The :class:`TrainingPlan`.

    Raises:
        InvalidOptionError: an argument is out of range.
        SeqsplitError: the model cannot be captured.

    Example:
        >>> plan = seqsplit.plan(config, seq_len=131_072, optimizer="adamw8bit")
        >>> model = seqsplit.compile(model, **plan.options)
    """
    budget = _bytes(memory) * (1 - headroom)
    twin = _on_meta(model, dtype)
    trained = [p for p in twin.parameters() if p.requires_grad]
    held = {id(tensor): tensor for tensor in (*twin.parameters(), *twin.buffers())}.values()
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
    optimizer_bytes = _optimizer_bytes(optimizer, trained)
    options = Options.checked(
        chunk_size=chunk_size, head_chunk_size=head_chunk_size, segment_layers=segment_layers
    )
    rehearsal = _Rehearsal(twin, step or _next_token_loss, replace(options, validate=False))
    resident = weight_bytes + int(optimizer_bytes)
    while True:
        choices = []
        for name, schedule in (schedules or SCHEDULES).items():
            if progress is not None:
                progress(name)
            forecast = rehearsal.forecast(schedule, batch_size, accumulate)
            parts, growth = forecast.at(seq_len), forecast.growth(seq_len)
            longest = forecast.longest(budget - resident)
            total = resident + parts.total
            choices.append(Choice(name, schedule, parts, total, longest, growth))
        found = TrainingPlan(
            seq_len,
            batch_size,
            budget,
            weight_bytes,
            int(optimizer_bytes),
            tuple(choices),
            *rehearsal.rows(),
        )
        could_fit = any(c.peak_bytes - c.parts.working <= budget for c in choices)
        if found.recommended is not None or not could_fit or not rehearsal.halve_chunks():
            return found


class _Rehearsal(Handle):
    """A step on tensors without storage, under one schedule after the other."""

    def __init__(self, model: nn.Module, step: Step, options: Options) -> None:
        self._model, self._step = model, step
        self._schedule = options.schedule
        names = ("chunk_size", "head_chunk_size")
        self._automatic = {name for name in names if getattr(options, name) is None}
        self._variants: dict[tuple[int, Options], Plan] = {}
        super().__init__(model._call_impl, options, [model], executor_running(rehearse_segment()))
        model._compiled_call_impl = self  # as compile() would: a loss outside of it stays there

    def choose(self, plan: Plan) -> Plan:
        options = replace(self.options, schedule=self._schedule)
        key = id(plan), options
        if key not in self._variants:
            self._variants[key] = plan.with_options(options)
        return self._variants[key]

    def halve_chunks(self) -> bool:
        """Go on with chunks of half the size, where sizes are automatic and not small yet."""
        names = ("chunk_size", "head_chunk_size")
        halves = {
            name: rows // 2
            for name, rows in zip(names, self.rows())
            if name in self._automatic and rows >= 2 * _LEAST_ROWS
        }
        self.options = replace(self.options, **halves)
        return bool(halves)

    def forecast(self, schedule: Schedule, batch_size: int, accumulate: bool) -> Forecast:
        self._schedule = schedule
        if not self._variants:
            self._run(batch_size, 256, accumulate)  # captures
        rows = max(self.rows())
        windows = -(-self._widest_window() // rows)  # beyond which caches do not grow
        lengths = tuple((count + windows) * rows for count in _CHUNKS)
        shorter, longer = (self._parts(batch_size, length, accumulate) for length in lengths)
        return Forecast(lengths, shorter, longer)

    def rows(self) -> tuple[int, int]:
        """Rows per chunk in layers, and in the head."""
        far = 2**40
        rows = dict.fromkeys((False, True), 1)
        for segment in self._segments():
            is_head = segment.body.is_head
            rows[is_head] = max(rows[is_head], segment.chunk_rows(far, "meta"))
        return rows[False], rows[True]

    def _widest_window(self) -> int:
        return max((segment.body.window or 0 for segment in self._segments()), default=0)

    def _segments(self) -> list[Segment]:
        return [s for run in self.log if isinstance(run.plan, Plan) for s in run.plan.segments]

    def _parts(self, batch_size: int, length: int, accumulate: bool) -> list[Parts]:
        self._run(batch_size, length, accumulate)  # the loops that have not been run yet
        with track_memory(device="meta") as memory:
            self._run(batch_size, length, accumulate)
        return parts_of_stretches(memory)

    def _run(self, batch_size: int, length: int, accumulate: bool) -> None:
        ids = torch.zeros(batch_size, length, dtype=torch.long, device="meta")
        for parameter in self._model.parameters():
            parameter.grad = None
            if accumulate and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self._step(self._model, ids).backward()


def _next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss that the model computes itself if it takes labels, else that of its logits."""
    takes = inspect.signature(model.forward).parameters
    if "labels" in takes:
        outputs = model(ids, labels=ids)
        return outputs[0] if isinstance(outputs, tuple) else outputs.loss
    outputs = model(ids)
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if logits is None:
        raise InvalidOptionError(
            format_message(
                "the planner does not know how this model is trained",
                got=f"a {type(outputs).__name__} without logits, and no argument labels",
                fix="give step=, a function of the model and the token ids that returns the loss",
            )
        )
    logits = logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def _on_meta(model: Any, dtype: torch.dtype) -> nn.Module:
    """A copy of a module, or the module of a configuration, without storage."""
    if isinstance(model, nn.Module):
        memo = {}
        for tensor in (*model.parameters(), *model.buffers()):
            empty = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = empty
        return copy.deepcopy(model, memo)
    return model_on_meta(model, dtype)


def _optimizer_bytes(optimizer: str | float, trained: Sequence[Tensor]) -> float:
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            wanted = f"one of {', '.join(OPTIMIZERS)}, or bytes per trained element"
            raise invalid_option("optimizer", optimizer, wanted)
        optimizer = OPTIMIZERS[optimizer]
    per_element = optimizer
    return sum(
        p.numel() * (2 * p.element_size() if per_element is None else per_element) for p in trained
    )


def _bytes(memory: str | float) -> float:
    if not isinstance(memory, str):
        return float(memory)
    number = memory.strip().upper().replace("IB", "B")
    unit = number.lstrip("0123456789. ")
    try:
        return float(number[: len(number) - len(unit)]) * _UNITS[unit]
    except (KeyError, ValueError):
        raise invalid_option("memory", memory, 'bytes, or a text like "80GB"') from None


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"
