"""Reads the state of a host's GPUs from NVIDIA's management library (NVML) in this process, with nvidia-ml-py.

nvidia-smi uses the same library, but each start of nvidia-smi locks the driver of every GPU, for 0.1 to 1 s on a host
with eight GPUs. NVML makes no CUDA context. nvidia-ml-py releases the interpreter while it waits for the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbkit.records.records import GpuHealth

# nvmlClocksEventReasons of NVIDIA's NVML reference, without idleness (1) and clocks set by a user (2, 0x100).
_SLOWED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}


def slowed_by(bits: int) -> str:
    """Return why a GPU's clocks are lowered, from NVML's bits; "" if nothing slows the GPU."""
    return ", ".join(name for bit, name in _SLOWED.items() if bits & bit)


class Nvml:
    """An open NVML library. `open_nvml` makes it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        # Older drivers know only the second name. Versions of nvidia-ml-py from before 2023 lack the first.
        self._reasons = (
            library.nvmlDeviceGetCurrentClocksEventReasons,
            library.nvmlDeviceGetCurrentClocksThrottleReasons,
        )
        library.nvmlInit()
        self._gpus = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]

    def gpus(self) -> tuple[GpuHealth, ...]:
        """Return the state of all GPUs of the host, in nvidia-smi's order. Values that are not reported are None."""
        return tuple(self._state(index, gpu) for index, gpu in enumerate(self._gpus))

    def _state(self, index: int, gpu: Any) -> GpuHealth:
        nvml = self._library
        watts = self._told(nvml.nvmlDeviceGetPowerUsage, gpu)
        limit = self._told(nvml.nvmlDeviceGetPowerManagementLimit, gpu)
        used = self._told(nvml.nvmlDeviceGetUtilizationRates, gpu)
        slowed = [bits for ask in self._reasons if (bits := self._told(ask, gpu)) is not None]
        return GpuHealth(
            self._told(nvml.nvmlDeviceGetUUID, gpu) or "",
            index,
            self._told(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
            self._told(nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_SM),
            self._told(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
            None if watts is None else watts / 1e3,
            None if limit is None else limit / 1e3,
            None if used is None else used.gpu / 100,
            slowed_by(slowed[0] if slowed else 0),
        )

    def _told(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except self._library.NVMLError:
            return None


def open_nvml() -> Nvml | None:
    """Open NVML and return it; None without nvidia-ml-py, or if NVML does not work."""
    try:
        import pynvml  # nvidia-ml-py's module
    except ImportError:
        return None
    try:
        return Nvml(pynvml)
    except (pynvml.NVMLError, AttributeError):
        return None
