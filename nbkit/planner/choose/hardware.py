"""Hardware described in a line: "128 x 8 H100" is 128 nodes of 8 devices each; "8 A100" is one node.

Figures are those of the makers' public data sheets: dense bf16 (fp16 of the V100), one direction of a link. The network
is what such nodes commonly have for each device; `net=` in the line says otherwise: "2 x 8 H100 net=12.5GB/s".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbkit.errors import UsageError


@dataclass(frozen=True)
class Device:
    """flops: per second. memory: bytes. bandwidth: of its memory; near, far: bytes per second that it sends within a
    node, and to others."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    near: float
    far: float


DEVICES = {
    device.name: device
    for device in (
        Device("V100", 125e12, 32e9, 0.9e12, 150e9, 12.5e9),
        Device("A100", 312e12, 80e9, 2.039e12, 300e9, 25e9),
        Device("A100-40GB", 312e12, 40e9, 1.555e12, 300e9, 25e9),
        Device("H100", 989e12, 80e9, 3.35e12, 450e9, 50e9),
        Device("H200", 989e12, 141e9, 4.8e12, 450e9, 50e9),
        Device("B200", 2250e12, 180e9, 8e12, 900e9, 50e9),
        Device("L40S", 362e12, 48e9, 0.864e12, 32e9, 12.5e9),
        Device("RTX4090", 165e12, 24e9, 1.008e12, 32e9, 12.5e9),
        Device("MI300X", 1307e12, 192e9, 5.3e12, 448e9, 50e9),
    )
}
"""By name."""

_LINE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*x?\s*([a-z][\w-]*)((?:\s+\w+=\S+)*)", re.IGNORECASE)
_SPEED = re.compile(r"net=([\d.]+)\s*(GB/s|Gbit/s)", re.IGNORECASE)


@dataclass(frozen=True)
class Hardware:
    """nodes of `node` devices each."""

    nodes: int
    node: int
    device: Device

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.node

    @classmethod
    def parse(cls, text: str) -> Hardware:
        """Raises UsageError for a line that says no hardware, or a device that is not in the table."""
        found = _LINE.fullmatch(text.strip())
        names = {name.lower(): name for name in DEVICES}
        if found is None or found[3].lower() not in names or not int(found[2]) or found[1] == "0":
            raise UsageError(
                f"{text!r} says no hardware that is known.",
                numbers=f"devices: {', '.join(DEVICES)}",
                hint='on="128 x 8 H100", 128 nodes of 8; on="8 A100", one node',
            )
        device = DEVICES[names[found[3].lower()]]
        if found[4].strip():
            speed = _SPEED.fullmatch(found[4].strip())
            if speed is None or not float(speed[1]):
                raise UsageError(
                    f"{found[4].strip()!r} says no speed of a network.",
                    numbers="net=50GB/s or net=400Gbit/s, of each device",
                    hint=f'on="{text.removesuffix(found[4])} net=50GB/s"',
                )
            far = float(speed[1]) * (1e9 if speed[2].lower() == "gb/s" else 1e9 / 8)
            device = Device(device.name, device.flops, device.memory, device.bandwidth, device.near, far)
        return cls(int(found[1] or 1), int(found[2]), device)

    def __str__(self) -> str:
        return f"{self.nodes} x {self.node} {self.device.name}" if self.nodes > 1 else f"{self.node} {self.device.name}"
