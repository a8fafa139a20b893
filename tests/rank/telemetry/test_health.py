"""Test the health of ranks and hosts: only the first rank of a host reads nvidia-smi, and only during a training."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nbkit.rank.telemetry.health import Health, core_mhz, parse_gpus
from nbkit.rank.telemetry.nvml import open_nvml, slowed_by
from nbkit.records.records import GpuHealth, HealthRecord
from nbkit.wire import nvidia_smi

# Written by hand in the documented form, not recorded from a machine: GPU 1 is slowed by its power limit and heat,
# GPU 2 leaves out values that the others report.
ANSWER = """\
0, GPU-a1, 1980, 1980, 41, 118.32, 700.00, 0, 0x0000000000000001
1, GPU-b2, 1215, 1980, 87, 698.90, 700.00, 100, 0x0000000000000024
2, GPU-c3, [N/A], [N/A], 55, [N/A], [N/A], 7, [Not Supported]
"""


def test_the_output_of_nvidia_smi_is_parsed() -> None:
    idle, hot, shy = parse_gpus(ANSWER + "Unable to determine the device handle\n")

    assert (idle.uuid, idle.mhz, idle.celsius, idle.watts, idle.busy, idle.slowed) == (
        "GPU-a1",
        1980,
        41,
        118.32,
        0,
        "",
    )
    assert (hot.index, hot.mhz, hot.top_mhz, hot.limit_watts, hot.busy) == (1, 1215, 1980, 700, 1)
    assert hot.slowed == "power cap, thermal slowdown"
    assert (shy.mhz, shy.watts, shy.busy, shy.slowed) == (None, None, 0.07, "")


def test_an_idle_gpu_and_a_fixed_clock_are_no_slowdown() -> None:
    assert [slowed_by(bits) for bits in (0x1, 0x102, 0)] == [""] * 3
    assert slowed_by(0xC8) == "hardware slowdown, thermal slowdown (hardware), power brake"


def test_clocks_of_cores_are_read_if_the_kernel_reports_them(tmp_path: Path) -> None:
    assert core_mhz(tmp_path) is None
    for core, khz in ((0, "2400000\n"), (1, "3000000\n"), (2, "what\n")):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(khz)
    assert core_mhz(tmp_path) == 2700


def test_health_is_read_during_training_and_the_host_only_by_its_first_rank() -> None:
    seen: list[HealthRecord] = []
    first, other = (Health(seen.append, gpu="", first=one, every_s=0.05) for one in (True, False))
    try:
        time.sleep(0.2)
        assert seen == []  # no training runs
        for one in (first, other):
            one.step = 7
            one.run(True)
        until(lambda: sum(record.cores > 0 for record in seen) > 2 and sum(record.cores == 0 for record in seen) > 2)
    finally:
        for one in (first, other):
            one.run(False)
    time.sleep(0.2)
    count = len(seen)
    time.sleep(0.2)
    assert len(seen) == count and all(record.step == 7 and record.rss > 1 << 20 for record in seen)
    assert all(record.load is not None and record.gpus == () for record in seen if record.cores)
    for one in (first, other):
        one.end()


def test_one_busy_core_counts_as_one() -> None:
    looking = Health(lambda record: None, gpu="", first=False)
    looking.look()
    began = time.process_time()
    while time.process_time() - began < 0.3:
        pass
    wall, at = looking._at, time.monotonic()
    assert looking.look().cpu == pytest.approx(0.3 / (at - wall), rel=0.3)
    looking.end()


def test_one_nvidia_smi_call_reads_all_gpus_with_an_older_driver_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    works = True

    def answer(smi: str, question: list[str], seconds: float) -> list[str]:
        if not works:
            raise subprocess.SubprocessError("exit status 9")
        asked.append(question[0])
        if "clocks_event_reasons" in question[0]:
            raise subprocess.SubprocessError("not a valid field to query")
        return [ANSWER]

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvidia_smi, "find", lambda: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(nvidia_smi, "ask", answer)
    first = Health(lambda record: None, gpu="GPU-b2", first=True)
    assert [gpu.uuid for gpu in first.look().gpus] == ["GPU-a1", "GPU-b2", "GPU-c3"] and len(asked) == 2
    assert Health(lambda record: None, gpu="GPU-b2", first=False).look().gpus == () and len(asked) == 2

    works = False
    assert first.look().gpus == ()
    works = True
    assert first.look().gpus == () and len(asked) == 2  # nvidia-smi is not called again


# The NVML functions that nbkit calls, in C, like those of a driver without "event reasons": GPU 1 is that of ANSWER,
# GPU 0 reports only its UUID.
LIBRARY = """
#include <string.h>
#define EXPORT(name) int name
static long gpus[2];
EXPORT(nvmlInitWithFlags)(unsigned flags) { return 0; }
EXPORT(nvmlInit_v2)(void) { return 0; }
EXPORT(nvmlDeviceGetCount_v2)(unsigned *n) { *n = 2; return 0; }
EXPORT(nvmlDeviceGetHandleByIndex_v2)(unsigned i, void **gpu) { *gpu = &gpus[i]; return 0; }
EXPORT(nvmlDeviceGetUUID)(void *gpu, char *to, unsigned n) { strcpy(to, gpu == gpus ? "GPU-a1" : "GPU-b2"); return 0; }
static int told(void *gpu, unsigned *to, unsigned value) { *to = value; return gpu == gpus ? 3 : 0; }
EXPORT(nvmlDeviceGetClockInfo)(void *gpu, int kind, unsigned *to) { return told(gpu, to, kind == 1 ? 1215 : 0); }
EXPORT(nvmlDeviceGetMaxClockInfo)(void *gpu, int kind, unsigned *to) { return told(gpu, to, kind == 1 ? 1980 : 0); }
EXPORT(nvmlDeviceGetTemperature)(void *gpu, int kind, unsigned *to) { return told(gpu, to, 87); }
EXPORT(nvmlDeviceGetPowerUsage)(void *gpu, unsigned *to) { return told(gpu, to, 698900); }
EXPORT(nvmlDeviceGetPowerManagementLimit)(void *gpu, unsigned *to) { return told(gpu, to, 700000); }
EXPORT(nvmlDeviceGetUtilizationRates)(void *gpu, unsigned *to) { return told(gpu, to, 100); }
EXPORT(nvmlDeviceGetCurrentClocksThrottleReasons)(void *gpu, unsigned long long *to) {
    *to = 0x24;
    return gpu == gpus ? 3 : 0;
}
"""


def test_nvidia_ml_py_reads_the_values_of_nvidia_smi_without_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pynvml = pytest.importorskip("pynvml", reason="pip install nvidia-ml-py")
    (tmp_path / "nvml.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-o", tmp_path / "nvml.so", tmp_path / "nvml.c"], check=True)
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(tmp_path / "nvml.so")))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(nvidia_smi, "ask", lambda *_, **__: pytest.fail("nvidia-smi was started"))

    shy, hot = Health(lambda record: None, gpu="GPU-b2", first=True).look().gpus
    assert hot == parse_gpus(ANSWER)[1]
    assert shy == GpuHealth("GPU-a1", 0, None, None, None, None, None, None, "")


def test_without_a_driver_nvidia_ml_py_is_not_used() -> None:
    assert nvidia_smi.find() is not None or open_nvml() is None


def until(what: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)
