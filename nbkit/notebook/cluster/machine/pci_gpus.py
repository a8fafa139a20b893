"""The GPUs that Linux sees on the PCI bus, whoever made them and whether or not anything can use them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# VGA, 3D and display controllers; AMD's Instinct calls itself a processing accelerator.
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_ACCELERATOR = "0x1200"
# Intel's graphics that is part of a CPU is always there.
_INTEL_IN_CPU = "0000:00:02."


@dataclass(frozen=True)
class PciGpu:
    """bus: "0000:07:00.0". driver: of Linux ("nvidia", "amdgpu", "xe", "nouveau"), "" without one.

    is_accelerator: made to compute, no screen can be plugged in.
    """

    vendor: str
    bus: str
    driver: str = ""
    is_accelerator: bool = False


def pci_gpus(root: Path = Path("/")) -> tuple[PciGpu, ...]:
    """In the order of the bus, without what is part of an Intel CPU."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind, vendor = _read(device / "class")[:6], _VENDORS.get(_read(device / "vendor"))
        if vendor is None or kind not in _CLASSES or device.name.startswith(_INTEL_IN_CPU):
            continue
        driver = device / "driver"
        name = driver.resolve().name if driver.exists() else ""
        found.append(PciGpu(vendor, device.name, name, kind == _ACCELERATOR))
    return tuple(found)


def nvidia_driver_gpus(root: Path = Path("/")) -> tuple[str, ...]:
    """The names of the GPUs that NVIDIA's kernel driver holds and this container has a device file of."""
    found = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in _lines(path))}
        if (root / f"dev/nvidia{told.get('Device Minor', '')}").exists():
            found.append(told.get("Model", "NVIDIA GPU"))
    return tuple(found)


def near_cores(bus: str, root: Path = Path("/")) -> tuple[int, ...]:
    """The CPU cores on the socket of the PCI device at `bus`; () where Linux does not say."""
    cores: list[int] = []
    for part in _read(root / "sys/bus/pci/devices" / bus / "local_cpulist").split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def _read(path: Path) -> str:
    return "".join(_lines(path)[:1]).strip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
