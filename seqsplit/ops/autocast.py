"""The autocast state of a call, to be restored where the call is made again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Autocast", "is_autocast_on"]

_WITH_AUTOCAST = ("cpu", "cuda")


def is_autocast_on(device: torch.device) -> bool:
    """Whether ops on a device run under autocast."""
    return device.type in _WITH_AUTOCAST and torch.is_autocast_enabled(device.type)


@dataclass(frozen=True)
class Autocast:
    """The autocast state around a call: ``(device type, enabled, dtype)`` and the cache."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool

    @staticmethod
    def current() -> Autocast:
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        return Autocast(
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in devices
            ),
            torch.is_autocast_cache_enabled(),
        )

    @property
    def in_half(self) -> bool:
        """Whether it computes in float16, whose small numbers are lost unless a loss is scaled."""
        return any(on and dtype == torch.float16 for _, on, dtype in self.states)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The same state again: a backward usually runs outside the user's ``with autocast``."""
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.states:
                stack.enter_context(
                    torch.autocast(
                        device, dtype=dtype, enabled=enabled, cache_enabled=self.cache_enabled
                    )
                )
            yield
