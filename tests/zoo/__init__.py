"""Tiny models for the tests: random weights, distinct sizes, nothing downloaded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import alibi, nano, parallel, rope, sandwich, sequence_first


@dataclass(frozen=True)
class Entry:
    """A hand-written decoder: how to build it and how to get a loss from it.

    build: `build(layers=...)` gives a module; step: `step(module, ids, labels[, keep])` a loss.
    padding: whether `step` takes `keep`; fused: whether its attention is a fused kernel.
    """

    build: Callable
    step: Callable
    padding: bool = True
    fused: bool = False


HANDWRITTEN = {
    "nano-fused": Entry(nano.build, nano.step, fused=True),
    "nano-manual": Entry(partial(nano.build, fused=False), nano.step),
    "rope-fused": Entry(rope.build, rope.step, fused=True),
    "rope-manual": Entry(partial(rope.build, fused=False), rope.step),
    "alibi-einsum": Entry(alibi.build, alibi.step),
    "sequence-first": Entry(sequence_first.build, sequence_first.step),
    "sandwich": Entry(sandwich.build, sandwich.step, padding=False, fused=True),
    "parallel": Entry(parallel.build, parallel.step, padding=False, fused=True),
}
