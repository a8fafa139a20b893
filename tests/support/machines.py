"""Machines that we do not have: what their drivers and Linux print, and what nbkit reads from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nbkit.notebook.cluster.machine.cuda_driver import CudaDriver, parse_answer
from nbkit.notebook.cluster.machine.gpus import Survey, parse_driver, parse_gpus
from nbkit.notebook.cluster.machine.machine import Adapter, Machine, TorchBuild, parse_build, parse_topology

# torch/version.py of wheels, shortened to the lines that differ.
VERSION_PY = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = {hip}
rocm: Optional[str] = {rocm}
xpu: Optional[str] = {xpu}
"""


def torch(version: str, *, cuda: str = "", hip: str = "", xpu: str = "") -> TorchBuild:
    values = {name: repr(value or None) for name, value in {"cuda": cuda, "hip": hip, "rocm": hip, "xpu": xpu}.items()}
    return parse_build(version, VERSION_PY.format(version=version, **values))


CPU_TORCH, CUDA_12, CUDA_13 = torch("2.13.0+cpu"), torch("2.13.0+cu126", cuda="12.6"), torch("2.13.0", cuda="13.0")

KAGGLE_T4 = """\
0, GPU-0f4ddc2a-66d0-7bf4-1a0c-2b8d6f0d7a01, Tesla T4, 15360, 3, 00000000:00:04.0, 580.82.07, [N/A], Default
1, GPU-b1d0e6a7-91d5-5c60-e1a9-63a5b9f4c502, Tesla T4, 15360, 3, 00000000:00:05.0, 580.82.07, [N/A], Default
"""
H100_BUSES = ("1B", "43", "52", "61", "9D", "C3", "D1", "DF")
H100 = "".join(
    f"{i}, GPU-{i}a2f90c1-5f3e-6c0b-2b71-0d1f6b6f4e{i}0, NVIDIA H100 80GB HBM3, 81559, 4, "
    f"00000000:{bus}:00.0, 580.126.20, Disabled, Default\n"
    for i, bus in enumerate(H100_BUSES)
)
TWO_SOCKETS = (*range(56), *range(112, 168)), (*range(56, 112), *range(168, 224))
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
# nvidia-smi writes escapes that underline the head of its table, even into a pipe.
H100_TOPOLOGY = (
    "\t\x1b[4m" + "\t".join(f"GPU{i}" for i in range(8)) + "\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    + "".join(
        f"GPU{i}\t" + "\t".join(" X " if i == j else "NV18" for j in range(8)) + "\tPXB\tNODE\t0-55,112-167\t0\tN/A\n"
        for i in range(8)
    )
    + "NIC0\t" + "PXB\t" * 8 + " X \tNODE\t\t\t\t\n" + LEGEND
)  # fmt: skip
A6000_TOPOLOGY = (
    "\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV4\tNODE\t0-31,64-95\t0\nGPU1\tNV4\t X \tNODE\t0-31,64-95\t0\nGPU2\tNODE\tNODE\t X \t0-31,64-95\t0\n"
    + LEGEND
)
T4_TOPOLOGY = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tPHB\t0-3\t0\t\tN/A\nGPU1\tPHB\t X \t0-3\t0\t\tN/A\n" + LEGEND
)


def cuda(gpus: str, version: tuple[int, int], capability: tuple[int, int], **error: object) -> CudaDriver:
    """Return the answer of the CUDA driver on a machine whose nvidia-smi prints `gpus`."""
    rows = [line.split(", ") for line in gpus.splitlines()]
    devices = [
        {"uuid": uuid.removeprefix("GPU-"), "name": name, "bus": bus[4:], "mib": int(total), "capability": capability}
        for _, uuid, name, total, _, bus, *_ in rows
    ]
    answer = parse_answer(json.dumps({"version": version, "devices": [] if error else devices, **error}))
    assert answer is not None
    return answer


def bare(build: TorchBuild, **more: object) -> Machine:
    """Return a machine of four cores, changed by `more`."""
    return replace(Machine(build), cores=tuple(range(4)), **more)


def nvidia(
    gpus: str, build: TorchBuild, driver: CudaDriver | None, processes: str = "", cores: int = 4, **more: object
) -> Machine:
    survey = Survey(tuple(parse_gpus(gpus, processes)), driver=parse_driver(gpus))
    return replace(
        Machine(build, survey, cuda=driver, held=tuple(gpu.name for gpu in survey.gpus), cores=tuple(range(cores))),
        **more,
    )


T4_DRIVER, H100_DRIVER = cuda(KAGGLE_T4, (13, 0), (7, 5)), cuda(H100, (13, 0), (9, 0))
# Variables with these names are set in every notebook there; their values do not matter.
KAGGLE_ENV = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
COLAB_ENV = {"COLAB_RELEASE_TAG": "release-colab-external_20260915"}

KAGGLE = nvidia(
    KAGGLE_T4, CUDA_13, T4_DRIVER, is_container=True, env=KAGGLE_ENV, links=parse_topology(T4_TOPOLOGY)
)  # fmt: skip
DGX_H100 = nvidia(
    H100,
    CUDA_13,
    H100_DRIVER,
    cores=224,
    near={f"0000:{bus.lower()}:00.0": TWO_SOCKETS[i >= 4] for i, bus in enumerate(H100_BUSES)},
    links=parse_topology(H100_TOPOLOGY),
    adapters=tuple(Adapter(f"mlx5_{i}", "InfiniBand", 400.0) for i in range(8)),
)


def write_tree(root: Path, files: Mapping[str, str], links: Mapping[str, str] | None = None) -> Path:
    """Write files of /sys and /proc below `root`. links: path -> what it points to, both below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, target in (links or {}).items():
        (root / target).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(root / target)
    return root
