"""The GPUs of this machine, the processes that compute on them, and those that CUDA_VISIBLE_DEVICES selects.

Everything comes from nvidia-smi, without a CUDA context and without torch. Separate functions parse its output, so that
they can be tested on a machine without a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbkit.errors import UsageError
from nbkit.wire import nvidia_smi
from nbkit.wire.nvidia_smi import CSV, number, rows

_GPU_QUERY = (
    "--query-gpu=index,uuid,name,memory.total,memory.used,pci.bus_id,driver_version,mig.mode.current,compute_mode"
)
_PROCESS_QUERY = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
# A desktop or an idle driver stays below both limits, a training does not.
_BUSY_MIB, _BUSY_SHARE = 1024, 0.05
# It computes nothing itself. nvidia-smi also lists the processes that it serves.
_MPS_SERVER = "nvidia-cuda-mps-server"

_GPU_LINE = re.compile(r"GPU (\d+): (.+) \(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU. `mib` is None if the driver does not tell its memory."""

    pid: int
    name: str
    mib: int | None

    def __str__(self) -> str:
        return f"pid {self.pid} ({os.path.basename(self.name)}) holds {show_mib(self.mib)}"

    @property
    def is_mps_server(self) -> bool:
        """Return True if it is CUDA's Multi-Process Service."""
        return os.path.basename(self.name) == _MPS_SERVER


@dataclass(frozen=True)
class Unfit:
    """The reason why a rank cannot compute on a GPU, and a fix."""

    why: str
    fix: str


@dataclass(frozen=True)
class Gpu:
    """A GPU, or one MIG instance of a GPU.

    For an instance, `slot` is its number on the GPU and `parent` is that GPU's UUID. `index` is nvidia-smi's number
    (PCI order). Memory is in MiB, None if the driver answers "N/A". bus: its address on the PCI bus in Linux's
    notation. capability: CUDA's "compute capability", (7, 5) for a T4. near: the CPU cores of its socket. unfit: why no
    rank can compute on it, or None.
    """

    index: int
    uuid: str
    name: str
    total_mib: int | None
    used_mib: int | None
    processes: tuple[GpuProcess, ...] = ()
    parent: str = ""
    slot: int | None = None
    bus: str = ""
    capability: tuple[int, int] | None = None
    near: tuple[int, ...] = ()
    unfit: Unfit | None = None

    @property
    def number(self) -> str:
        """Return the number that the user types: "2", or "2:0" for the first MIG instance of GPU 2."""
        return str(self.index) if self.slot is None else f"{self.index}:{self.slot}"

    @property
    def chip(self) -> str:
        """Return the UUID of the physical GPU. MIG instances of one GPU share it."""
        return self.parent or self.uuid

    def in_use_by_others(self, own_pid: int | None = None) -> str:
        """Return why it is not idle, or "". Use by `own_pid` (this notebook's kernel) does not count."""
        others = [process for process in self.processes if process.pid != own_pid and not process.is_mps_server]
        if others:
            return ", ".join(str(process) for process in others)
        own = [process.mib for process in self.processes if process.pid == own_pid]
        if self.used_mib is None or None in own:
            return ""
        used = self.used_mib - sum(mib for mib in own if mib is not None)
        if used > _BUSY_MIB or (self.total_mib and used > _BUSY_SHARE * self.total_mib):
            # Processes outside of a container's pid namespace hold memory but are not listed.
            return f"{show_mib(used)} of {show_mib(self.total_mib)} are held by processes that nvidia-smi does not show"
        return ""


@dataclass(frozen=True)
class Survey:
    """The GPUs that nvidia-smi lists. `problem`: its error message if it is installed but does not work, else "".

    is_installed: True if nvidia-smi exists. driver: the version of NVIDIA's driver, "535.183.01".
    """

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    is_installed: bool = True
    driver: str = ""


def find_gpus() -> list[Gpu]:
    """Return every GPU of this machine, or []. A GPU divided by MIG is replaced by its instances."""
    return list(survey_gpus().gpus)


def survey_gpus() -> Survey:
    """Ask nvidia-smi once. A missing nvidia-smi is not a problem."""
    smi = nvidia_smi.find()
    if smi is None:
        return Survey(is_installed=False)
    try:
        gpus, processes, listing = nvidia_smi.ask(smi, [_GPU_QUERY, CSV], [_PROCESS_QUERY, CSV], ["-L"])
        found = parse_gpus(gpus, processes)
        instances = parse_instances(listing)
        if instances:
            (details,) = nvidia_smi.ask(smi, ["-q", "-x"])
            found = put_instances(found, instances, details)
    except (OSError, subprocess.SubprocessError, ValueError, ElementTree.ParseError) as error:
        return Survey(problem=f"nvidia-smi is installed but of no use: {error}")
    return Survey(tuple(found), driver=parse_driver(gpus))


def parse_driver(gpus: str) -> str:
    """Return the driver's version from the answer to --query-gpu, "" if there is no GPU."""
    return next((row[6] for row in rows(gpus)), "")


def parse_gpus(gpus: str, processes: str = "") -> list[Gpu]:
    """Parse the output of --query-gpu and --query-compute-apps (csv, noheader, nounits).

    Raises ValueError if a row does not have the requested columns.
    """
    running: dict[str, list[GpuProcess]] = {}
    for row in rows(processes):
        # A process name may contain commas: everything between the pid and the memory is the name.
        uuid, pid, *parts, mib = row
        running.setdefault(uuid, []).append(GpuProcess(int(pid), ", ".join(parts), _mib(mib)))
    found = []
    for index, uuid, name, total, used, bus, _, mig, mode in rows(gpus):
        on_it = tuple(running.get(uuid, ()))
        # nvidia-smi writes the domain with eight digits, Linux with four.
        place, unfit = bus.lower()[-12:], _unfit(int(index), mig, mode)
        found.append(Gpu(int(index), uuid, name, _mib(total), _mib(used), on_it, bus=place, unfit=unfit))
    return found


