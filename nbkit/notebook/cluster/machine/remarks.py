"""Remarks on a machine before a cluster starts: devices that were found, how they are used, and what to type.

Each remark depends only on a `Machine` value, so remarks can be tested for machines that are not available.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nbkit.notebook.cluster.machine.gpus import Gpu, visible_gpus
from nbkit.notebook.cluster.machine.machine import Machine, show_adapters, show_links

# GPUs before Ampere emulate bf16 with float32.
_BF16 = (8, 0)
_ON_CPU = "ranks run on the CPU"

Told = Literal["doctor", "start", "bare start"]


@dataclass(frozen=True)
class Remark:
    """A remark. seen: a finding on the machine. used: how a cluster uses it. hint: what to type to change that, or "".

    told: where it is shown. "doctor": only by `nbkit doctor`. "start": also by `%cluster start`, unless --cpu is given.
    "bare start": also by `%cluster start`, unless -n, --gpus or --cpu is given.
    """

    subject: str
    seen: str
    used: str
    hint: str = ""
    told: Told = "doctor"

    def __str__(self) -> str:
        return f"{self.seen}: {self.used}." + (f" {self.hint}" if self.hint else "")


def notes_at_start(machine: Machine, *, n: int | None, gpus: str | None, cpu: bool) -> tuple[str, ...]:
    """Return the notes that `%cluster start` with these options shows about the machine."""
    bare = n is None and gpus is None
    if cpu:
        return ()
    return tuple(str(each) for each in remarks(machine) if each.told == "start" or (each.told == "bare start" and bare))


def remarks(machine: Machine) -> tuple[Remark, ...]:
    """Return all remarks, the most important first."""
    return (
        *_nvidia(machine),
        *_unusable(machine),
        *_other_vendors(machine),
        *_hosted(machine),
        *_few(machine),
        *_capable(machine),
        *_joined(machine),
    )


def _nvidia(machine: Machine) -> Iterator[Remark]:
    """Yield remarks about NVIDIA GPUs that nvidia-smi does not show."""
    survey, on_bus = machine.survey, [gpu for gpu in machine.pci if gpu.vendor == "NVIDIA"]
    if survey.problem:
        hint = "Run nvidia-smi in a terminal; after a driver update, restart the machine"
        yield Remark("nvidia-smi", survey.problem, _ON_CPU, hint, "start")
    elif not survey.is_installed and machine.gpus:
        seen = f"{_named(machine.gpus)} without nvidia-smi"
        used = "taken as idle, since nobody tells who computes on them"
        hint = "To be told: docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        if not machine.gpus[0].unfit:
            yield Remark("nvidia-smi", seen, used, hint, "start")
    elif not survey.is_installed and machine.held:
        error = machine.cuda.error if machine.cuda and machine.cuda.error else "CUDA does not answer"
        seen = f"{_counted(machine.held)} without nvidia-smi, and {error}"
        hint = "To use them: docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield Remark("nvidia-smi", seen, _ON_CPU, hint, "start")
    elif on_bus and not machine.gpus:
        # If torch cannot use them anyway, the user does not intend to.
        told: Told = "start" if machine.torch.kind == "CUDA" else "doctor"
        count = _many(len(on_bus), "NVIDIA GPU")
        if machine.is_container:
            hint = "To use them: docker run --gpus all; in Kubernetes, a limit of nvidia.com/gpu"
            yield Remark("GPU", f"{count} in this machine, none given to this container", _ON_CPU, hint, told)
        elif not any(gpu.driver == "nvidia" for gpu in on_bus):
            drivers = ", ".join(sorted({gpu.driver for gpu in on_bus} - {""})) or "none"
            hint = "To use it, install NVIDIA's driver and restart the machine"
            yield Remark("GPU", f"{count} without NVIDIA's driver (it has: {drivers})", _ON_CPU, hint, told)


def _unusable(machine: Machine) -> Iterator[Remark]:
    """Yield remarks about GPUs that nvidia-smi shows but ranks cannot compute on, grouped by reason."""
    visible = _visible(machine)
    none_left = all(gpu.unfit for gpu in visible)
    for reason in dict.fromkeys(gpu.unfit for gpu in machine.gpus if gpu.unfit):
        found = [gpu for gpu in machine.gpus if gpu.unfit == reason]
        seen = f"{_named(found)} cannot be used, since {reason.why}"
        hint = f"To use {'it' if len(found) == 1 else 'them'}: {reason.fix}"
        # Do not tell a user who has hidden the GPU or chosen others.
        told: Told = "doctor" if not {*found} & {*visible} else "start" if none_left else "bare start"
        yield Remark("GPU", seen, _ON_CPU if none_left else "left alone", hint, told)


def _other_vendors(machine: Machine) -> Iterator[Remark]:
    torch = machine.torch
    used = _ON_CPU if all(gpu.unfit for gpu in machine.gpus) else "left alone"
    if machine.system == "darwin" and machine.processor == "arm64":
        hint = 'A cell without %%distributed computes on it: model.to("mps")'
        yield Remark("GPU", "The GPU of this Mac (MPS) cannot join a process group", _ON_CPU, hint, "start")
    amd = [gpu for gpu in machine.pci if gpu.vendor == "AMD" and gpu.driver == "amdgpu"]
    if amd:
        # Integrated GPUs and those for displays are ignored, unless torch is built for AMD.
        told: Told = "start" if torch.hip or any(gpu.is_accelerator for gpu in amd) else "doctor"
        hint = f"To try, with a torch built for ROCm: torchrun --nproc-per-node {len(amd)} train.py (never run yet)"
        yield Remark("GPU", f"{_many(len(amd), 'AMD GPU')} (ROCm), which nbkit does not pin", used, hint, told)
    intel = [gpu for gpu in machine.pci if gpu.vendor == "Intel" and gpu.driver in ("xe", "i915")]
    if intel:
        told = "start" if torch.xpu else "doctor"
        hint = 'A cell without %%distributed computes on one: model.to("xpu"), with a torch built for XPU'
        yield Remark("GPU", f"{_many(len(intel), 'Intel GPU')} (XPU), which nbkit does not use", used, hint, told)


def _hosted(machine: Machine) -> Iterator[Remark]:
    """Yield remarks about hosted notebooks. Kaggle sometimes sets Colab's variables too, so it is checked first."""
    if "KAGGLE_KERNEL_RUN_TYPE" in machine.env:
        host, menu = "Kaggle", "Settings > Accelerator > GPU T4 x2"
    elif "COLAB_RELEASE_TAG" in machine.env:
        host, menu = "Colab", "Runtime > Change runtime type > T4 GPU"
    else:
        return
    if machine.gpus:
        yield Remark(host, f"a {host} notebook", _named(machine.gpus))
    elif not machine.survey.problem:
        yield Remark(host, f"{host} gives this notebook no GPU", _ON_CPU, f"For a GPU: {menu}", "start")


