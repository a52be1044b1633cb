"""What is kept between the forward and the backward, and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass

from seqsplit.errors import invalid_option

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """How memory is traded for arithmetic. Gradients are the same under every schedule.

    Attributes:
        forwards: how often a layer's forward may run in a step, on average over the layers. 2 is
            ordinary checkpointing: the input of every segment is stored. With 3 or more, only
            some inputs are stored and the others computed again from them, in the order that
            needs the fewest forwards (Griewank and Walther's binomial checkpointing for equal
            layers, the dynamic program of arXiv 1911.13214 for unequal ones).
        keep_keys: keep keys, values and the states of scans from the forward, instead of
            projecting them again in the backward.
        keep_attention: keep the output and the log-sum-exp of fused attention, so that its
            forward runs once.
        offload: ``"cpu"`` to store the segments' inputs in host memory (pinned, copied beside
            the computation where the device can), ``None`` to store them where they are.

    Raises:
        InvalidOptionError: an attribute is out of range.
    """

    forwards: int = 2
    keep_keys: bool = False
    keep_attention: bool = False
    offload: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.forwards, int) or self.forwards < 2:
            raise invalid_option("forwards", self.forwards, "an integer of at least 2")
        if self.offload not in (None, "cpu"):
            raise invalid_option("offload", self.offload, '"cpu" or None')

    @property
    def chained(self) -> bool:
        """Whether a segment's inputs are not simply kept by the segment itself."""
        return self.forwards > 2 or self.offload is not None
