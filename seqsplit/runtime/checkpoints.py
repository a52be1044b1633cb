"""Chain: the inputs of segments, of which only some are stored.

The segments of a plan follow each other; the values that cross from the earlier to the later ones
at a place are the *state* there. A chain stores the states that its schedule names. When the
backward comes to a segment whose state was not stored, the segments since the last one that was
run forward again, and states are stored on the way as the schedule says: as many as have been
released since. Each segment is a node of the autograd graph all the same, so that a layer's
gradients are there as soon as it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from seqsplit.ir.plan import ChainSpec
from seqsplit.ops.held import Held, Hooks
from seqsplit.runtime.chunk_loop import ChunkLoop
from seqsplit.runtime.offload import from_host, to_host
from seqsplit.runtime.refusals import check_versions

__all__ = ["Chain", "Link"]

Value = tuple[int, int]  # output number `slot` of step number `step`


@dataclass(frozen=True)
class Link:
    """The place of a segment in a chain."""

    chain: Chain
    step: int

    def keep(
        self, loop: ChunkLoop, operands: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Keep what is needed to run the segment again.

        Returns:
            The operands that the segment has to keep itself: weights and constants.
        """
        return self.chain.keep(self.step, loop, operands, outputs)

    def pass_by(self, outputs: Sequence[Tensor]) -> None:
        """Keep nothing: the segment will not be run again."""
        self.chain.pass_by(self.step, outputs)

    def operands(self, own: Sequence[Tensor]) -> tuple[list[Tensor], set[int]]:
        """All operands, given those that the segment has kept itself.

        Returns:
            The operands, and the numbers of those that are copies made for this call, which may
            be overwritten.
        """
        return self.chain.operands(self.step, own)

    def release(self) -> None:
        """Forget what only this segment and later ones need."""
        self.chain.release(self.step)


class Chain:
    """The states of one call.

    Args:
        spec: the schedule.
    """

    def __init__(self, spec: ChainSpec) -> None:
        self._spec = spec
        self._hooks: Hooks | None = (to_host, from_host) if spec.offload == "cpu" else None
        self._loops: dict[int, ChunkLoop] = {}
        # By step, by operand, with their versions: a segment that is run again for another's sake
        # need not have a backward of its own, in which autograd would look at them.
        self._constants: dict[int, dict[int, tuple[Tensor, int]]] = {}
        self._entries: dict[int, Held] = {}  # activations that come from outside of the chain
        self._alive: dict[Value, Tensor] = {}  # of the forward
        self._stored: dict[int, dict[Value, Held]] = {0: {}}

    def keep(
        self, step: int, loop: ChunkLoop, operands: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """See :meth:`Link.keep`."""
        self._loops[step], own, constants = loop, [], {}
        for index, (operand, source) in enumerate(zip(operands, self._spec.sources[step])):
            if source in self._alive:
                continue
            if isinstance(source, int) and operand.requires_grad and not operand.is_leaf:
                if source not in self._entries:
                    self._entries[source] = Held(operand, self._hooks)
                continue
            own.append(operand)
            constants[index] = operand.detach(), operand._version
        self._constants[step] = constants
        self.pass_by(step, outputs)
        return own

    def pass_by(self, step: int, outputs: Sequence[Tensor]) -> None:
        """See :meth:`Link.pass_by`."""
        self._pass(step, outputs, self._alive)
        if step + 1 in self._spec.stored:
            self._store(step + 1, self._alive)

    def operands(self, step: int, own: Sequence[Tensor]) -> tuple[list[Tensor], set[int]]:
        """See :meth:`Link.operands`."""
        own, state = iter(own), self._state(step)
        constants = self._constants[step]
        operands = [
            next(own) if index in constants else self._look_up(source, state)
            for index, source in enumerate(self._spec.sources[step])
        ]
        copies = self._hooks is not None
        return operands, {i for i in range(len(operands)) if copies and i not in constants}

    def release(self, step: int) -> None:
        """See :meth:`Link.release`."""
        self._alive.clear()
        for place in [place for place in self._stored if place >= max(step, 1)]:
            del self._stored[place]
        for known in (self._constants, self._loops):
            known.pop(step, None)
        for source in [n for n in self._entries if self._spec.first_use[n] >= step]:
            del self._entries[source]

    # -- states ------------------------------------------------------------------------------

    def _state(self, step: int) -> dict[Value, Tensor]:
        """The values that cross to ``step`` and beyond."""
        again = self._spec.again.get(step)
        if step in self._stored:
            first, stored = step, frozenset()
        elif again is not None and again.first in self._stored:
            first, stored = again.first, again.stored
        else:  # the graph is differentiated once more
            first, stored = max(place for place in self._stored if place < step), frozenset()
        state = {value: held.get() for value, held in self._stored[first].items()}
        self._prefetch(first)
        for place in range(first, step):
            if place not in self._loops:  # nothing in it needs a gradient: it has left constants
                continue
            self._pass(place, self._run_again(place, state), state)
            if place + 1 in stored:
                self._store(place + 1, state)
        return state

    def _run_again(self, step: int, state: dict[Value, Tensor]) -> Sequence[Tensor]:
        loop, constants = self._loops[step], self._constants[step]
        check_versions(list(constants.values()), loop.run.segment.scope)
        operands = [
            constants[index][0] if index in constants else self._look_up(source, state)
            for index, source in enumerate(self._spec.sources[step])
        ]
        return loop.forward_again(operands)

    def _look_up(self, source: Value | int, state: dict[Value, Tensor]) -> Tensor:
        return self._entries[source].get() if isinstance(source, int) else state[source]

    def _pass(self, step: int, outputs: Sequence[Tensor], state: dict[Value, Tensor]) -> None:
        """Go past a step: its outputs join the state, what nobody needs later leaves it."""
        for slot, output in enumerate(outputs):
            state[step, slot] = output.detach()
        for value in [v for v in state if self._spec.last_use.get(v, -1) <= step]:
            del state[value]

    def _store(self, place: int, state: dict[Value, Tensor]) -> None:
        self._stored[place] = {value: Held(held, self._hooks) for value, held in state.items()}

    def _prefetch(self, before: int) -> None:
        place = max((place for place in self._stored if place < before), default=None)
        for held in self._stored.get(place, {}).values():
            held.prefetch()