def _few(machine: Machine) -> Iterator[Remark]:
    """Yield remarks about a single GPU, MIG instances and MPS. Ranks that share a chip cannot use NCCL."""
    allowed = [gpu for gpu in _visible(machine) if not gpu.unfit]
    if len(allowed) == 1 and not allowed[0].in_use_by_others():
        gpu = allowed[0].number
        hint = f"To try strategies: -n 2 --cpu, or --gpus {gpu},{gpu} (two ranks share the GPU, over gloo)"
        yield Remark("GPU", f"One GPU ({allowed[0].name})", "one rank", hint, "bare start")
    instances = [gpu for gpu in machine.gpus if gpu.slot is not None]
    if instances:
        used = "each is a rank's GPU; NCCL does not join two instances of one chip, so such ranks use gloo"
        yield Remark("MIG", f"{_many(len(instances), 'MIG instance')} of {_many(_chips(instances), 'GPU')}", used)
    served = [gpu for gpu in machine.gpus if any(process.is_mps_server for process in gpu.processes)]
    if served:
        used = "it counts as nobody's; what its clients hold does"
        yield Remark("MPS server", f"CUDA's Multi-Process Service runs on {_numbered(served)}", used)


def _capable(machine: Machine) -> Iterator[Remark]:
    slow = [gpu for gpu in machine.gpus if gpu.capability and gpu.capability < _BF16 and not gpu.unfit]
    if slow:
        used = 'emulated there, so slow; precision="bf16" is warned of'
        yield Remark("bf16", f"{_named(slow)} cannot compute it", used, 'precision="fp16"')


def _joined(machine: Machine) -> Iterator[Remark]:
    if text := show_links(machine.links):
        yield Remark("GPU links", text, "by NCCL")
    if text := show_adapters(machine.adapters):
        yield Remark("network", text, "used only by clusters on several hosts")


def _visible(machine: Machine) -> list[Gpu]:
    return visible_gpus(machine.gpus, machine.env.get("CUDA_VISIBLE_DEVICES"))


def _named(gpus: Sequence[Gpu]) -> str:
    """Return "GPU 1 (Tesla T4)" or "2 GPUs (Tesla T4)"."""
    if len(gpus) == 1:
        return f"GPU {gpus[0].number} ({gpus[0].name})"
    return _counted([gpu.name for gpu in gpus])


def _counted(names: Sequence[str]) -> str:
    return f"{_many(len(names), 'GPU')} ({', '.join(dict.fromkeys(names))})"


def _numbered(gpus: Sequence[Gpu]) -> str:
    return f"GPU {', '.join(gpu.number for gpu in gpus)}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _chips(gpus: Sequence[Gpu]) -> int:
    return len({gpu.chip for gpu in gpus})
