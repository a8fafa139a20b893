"""Everything of this machine that matters to a cluster, read once into one value."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from nbkit.notebook.cluster.machine import cuda_driver
from nbkit.notebook.cluster.machine.cpu_cores import cores_here, quota_here
from nbkit.notebook.cluster.machine.cuda_driver import CudaDriver
from nbkit.notebook.cluster.machine.gpu_support import unfit
from nbkit.notebook.cluster.machine.gpus import Gpu, Survey, survey_gpus
from nbkit.notebook.cluster.machine.links import Adapter, Link, gpu_links, network_adapters
from nbkit.notebook.cluster.machine.pci_gpus import PciGpu, near_cores, nvidia_driver_gpus, pci_gpus
from nbkit.notebook.cluster.machine.torch_build import TorchBuild, read_build
from nbkit.wire import nvidia_smi

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG")
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_VARIABLES = ("KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")


@dataclass(frozen=True)
class Machine:
    """What was read.

    survey: nvidia-smi's answers. held: names of the GPUs that NVIDIA's kernel driver holds. cuda: what the CUDA driver
    says, None where it was not asked or had no answer. pci: GPUs on the bus. near: place on the bus -> cores of its
    socket. links and adapters: read for `nbkit doctor` alone.
    """

    torch: TorchBuild
    survey: Survey = field(default_factory=lambda: Survey(is_installed=False))
    held: tuple[str, ...] = ()
    cuda: CudaDriver | None = None
    pci: tuple[PciGpu, ...] = ()
    near: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cores: tuple[int, ...] = (0,)
    quota: float | None = None
    system: str = "linux"
    processor: str = "x86_64"
    is_container: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The NVIDIA GPUs, each with the cores near it and, where no rank can compute on it, why."""
        found = self.survey.gpus or self._counted_by_cuda()
        known = {device.uuid: device.capability for device in (self.cuda.devices if self.cuda else ())}
        full = (replace(gpu, near=self.near.get(gpu.bus, ()), capability=known.get(gpu.uuid)) for gpu in found)
        return tuple(
            replace(gpu, unfit=unfit(gpu, torch=self.torch, cuda=self.cuda, driver=self.survey.driver)) for gpu in full
        )

    def _counted_by_cuda(self) -> tuple[Gpu, ...]:
        """Without nvidia-smi the CUDA driver tells which GPUs there are; who computes on them, it does not tell."""
        if self.survey.is_installed or self.cuda is None or self.cuda.error:
            return ()
        return tuple(
            Gpu(index, device.uuid, device.name, device.mib, None, bus=device.bus[-12:])
            for index, device in enumerate(self.cuda.devices)
        )


def read_machine(*, links: bool = False) -> Machine:
    """This machine as it is now; takes as long as nvidia-smi does. links: also what joins the GPUs, for people."""
    held = nvidia_driver_gpus()
    # Both wake the GPUs, so they are asked at the same time.
    asked = _ask_cuda() if held or nvidia_smi.find() else None
    survey = survey_gpus()
    cuda = cuda_driver.finish(asked) if asked else None
    machine = Machine(
        torch=read_build(),
        survey=survey,
        held=held,
        cuda=cuda,
        pci=pci_gpus(),
        cores=cores_here(),
        quota=quota_here(),
        system=sys.platform,
        processor=platform.machine(),
        is_container=_is_container(),
        env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        links=gpu_links() if links and len(survey.gpus) > 1 else (),
        adapters=network_adapters() if links else (),
    )
    return replace(machine, near={gpu.bus: near_cores(gpu.bus) for gpu in machine.gpus if gpu.bus})


def _ask_cuda() -> subprocess.Popen[str] | None:
    try:
        return cuda_driver.begin()
    except OSError:
        return None


def _is_container() -> bool:
    said = any(name in os.environ for name in _CONTAINER_VARIABLES)
    return said or any(Path(path).exists() for path in _CONTAINER_FILES)
