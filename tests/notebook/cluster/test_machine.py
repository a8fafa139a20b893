"""Test the readers of torch's files, the CUDA driver, /sys, /proc and the table of nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import machines
import pytest

from nbkit.notebook.cluster.machine import cuda_driver
from nbkit.notebook.cluster.machine.cuda_driver import CudaDevice, parse_answer
from nbkit.notebook.cluster.machine.machine import (
    Adapter,
    GpuLink,
    PciGpu,
    TorchBuild,
    near_cores,
    network_adapters,
    nvidia_driver_gpus,
    parse_build,
    parse_topology,
    pci_gpus,
    read_build,
    show_adapters,
    show_links,
)

# A driver of CUDA 12.4 with two T4s.
LIBCUDA = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGetCount(int *count) { *count = getenv("CUDA_VISIBLE_DEVICES") ? 0 : 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Tesla T4", size); return 0; }
int cuDeviceGetPCIBusId(char *bus, int size, int device) { snprintf(bus, size, "0000:0A:%02X.0", device); return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = 16 * device + i; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 15828320256ul; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 7 : 5; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "system not yet initialized"; return 0; }
"""


def test_the_build_of_torch_is_read_from_its_version_file() -> None:
    assert machines.torch("2.13.0", cuda="13.0") == TorchBuild("2.13.0", cuda="13.0")
    assert machines.torch("2.13.0+rocm7.1", hip="7.1.25424").kind == "ROCm"
    assert machines.torch("2.13.0+xpu", xpu="20250302").kind == "XPU"
    assert machines.torch("2.13.0+cpu").kind == "the CPU"


