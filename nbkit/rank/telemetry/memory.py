"""Counts a rank's memory by use: bytes of parameters, gradients and optimizer state, from the tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from nbkit.rank.device import accelerator
from nbkit.records.records import MemoryRecord


def storage_bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    """Bytes of the storages behind these tensors. One that is in `seen` (by address) counts nothing; others join it."""
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        storage = tensor.untyped_storage()
        # A placeholder and an emptied storage have no address; each views of one storage has the same.
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def memory_of(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    held: Iterable[Tensor] = (),
    device: torch.device | None = None,
) -> MemoryRecord:
    """What `module`, its gradients and its optimizer's state take on this rank. Waits for no device.

    held: further parameters that the optimizer sees, such as shards. Gradients are there after a backward pass.
    Every tensor is visited, a microsecond each: not for every step.
    """
    params = [*module.parameters(), *held]
    seen: set[int] = set()
    parameters = storage_bytes(params, seen)
    gradients = storage_bytes((p.grad for p in params), seen)
    state = optimizer.state.values() if optimizer is not None else ()
    moments = storage_bytes((value for values in list(state) for value in values.values()), seen)
    buffers = storage_bytes(module.buffers(), seen)
    now, peak, source = bytes_held(device)
    return MemoryRecord(
        step,
        parameters=parameters,
        gradients=gradients,
        optimizer=moments,
        buffers=buffers,
        now=now,
        peak=peak,
        source=source,
    )


def bytes_held(device: torch.device | None = None) -> tuple[int, int, str]:
    """(bytes now, bytes at the peak, "cuda": of the allocator of `device`, or "rss": of this process)."""
    if device is not None and accelerator().holds(device):
        return *accelerator().memory(device), "cuda"
    now = psutil.Process().memory_info().rss
    return now, max(now, _peak_rss()), "rss"


def reset_peak(device: torch.device | None = None) -> None:
    """The peak counts from here on (on the CPU where the kernel allows it)."""
    if device is not None and accelerator().holds(device):
        accelerator().reset_peak(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak_rss() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
