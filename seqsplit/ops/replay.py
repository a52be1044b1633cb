"""Replay: what the recomputation of a chunk takes from its forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqsplit.ops.held import Held

__all__ = ["Replay", "replayed"]


class Replay:
    """What the recomputation of a chunk takes from its forward.

    Random ops draw what they drew: each op of each chunk has a slot with the state of its device's
    generator before it ran, so that it does not matter which ops are run again, or in which
    order. The generators themselves are left by :meth:`restoring` where the forward had brought
    them. Ops that ask for it are given their former results, where these are kept.

    Args:
        keeps_results: whether results are kept.
    """

    def __init__(self, *, keeps_results: bool = False) -> None:
        self.recording = True
        self.chunk = 0
        self._keeps_results = keeps_results
        self._states: dict[tuple[int, int], tuple[torch.device, Tensor]] = {}
        self.results: dict[tuple[int, int], Any] = {}  # by chunk and slot, tensors held

    def run(self, slot: int, op: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a random op."""
        if self.recording:
            device = _device_of(args, kwargs)
            self._states[self.chunk, slot] = (device, _generator_state(device))
            return op(*args, **kwargs)
        device, state = self._states[self.chunk, slot]
        _set_generator_state(device, state)
        return op(*args, **kwargs)

    def once(self, slot: int, compute: Callable[[], Any]) -> Any:
        """The tensors (and numbers) that ``compute`` gives, or gave in the forward."""
        if not self.recording and (self.chunk, slot) in self.results:
            return pytree.tree_map_only(Held, Held.get, self.results[self.chunk, slot])
        results = compute()
        if self.recording and self._keeps_results:
            self.results[self.chunk, slot] = pytree.tree_map_only(Tensor, Held, results)
        return results

    def release(self) -> None:
        """Forget the results."""
        self.results.clear()

    def restoring(self) -> _Restoring:
        """A context that puts the generators back as they were."""
        return _Restoring({device for device, _ in self._states.values()})


class _Restoring:
    def __init__(self, devices: set[torch.device]) -> None:
        self._devices = devices

    def __enter__(self) -> None:
        self._before = {device: _generator_state(device) for device in self._devices}

    def __exit__(self, *_: Any) -> None:
        for device, state in self._before.items():
            _set_generator_state(device, state)


@functools.cache
def replayed(op: Callable) -> Callable:
    """The op as a body calls it: ``(replay, slot, *args, **kwargs)``, its generator's state
    recorded or replayed."""

    def run(replay: Replay, slot: int, *args: Any, **kwargs: Any) -> Any:
        return replay.run(slot, op, args, kwargs)

    run.__name__ = f"replayed_{getattr(op, '__name__', 'op').replace('.', '_')}"
    run.__module__ = __name__
    run.replays = op
    return run


_HOST = ("cpu", "meta")  # whose random numbers come from the CPU's generator, or are none


def _device_of(args: tuple, kwargs: dict) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, torch.device):
            return value
    return torch.device("cpu")


def _generator_state(device: torch.device) -> Tensor:
    if device.type in _HOST:
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type in _HOST:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