@pytest.mark.parametrize(
    ("version", "build"),
    [
        ("2.13.0+cpu", TorchBuild("2.13.0+cpu")),
        ("2.13.0+cu128", TorchBuild("2.13.0+cu128", cuda="12.8")),
        ("2.13.0+rocm7.1", TorchBuild("2.13.0+rocm7.1", hip="7.1")),
        ("2.13.0+xpu", TorchBuild("2.13.0+xpu", xpu="unknown")),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_without_the_file(version: str, build: TorchBuild) -> None:
    assert parse_build(version, "") == build


def test_the_installed_torch_is_read_without_being_imported() -> None:
    code = (
        "import sys; from nbkit.notebook.cluster.machine.machine import read_machine\n"
        "print(read_machine().torch, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.stdout.strip() == f"{read_build()} False", done.stderr
    import torch

    assert (read_build().cuda, read_build().hip) == (torch.version.cuda or "", torch.version.hip or "")


@pytest.mark.skipif(shutil.which("cc") is None, reason="a library is compiled")
def test_the_cuda_driver_is_read_in_a_separate_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def driver(fails: int) -> cuda_driver.CudaDriver | None:
        command = ["cc", "-shared", "-fPIC", f"-DFAILS={fails}", "-x", "c", "-", "-o", tmp_path / "libcuda.so.1"]
        subprocess.run(command, input=LIBCUDA, text=True, check=True)
        return cuda_driver.finish(cuda_driver.begin())

    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    working, broken = driver(0), driver(802)

    assert working and (working.version, working.error) == ((12, 4), "")
    assert working.devices[1] == CudaDevice(
        "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f", "Tesla T4", "0000:0a:01.0", 15095, (7, 5)
    )
    assert broken and (broken.version, broken.devices) == ((12, 4), ())
    assert (broken.error, broken.code) == ("system not yet initialized", 802)


def test_a_missing_cuda_library_is_an_error_and_a_wrong_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARIES", ("libnone.so", "/none/libcuda.so.1"))
    missing = cuda_driver.finish(cuda_driver.begin())

    assert missing and missing.version is None and missing.error.startswith("libnone.so: cannot open")
    assert parse_answer("") is parse_answer("Segmentation fault") is parse_answer('{"devices": [1]}') is None


def test_a_mig_instance_of_the_driver_gets_a_mig_uuid() -> None:
    answer = parse_answer(
        '{"version": [13, 0], "devices": [{"uuid": "c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "mib": 20096,'
        ' "name": "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bus": "0000:07:00.0", "capability": [8, 0]}]}'
    )

    assert answer and answer.devices[0].uuid == "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


def device(bus: str, vendor: str, kind: str, more: dict[str, str] | None = None) -> dict[str, str]:
    files = {"vendor": vendor, "class": kind, **(more or {})}
    return {f"sys/bus/pci/devices/{bus}/{name}": f"{text}\n" for name, text in files.items()}


def test_gpus_on_the_pci_bus_are_found_with_their_driver_and_near_cores(tmp_path: Path) -> None:
    root = machines.write_tree(
        tmp_path,
        {
            **device("0000:00:02.0", "0x8086", "0x030000"),  # part of the CPU
            **device("0000:1b:00.0", "0x10de", "0x030200", {"local_cpulist": "0-2,8-10"}),
            **device("0000:1b:00.1", "0x10de", "0x040300"),  # its sound device
            **device("0000:26:00.0", "0x1002", "0x120000"),
            **device("0000:3a:00.0", "0x8086", "0x038000"),
            **device("0000:41:00.0", "0x15b3", "0x020700"),  # InfiniBand
        },
        {
            "sys/bus/pci/devices/0000:1b:00.0/driver": "sys/bus/pci/drivers/nvidia",
            "sys/bus/pci/devices/0000:26:00.0/driver": "sys/bus/pci/drivers/amdgpu",
        },
    )

    assert pci_gpus(root) == (
        PciGpu("NVIDIA", "0000:1b:00.0", "nvidia"),
        PciGpu("AMD", "0000:26:00.0", "amdgpu", is_accelerator=True),
        PciGpu("Intel", "0000:3a:00.0"),
    )
    assert near_cores("0000:1b:00.0", root) == (0, 1, 2, 8, 9, 10)
    assert near_cores("0000:26:00.0", root) == ()


def test_gpus_without_a_device_file_are_not_counted(tmp_path: Path) -> None:
    text = "Model: \t\t Tesla T4\nIRQ:   \t\t 33\nGPU UUID: \t GPU-????????-????-????-????-????????????\n"
    folder = "proc/driver/nvidia/gpus/0000:00:0{}.0/information"
    files = {folder.format(4 + minor): f"{text}Device Minor: \t {minor}\nGPU Excluded:\t No\n" for minor in range(3)}
    root = machines.write_tree(tmp_path, {**files, "dev/nvidia0": "", "dev/nvidia2": ""})

    assert nvidia_driver_gpus(root) == ("Tesla T4", "Tesla T4")
    assert nvidia_driver_gpus(tmp_path / "none") == ()


def test_gpu_links_are_read_from_the_table_of_nvidia_smi() -> None:
    a6000 = parse_topology(machines.A6000_TOPOLOGY)

    assert a6000 == (GpuLink(0, 1, "NV4"), GpuLink(0, 2, "NODE"), GpuLink(1, 2, "NODE"))
    assert show_links(a6000) == "NVLink between 0-1; else PCIe through the CPU's bridges (NODE)"
    assert len(parse_topology(machines.H100_TOPOLOGY)) == 28
    assert show_links(()) == show_links(parse_topology("Failed to run topo command\n")) == ""


def test_active_network_ports_are_read(tmp_path: Path) -> None:
    def port(name: str, state: str, rate: str, kind: str) -> dict[str, str]:
        files = {"state": state, "rate": rate, "link_layer": kind}
        return {f"sys/class/infiniband/{name}/ports/1/{file}": f"{text}\n" for file, text in files.items()}

    root = machines.write_tree(
        tmp_path,
        {
            **port("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),
            **port("mlx5_1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),
            **port("mlx5_2", "1: DOWN", "40 Gb/sec (4X QDR)", "InfiniBand"),
            **port("mlx5_3", "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet"),
        },
    )
    found = network_adapters(root)

    assert found[0] == Adapter("mlx5_0", "InfiniBand", 400.0)
    assert show_adapters(found) == "2 InfiniBand ports of 400 Gb/s (mlx5_0 to mlx5_1), 1 RoCE port of 100 Gb/s (mlx5_3)"
