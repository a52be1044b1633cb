"""The options of a compilation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from seqsplit.errors import invalid_option
from seqsplit.schedule import Schedule

__all__ = ["Options"]

# Elements of the widest value of a chunk: as many as stay in reach of a CPU's caches, or as keep an
# accelerator busy between two readings of the weights.
_CHUNK_ELEMENTS = {"cpu": 2**24}
_CHUNK_ELEMENTS_ELSEWHERE = 2**27
_MIN_ROWS, _MAX_ROWS, _ROW_STEP = 128, 4096, 64


@dataclass(frozen=True)
class Options:
    """The options of :func:`seqsplit.compile`, checked.

    Attributes:
        chunk_size: rows of the sequence per chunk of a layer, ``None`` for automatic.
        head_chunk_size: the same for segments that end in sums (the loss).
        segment_layers: stretches between attentions per segment.
        schedule: what is kept for the backward.
        inner: a backend of ``torch.compile`` for the ops inside of chunk bodies, ``None`` for none.
        accumulate_dtype: the least precise dtype in which gradients are added up over chunks.
        seq_dim: the dim of the inputs that is the sequence, ``None`` to find it.
        strict: whether parts that would run whole are an error.
        validate: whether each distinct body is tried against the original before it is used.
    """

    chunk_size: int | None = None
    head_chunk_size: int | None = None
    segment_layers: int = 1
    schedule: Schedule = Schedule()
    inner: str | None = None
    accumulate_dtype: torch.dtype = torch.float32
    seq_dim: int | None = None
    strict: bool = False
    validate: bool = True

    @staticmethod
    def automatic_rows(width: int, device: str = "cpu") -> int:
        """Rows per chunk where a row of the widest value has ``width`` elements."""
        rows = _CHUNK_ELEMENTS.get(device, _CHUNK_ELEMENTS_ELSEWHERE) // max(width, 1)
        return max(_MIN_ROWS, min(_MAX_ROWS, rows // _ROW_STEP * _ROW_STEP))

    def head_rows(self, width: int, device: str = "cpu") -> int:
        """Rows per chunk of a head whose widest value has ``width`` elements per row."""
        return self.head_chunk_size or self.automatic_rows(width, device)

    @staticmethod
    def checked(
        *,
        chunk_size: int | str = "auto",
        head_chunk_size: int | str = "auto",
        segment_layers: int | str = "auto",
        schedule: Schedule | None = None,
        inner: str | None = None,
        accumulate_dtype: torch.dtype = torch.float32,
        seq_dim: int | None = None,
        strict: bool = False,
        validate: bool = True,
    ) -> Options:
        """Options as :func:`seqsplit.compile` takes them.

        Raises:
            InvalidOptionError: one of them is out of range.
        """
        rows = {"chunk_size": chunk_size, "head_chunk_size": head_chunk_size}
        counts = {name: _count(name, value) for name, value in rows.items()}
        layers = _count("segment_layers", segment_layers) or 1
        if not isinstance(accumulate_dtype, torch.dtype) or not accumulate_dtype.is_floating_point:
            raise invalid_option(
                "accumulate_dtype", accumulate_dtype, "a floating-point torch.dtype"
            )
        if seq_dim is not None and (not isinstance(seq_dim, int) or isinstance(seq_dim, bool)):
            raise invalid_option("seq_dim", seq_dim, "an integer, or None to find the sequence")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise invalid_option("schedule", schedule, "a seqsplit.Schedule, or None")
        if inner is not None and inner not in torch.compiler.list_backends(None):
            known = ", ".join(torch.compiler.list_backends())
            raise invalid_option("inner", inner, f"a backend of torch.compile ({known}), or None")
        return Options(
            inner=inner,
            segment_layers=layers,
            schedule=schedule or Schedule(),
            accumulate_dtype=accumulate_dtype,
            seq_dim=seq_dim,
            strict=bool(strict),
            validate=bool(validate),
            **counts,
        )


def _count(name: str, value: int | str) -> int | None:
    if value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise invalid_option(name, value, 'a positive integer or "auto"')
    return value
