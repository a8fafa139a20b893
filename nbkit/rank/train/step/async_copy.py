"""Numbers on their way from the device to the host. Reading one waits for its own copy, not for later device work."""

from __future__ import annotations

import torch
from torch import Tensor


class Underway:
    """A tensor being copied to the host; on the CPU the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Tensor:
        """The tensor on the host; waits until it is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def sent(number: float | Tensor) -> float | Underway:
    """`number` as it is now, whatever is written over it later; one on a GPU is not waited for."""
    if isinstance(number, Tensor) and number.device.type == "cuda":
        return Underway(number.detach())
    return float(number)


def arrived(number: float | Underway) -> float:
    """The number that was sent."""
    return float(number.read()) if isinstance(number, Underway) else number
