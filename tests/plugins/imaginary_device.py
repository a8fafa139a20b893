"""A device kind from outside of nbkit, with all that ranks need beyond torch.accelerator."""

from __future__ import annotations

from types import MappingProxyType

import torch

from nbkit.rank.device import DeviceKind


class Imaginary(DeviceKind):
    """Devices that torch calls xpu, and whose backend is xccl."""

    name = "xpu"
    backend = "xccl"
    environment = MappingProxyType({"IMAGINARY_QUEUES": "32"})
    interface_variable = "IMAGINARY_SOCKET_IFNAME"
    error_prefixes = ("Imaginary error: ",)
    device_failed = ("the lamp has gone out",)
    no_memory = ("no room in the lamp",)

    def uuid(self, device: torch.device) -> str:
        return f"lamp-{device.index}"
