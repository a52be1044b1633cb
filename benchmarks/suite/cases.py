"""What is measured: cases by model, method and length, in three sets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..names import (
    CHECKPOINTED,
    CHECKPOINTED_FULL,
    CHUNKED,
    COMPILED,
    EAGER,
    INDUCTOR,
    KEPT,
    OURS,
    OURS_THIRDS,
    THREE,
    TILED,
)

# On the same model in StreamBP's own environment; the last tells what its older torch does to time.
STREAMBP = "StreamBP"
STREAMBP_THIRDS = "StreamBP, chunks of T/3"
CHECKPOINTED_OLD = "checkpointing, in StreamBP's environment"
ELSEWHERE = (STREAMBP, STREAMBP_THIRDS, CHECKPOINTED_OLD)

# As they stand in tables.
ORDER = (
    EAGER,
    CHECKPOINTED_FULL,
    CHECKPOINTED,
    CHUNKED,
    COMPILED,
    TILED,
    CHECKPOINTED_OLD,
    STREAMBP,
    STREAMBP_THIRDS,
    OURS,
    OURS_THIRDS,
    INDUCTOR,
    KEPT,
    THREE,
)

DECODER, LLAMA = "decoder", "llama"


@dataclass(frozen=True)
class Case:
    """One method on one model at one length.

    Attributes:
        family: ``"decoder"`` of ``benchmarks/models.py``, or ``"llama"`` of transformers with the
            sizes of that decoder.
        shape: name of its sizes.
        method: name of the method.
        length: positions of the sequence.
        chunk: positions per chunk of the layers.
        dtype: of the parameters.
        threads: CPU threads.
    """

    family: str
    shape: str
    method: str
    length: int
    chunk: int
    dtype: str = "float32"
    threads: int = 2

    @property
    def loss_chunk(self) -> int:
        """Positions per chunk of logits, which are much wider: for all methods that have one."""
        return max(self.chunk // 8, 64)

    def at(self, length: int) -> Case:
        """The case at another length, in chunks of a third of it where the method has those."""
        thirds = self.method in (OURS_THIRDS, STREAMBP_THIRDS)
        chunk = -(-length // 3) if thirds else self.chunk
        return dataclasses.replace(self, length=length, chunk=chunk)

    @property
    def group(self) -> str:
        """What the case has in common with those it is compared with."""
        return f"{self.family} {self.shape} | {self.dtype} | chunk {self.chunk}"

    @property
    def key(self) -> str:
        return f"{self.group} | T={self.length} | {self.method}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Case:
        return Case(**json.loads(text))


@dataclass(frozen=True)
class Race:
    """Steps of several methods in turn, each compared with the last method's of the same round."""

    cases: tuple[Case, ...]
    rounds: int

    @property
    def key(self) -> str:
        return f"race | {self.cases[0].group} | T={self.cases[0].length}"


@dataclass
class Plan:
    """Attributes:
    measures: memory and FLOPs of one step each, short lengths first.
    gradients: first of these compared with the others.
    races: time.
    """

    measures: list[Case] = field(default_factory=list)
    gradients: list[Case] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)

    def only(self, text: str) -> Plan:
        """The part of it that has a text in its keys."""
        return Plan(
            [case for case in self.measures if text in case.key],
            self.gradients if any(text in case.key for case in self.gradients) else [],
            [race for race in self.races if text in race.key],
        )

    def measure(
        self, family: str, shape: str, chunk: int, lengths: dict[str, Sequence[int]], **more: str
    ) -> None:
        """Add cases by method and its lengths."""
        self.measures += [
            Case(family, shape, method, length, chunk, **more)
            for method, each in lengths.items()
            for length in each
        ]

    def race(
        self,
        family: str,
        shape: str,
        chunk: int,
        length: int,
        methods: Sequence[str],
        rounds: int,
        **more: str,
    ) -> None:
        """Add a race of methods against the last of them."""
        cases = [Case(family, shape, method, length, chunk, **more) for method in methods]
        self.races.append(Race(tuple(cases), rounds))