def _unfit(index: int, mig: str, mode: str) -> Unfit | None:
    if mode == "Prohibited":
        return Unfit("its compute mode is Prohibited", f"sudo nvidia-smi -i {index} -c DEFAULT")
    if mig == "Enabled":
        return Unfit(
            "it is in MIG mode and has no instance",
            f"sudo nvidia-smi mig -i {index} -lgip lists the sizes, -cgi SIZE -C makes one; without MIG: "
            f"sudo nvidia-smi -i {index} -mig 0",
        )
    return None


@dataclass(frozen=True)
class Instance:
    """A MIG line of `nvidia-smi -L`."""

    index: int
    slot: int
    uuid: str
    profile: str


def parse_instances(listing: str) -> list[Instance]:
    """Return the MIG instances in the output of `nvidia-smi -L`."""
    instances, index = [], -1
    for line in listing.splitlines():
        if gpu := _GPU_LINE.match(line):
            index = int(gpu[1])
        elif mig := _MIG_LINE.match(line):
            instances.append(Instance(index, int(mig[2]), mig[3], mig[1]))
    return instances


def put_instances(gpus: Sequence[Gpu], instances: Sequence[Instance], details: str) -> list[Gpu]:
    """Replace a GPU by its MIG instances, with memory and processes from `nvidia-smi -q -x`.

    Only the XML says which instance a process runs on; the csv answers list only whole GPUs.
    """
    described = {node.findtext("uuid", ""): node for node in ElementTree.fromstring(details).iter("gpu")}
    found: list[Gpu] = []
    for gpu in gpus:
        own = [instance for instance in instances if instance.index == gpu.index]
        if not own:
            found.append(gpu)
            continue
        node = described.get(gpu.uuid)
        found.extend(_instance(gpu, instance, node) for instance in own)
    return found


def _instance(gpu: Gpu, instance: Instance, node: ElementTree.Element | None) -> Gpu:
    # Without a description, count each process of the GPU for every instance, to never use a busy one.
    total, used, processes = None, None, gpu.processes
    for device in node.iterfind("mig_devices/mig_device") if node is not None else ():
        if device.findtext("index", "").strip() == str(instance.slot):
            total = _mib(device.findtext("fb_memory_usage/total", ""))
            used = _mib(device.findtext("fb_memory_usage/used", ""))
            place = (device.findtext("gpu_instance_id"), device.findtext("compute_instance_id"))
            assert node is not None
            processes = tuple(_processes_at(node, place))
    name = f"{gpu.name} MIG {instance.profile}"
    return Gpu(gpu.index, instance.uuid, name, total, used, processes, parent=gpu.uuid, slot=instance.slot, bus=gpu.bus)


def _processes_at(node: ElementTree.Element, place: tuple[str | None, str | None]) -> Iterator[GpuProcess]:
    for entry in node.iterfind("processes/process_info"):
        if (entry.findtext("gpu_instance_id"), entry.findtext("compute_instance_id")) == place:
            name, mib = entry.findtext("process_name", "?"), entry.findtext("used_memory", "")
            yield GpuProcess(int(entry.findtext("pid", "0")), name, _mib(mib))


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order. visible: its value; None (not set) selects all.

    As in CUDA, entries are numbers, beginnings of UUIDs, or MIG names, and the list ends before the first entry that
    names no GPU ("-1", "NoDevFiles"). The number of a GPU that is divided by MIG means its first instance. Numbers are
    in PCI order, as in nvidia-smi.
    """
    if visible is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        gpu = find_gpu(gpus, entry.strip())
        if gpu is None:
            break
        if gpu not in chosen:
            chosen.append(gpu)
    return chosen


def choose_gpus(gpus: Sequence[Gpu], text: str, visible: str | None = None) -> list[Gpu]:
    """Return the GPUs of the user's list after --gpus, in its order and with repeats. Numbers are those of nvidia-smi.

    Raises UsageError for an entry that names no GPU, or one that CUDA_VISIBLE_DEVICES hides.
    """
    allowed = visible_gpus(gpus, visible)
    offer = ", ".join(gpu.number for gpu in allowed) or "none"
    chosen = []
    for entry in text.split(","):
        gpu = find_gpu(gpus, entry.strip())
        if gpu is None or gpu not in allowed:
            what = f"No GPU {entry.strip()!r}." if gpu is None else f"GPU {gpu.number} is hidden from this notebook."
            hidden = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible}"
            hint = f"--gpus {','.join(gpu.number for gpu in allowed)}" if allowed else "--cpu"
            raise UsageError(what, numbers=f"{len(gpus)} GPUs found, to choose from: {offer}{hidden}", hint=hint)
        chosen.append(gpu)
    return chosen


def find_gpu(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    """Return the GPU with this number ("1", "1:0") or beginning of a UUID; None if none or several match."""
    if re.fullmatch(r"\d+(:\d+)?", entry):
        return next((gpu for gpu in gpus if entry in (gpu.number, str(gpu.index))), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    matching = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def show_mib(mib: int | None) -> str:
    """Return MiB as text for people: "512 MiB", "30.0 GiB", "unknown memory"."""
    if mib is None:
        return "unknown memory"
    return f"{mib} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def _mib(text: str) -> int | None:
    found = number(text)
    return None if found is None else int(found)
