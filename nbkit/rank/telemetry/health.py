"""Watches a rank and its host while a job trains: CPU use, memory, load, clocks, and GPUs if there are any.

A thread measures every few seconds, in parallel to the steps. On each host, one rank also measures what the ranks of
the host share, including all GPUs. For GPUs it uses nvidia-ml-py, or nvidia-smi if that is missing. Values that the
machine does not report are left out.

`memory_of` counts a rank's memory by use: the bytes of parameters, gradients and optimizer state.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from nbkit.rank.device import accelerator
from nbkit.rank.telemetry.nvml import open_nvml, slowed_by
from nbkit.records.records import GpuHealth, HealthRecord, MemoryPart, MemoryRecord
from nbkit.wire import nvidia_smi

_EVERY_S, _FIRST_S = 5.0, 1.0
_SECONDS_TO_ANSWER = 20.0  # without persistence mode, the driver wakes each GPU for the query
_QUERY = "index,uuid,clocks.sm,clocks.max.sm,temperature.gpu,power.draw,power.limit,utilization.gpu,{reasons}.active"
_REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")  # older drivers know only the second name
_BITS = re.compile("0x[0-9a-fA-F]+")


def parse_gpus(answer: str) -> tuple[GpuHealth, ...]:
    """Parse nvidia-smi's CSV answer to the query. Lines without the nine columns are skipped."""
    found = []
    for cells in nvidia_smi.rows(answer):
        if len(cells) == 9 and cells[0].isdigit():
            clock, top, celsius, watts, limit, busy = map(nvidia_smi.number, cells[2:8])
            share = None if busy is None else busy / 100
            slowed = slowed_by(int(cells[8], 16) if _BITS.fullmatch(cells[8]) else 0)
            found.append(GpuHealth(cells[1], int(cells[0]), clock, top, celsius, watts, limit, share, slowed))
    return tuple(found)


def core_mhz(root: Path = Path("/sys/devices/system/cpu")) -> float | None:
    """Return the mean clock of the host's cores in MHz; None if the kernel does not report it."""
    known = []
    for path in root.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        try:
            known.append(int(path.read_text()) / 1e3)
        except (OSError, ValueError):
            continue
    return sum(known) / len(known) if known else None


