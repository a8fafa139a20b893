"""Copy numbers from the device to the host. Reading one waits for its own copy, not for later device work."""

from __future__ import annotations

from torch import Tensor

from nbkit.rank.device import Event, accelerator


class DeviceScalar:
    """A tensor being copied to the host; on the CPU the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: Event | None = None
        if accelerator().holds(tensor):
            self._host, self._copied = accelerator().fetch(tensor)

    def arrived(self) -> bool:
        """Return True if the tensor is on the host already. Any thread."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> Tensor:
        """Return the tensor on the host; waits until it is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def to_host_async(number: float | Tensor) -> float | DeviceScalar:
    """Return `number` as it is now, whatever is written over it later. One on a GPU is not waited for."""
    if isinstance(number, Tensor) and accelerator().holds(number):
        return DeviceScalar(number.detach())
    return float(number)


def ready(number: float | DeviceScalar) -> float:
    """Return the number; waits until it is there."""
    return float(number.read()) if isinstance(number, DeviceScalar) else number