def quick() -> Plan:
    """A few minutes: small models, to see that everything works."""
    plan = Plan()
    lengths = [512, 1024]
    methods = (EAGER, CHECKPOINTED, CHECKPOINTED_FULL, CHUNKED, TILED, COMPILED, OURS, KEPT)
    plan.measure(DECODER, "tiny", 128, dict.fromkeys(methods, lengths))
    plan.race(DECODER, "tiny", 128, 1024, (OURS, INDUCTOR, KEPT, COMPILED, CHUNKED), rounds=5)
    peers = (CHECKPOINTED, CHECKPOINTED_OLD, STREAMBP, STREAMBP_THIRDS, OURS, OURS_THIRDS)
    plan.measure(LLAMA, "tiny", 128, dict.fromkeys(peers, lengths))
    plan.gradients = _gradients("tiny", 512, 128)
    plan.race(LLAMA, "tiny", 128, 1024, (OURS, OURS_THIRDS, STREAMBP_THIRDS, STREAMBP), rounds=5)
    return plan


def default() -> Plan:
    """About half an hour on two cores that do nothing else."""
    plan = Plan()
    lengths = (2048, 4096, 8192, 16_384, 32_768)
    methods = (CHUNKED, OURS, KEPT, THREE, CHECKPOINTED, TILED, EAGER)
    plan.measure(DECODER, "small", 1024, dict.fromkeys(methods, lengths))
    plan.measure(DECODER, "small", 1024, {CHECKPOINTED_FULL: lengths[:4:2], COMPILED: lengths[:3]})
    methods = (OURS, STREAMBP, OURS_THIRDS, STREAMBP_THIRDS, KEPT, CHECKPOINTED)
    plan.measure(LLAMA, "small", 1024, dict.fromkeys(methods, lengths[:4]))
    methods = (CHUNKED, OURS, KEPT, CHECKPOINTED)
    for shape in ("mha", "tied", "window", "moe"):
        plan.measure(DECODER, shape, 512, dict.fromkeys(methods, lengths[:4]))
    plan.measure(DECODER, "small", 1024, dict.fromkeys(methods, lengths), dtype="bfloat16")
    plan.gradients = _gradients("small", 2048, 1024)
    plan.race(
        DECODER, "small", 1024, 4096, (OURS, INDUCTOR, KEPT, COMPILED, TILED, CHUNKED), rounds=3
    )
    plan.race(DECODER, "small", 1024, 8192, (OURS, KEPT, CHUNKED), rounds=3)
    peers = (OURS, OURS_THIRDS, STREAMBP_THIRDS, STREAMBP)
    versions = (CHECKPOINTED_OLD, CHECKPOINTED)
    plan.race(LLAMA, "small", 1024, 2048, (*versions, *peers), rounds=3)
    plan.race(LLAMA, "small", 1024, 4096, peers, rounds=3)
    return plan


def full() -> Plan:
    """The default and more races, at the longest lengths too: hours."""
    plan = default()
    for shape in ("mha", "tied", "window", "moe"):
        plan.race(DECODER, shape, 512, 8192, (OURS, KEPT, CHUNKED), rounds=5)
    plan.race(DECODER, "small", 1024, 2048, (OURS, KEPT, CHUNKED), rounds=7)
    plan.race(DECODER, "small", 1024, 16_384, (OURS, KEPT, CHUNKED), rounds=2)
    plan.race(DECODER, "small", 1024, 2048, (OURS, KEPT, CHUNKED), rounds=3, dtype="bfloat16")
    plan.race(LLAMA, "small", 1024, 8192, (OURS, OURS_THIRDS, STREAMBP_THIRDS, STREAMBP), rounds=3)
    return plan


def _gradients(shape: str, length: int, chunk: int) -> list[Case]:
    methods = (CHECKPOINTED, OURS, CHECKPOINTED_OLD, STREAMBP)
    return [Case(LLAMA, shape, method, length, chunk) for method in methods]


SETS = {"quick": quick, "default": default, "full": full}
