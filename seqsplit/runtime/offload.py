"""Host memory as the place where tensors wait for the backward."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

__all__ = ["from_host", "to_host"]


class _HostCopy:
    """A tensor's values in host memory.

    On an accelerator the copies run on a stream of their own, beside the computation, from and
    into pinned memory. On a CPU it is a plain copy; its memory is not taken from torch's
    allocator, as that of another device would not be, so that trackers tell the two apart.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device, self._ready = tensor.device, None
        self._fetched: Tensor | None = None
        if tensor.device.type == "cpu":
            self._host = _plain_memory(tensor)
            self._host.copy_(tensor)
            return
        if tensor.device.type == "meta":  # a prediction: nothing to copy, nothing that takes room
            self._host = tensor.shape, tensor.dtype
            return
        module = torch.get_device_module(tensor.device)
        side = _side_stream(tensor.device)
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        side.wait_stream(module.current_stream(tensor.device))
        with module.stream(side):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)

    def prefetch(self) -> None:
        """Begin to copy back."""
        if self._fetched is None:
            self._fetched = self._copy_back()

    def fetch(self) -> Tensor:
        """The tensor, on its device again."""
        fetched = self._fetched if self._fetched is not None else self._copy_back()
        self._fetched = None
        if self._ready is not None:
            stream = torch.get_device_module(self._device).current_stream(self._device)
            stream.wait_event(self._ready)
            fetched.record_stream(stream)
        return fetched

    def _copy_back(self) -> Tensor:
        if self._device.type == "meta":
            shape, dtype = self._host
            return torch.empty(shape, dtype=dtype, device="meta")
        if self._device.type == "cpu":
            return self._host.clone()
        module, side = torch.get_device_module(self._device), _side_stream(self._device)
        with module.stream(side):  # after the copy to the host, which ran on the same stream
            fetched = self._host.to(self._device, non_blocking=True)
            self._ready = side.record_event()
        return fetched


def to_host(tensor: Tensor) -> _HostCopy:
    """Put a tensor away in host memory."""
    return _HostCopy(tensor)


def from_host(copy: _HostCopy) -> Tensor:
    """Bring it back to its device."""
    return copy.fetch()


def _plain_memory(like: Tensor) -> Tensor:
    nbytes = math.prod(like.shape) * like.element_size()
    if nbytes == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    memory = torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)
    return memory.view(like.dtype).view(like.shape)


@functools.cache
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.get_device_module(device).Stream(device)