class Health:
    """A thread that measures while it is running, and calls `note` with each record.

    gpu: the UUID of this rank's GPU, "" without one. first: this rank also measures what the ranks of its host share.
    """

    def __init__(
        self, note: Callable[[HealthRecord], None], *, gpu: str, first: bool, every_s: float = _EVERY_S
    ) -> None:
        self._note, self._gpu, self._first, self._every_s = note, gpu, first, every_s
        self._nvml = open_nvml() if gpu and first else None
        self._smi = nvidia_smi.find() if gpu and first and self._nvml is None else None
        self._reasons = list(_REASONS)
        self._process = psutil.Process()
        self._used = self._at = 0.0
        self._changed = threading.Condition()
        self._running = self._ended = False
        self.step = 0
        threading.Thread(target=self._run, name="nbkit-health", daemon=True).start()

    def run(self, running: bool) -> None:
        """Start to measure, or pause."""
        with self._changed:
            self._running = running
            self._changed.notify()

    def end(self) -> None:
        """End the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _run(self) -> None:
        wait = _FIRST_S
        while True:
            with self._changed:
                if not self._running:
                    self._changed.wait_for(lambda: self._running or self._ended)
                    self._used, self._at, wait = time.process_time(), time.monotonic(), min(_FIRST_S, self._every_s)
                over = self._changed.wait_for(lambda: self._ended or not self._running, wait)
                if self._ended:
                    return
            if not over:
                self._note(self.look())
                wait = self._every_s

    def look(self) -> HealthRecord:
        """Return a record of the current state."""
        used, at = time.process_time(), time.monotonic()
        cpu = (used - self._used) / max(at - self._at, 1e-9)
        self._used, self._at = used, at
        rss = self._process.memory_info().rss
        own = HealthRecord(self.step, time.perf_counter_ns(), cpu=cpu, rss=rss, gpu=self._gpu)
        if not self._first:
            return own
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return replace(own, load=load, cores=os.cpu_count() or 0, mhz=core_mhz(), gpus=self._gpus())

    def _gpus(self) -> tuple[GpuHealth, ...]:
        if self._nvml is not None:
            return self._nvml.gpus()
        while self._smi is not None and self._reasons:
            query = f"--query-gpu={_QUERY.format(reasons=self._reasons[0])}"
            try:
                (answer,) = nvidia_smi.ask(self._smi, [query, nvidia_smi.CSV], seconds=_SECONDS_TO_ANSWER)
                return parse_gpus(answer)
            except (OSError, subprocess.TimeoutExpired):
                self._smi = None  # nvidia-smi does not work here, and each attempt takes time
            except subprocess.SubprocessError:
                del self._reasons[0]  # this driver does not know the name
        return ()


def storage_bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    """Return the bytes of the storages of these tensors.

    Storages whose address is in `seen` are not counted. The addresses of the others are added to `seen`.
    """
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        storage = tensor.untyped_storage()
        # A placeholder and an emptied storage have no address. All views of one storage have the same address.
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def element_bytes(tensors: Iterable[Any], seen: set[tuple[int, int]]) -> int:
    """Return the bytes of the elements of these tensors.

    Tensors whose (address, bytes) is in `seen` are not counted. The others are added to `seen`.
    """
    total = 0
    for tensor in tensors:
        # Placeholders and emptied storages take no memory.
        if not isinstance(tensor, Tensor) or not tensor.untyped_storage().nbytes():
            continue
        place = tensor.data_ptr(), tensor.nbytes
        if place not in seen:
            seen.add(place)
            total += tensor.nbytes
    return total


def memory_of(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    held: Iterable[Tensor] = (),
    device: torch.device | None = None,
    peak: int = 0,
    named: tuple[MemoryPart, ...] = (),
) -> MemoryRecord:
    """Return the bytes that `module`, its gradients and its optimizer's state take on this rank. Waits for no device.

    held: further parameters that the optimizer sees, such as shards. peak: bytes at the peak of a step, 0 if not
    counted. named: the parts of the peak. Call it after a backward pass, when gradients exist. It visits every tensor,
    which takes a microsecond each, so do not call it in every step.

    It counts elements, as the formulas do. The padding of the flat buffers behind gradients, and the optimizer's step
    counters, are not counted. Both are part of the peak.
    """
    params = [*module.parameters(), *held]
    seen: set[tuple[int, int]] = set()
    parameters = element_bytes(params, seen)
    gradients = element_bytes((p.grad for p in params), seen)
    state = optimizer.state.values() if optimizer is not None else ()
    kept = (value for values in list(state) for key, value in values.items() if key != "step")
    moments = element_bytes(kept, seen)
    buffers = element_bytes(module.buffers(), seen)
    now, _, source = bytes_held(device)
    return MemoryRecord(
        step,
        parameters=parameters,
        gradients=gradients,
        optimizer=moments,
        buffers=buffers,
        now=now,
        peak=peak,
        source="storages" if source == "rss" else source,
        named=named,
    )


def bytes_held(device: torch.device | None = None) -> tuple[int, int, str]:
    """Return (bytes now, bytes at the peak, source).

    The bytes are those of the allocator of `device`, and the source is the kind of device. Without an accelerator they
    are this process's resident set size, and the source is "rss".
    """
    if device is not None and accelerator().holds(device):
        return *accelerator().memory(device), accelerator().kind
    now = psutil.Process().memory_info().rss
    return now, max(now, _peak_rss()), "rss"


def reset_peak(device: torch.device | None = None) -> None:
    """Reset the peak, so that it counts from now on (on the CPU only if the kernel allows it)."""
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
