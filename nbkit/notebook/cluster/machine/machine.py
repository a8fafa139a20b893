"""Everything about this machine that matters to a cluster, read once into one value (`Machine`).

- The build of the installed torch, read from its files without importing torch.
- Whether this torch can compute on an NVIDIA GPU (`unfit`).
- The GPUs on the PCI bus, of any maker, usable or not.
- The links between the GPUs, and InfiniBand or RoCE ports. They are only shown; no choice depends on them.
- The CPU cores that this process may use, and how they are divided among ranks.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nbkit.errors import UsageError
from nbkit.notebook.cluster.launch.platform_check import release, torch_version
from nbkit.notebook.cluster.machine import cuda_driver
from nbkit.notebook.cluster.machine.cuda_driver import CudaDriver
from nbkit.notebook.cluster.machine.gpus import Gpu, Survey, Unfit, survey_gpus
from nbkit.wire import nvidia_smi

_NAMED = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
# Versions of PyTorch's own wheels: "2.13.0", "2.13.0+cu128". Other builds may have other architectures.
_OFFICIAL = re.compile(r"\d+\.\d+\.\d+(\+cu\d+)?")


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch.

    version: "2.13.0+cpu", "" if torch is not installed. cuda, hip, xpu: the version of its build, or "".
    """

    version: str
    cuda: str = ""
    hip: str = ""
    xpu: str = ""

    @property
    def kind(self) -> str:
        """Return the kind of GPU for which it is built, as text for people."""
        return "CUDA" if self.cuda else "ROCm" if self.hip else "XPU" if self.xpu else "the CPU"

    @property
    def target(self) -> str:
        """Return the kind, and for CUDA its version."""
        return f"{self.kind} {self.cuda}".strip()

    @property
    def is_official(self) -> bool:
        """Return True if it is one of PyTorch's own wheels, whose architectures are known."""
        return bool(_OFFICIAL.fullmatch(self.version))


def read_build() -> TorchBuild:
    """Return the build of the torch that ranks will import."""
    version = torch_version()
    try:
        found = importlib.util.find_spec("torch") if version else None
        text = Path(found.origin or "").with_name("version.py").read_text() if found else ""
    except (OSError, ValueError):  # a namespace package, or an object in sys.modules without a file
        text = ""
    return parse_build(version, text)


def parse_build(version: str, text: str) -> TorchBuild:
    """Return the build that `text`, the source of the module torch.version, describes.

    If text is "", the end of the version tells the build ("+cpu", "+cu128").
    """
    if text:
        return TorchBuild(version, **dict(_NAMED.findall(text)))
    local = version.partition("+")[2]
    if digits := re.match(r"cu(\d+)(\d)$", local):
        return TorchBuild(version, cuda=f"{digits[1]}.{digits[2]}")
    if local.startswith("rocm"):
        return TorchBuild(version, hip=local.removeprefix("rocm"))
    if local == "xpu":
        return TorchBuild(version, xpu="unknown")
    return TorchBuild(version)


# CUDA major version of current PyTorch wheels -> its oldest driver.
_DRIVERS = {12: "525", 13: "580"}
# GPUs that those wheels support: from CUDA 12.8 on Blackwell, but none before Turing.
_TURING, _BLACKWELL, _SPLIT = (7, 5), (10, 0), (12, 8)

_PAGE = "PyTorch's install page"
_ERRORS = {
    802: "sudo systemctl start nvidia-fabricmanager   (GPUs joined by NVSwitch need it)",
    803: "restart the machine: the driver was updated while it ran",
    804: "leave out the cuda-compat folder: LD_LIBRARY_PATH= (it is for data centre GPUs alone)",
}
_LIBRARY_MISSING = "in a container, docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install it"


def unfit(gpu: Gpu, *, build: TorchBuild, cuda: CudaDriver | None, driver: str) -> Unfit | None:
    """Return why no rank can compute on `gpu`, None if there is no reason.

    driver: version of NVIDIA's driver, or "".
    """
    if not build.version:
        return gpu.unfit  # another remark says that torch is missing
    if not build.cuda:
        return Unfit(f"torch {build.version} is built for {build.kind}", _a_cuda_build(cuda))
    # An unsuitable driver comes first, then a reason about this GPU, then CUDA's error for all GPUs.
    return _driver_unfit(build, cuda, driver) or gpu.unfit or _error_of(cuda) or _too_old_or_new(gpu, build)


def _driver_unfit(build: TorchBuild, cuda: CudaDriver | None, driver: str) -> Unfit | None:
    if cuda is None:
        return None
    if cuda.version is None:
        return Unfit(cuda.error, _LIBRARY_MISSING)
    needed, known = release(build.cuda), cuda.version
    # Any driver of the same major version runs it ("minor version compatibility").
    if needed[0] <= known[0]:
        return None
    named = f"the driver {driver}".strip()
    why = f"{named} knows CUDA {_dotted(known)} and torch {build.version} is built for CUDA {build.cuda}"
    return Unfit(why, _newer_driver(needed[0], known[0]))


def _error_of(cuda: CudaDriver | None) -> Unfit | None:
    if cuda is None or not cuda.error:
        return None
    fix = _ERRORS.get(cuda.code, "run nvidia-smi in a terminal; after a driver update, restart the machine")
    return Unfit(f"CUDA does not start: {cuda.error} ({cuda.code})", fix)


def _too_old_or_new(gpu: Gpu, build: TorchBuild) -> Unfit | None:
    if gpu.capability is None or not build.is_official:
        return None
    has, built = f"compute capability {_dotted(gpu.capability)}", release(build.cuda)[:2]
    if gpu.capability < _TURING and built >= _SPLIT:
        return Unfit(f"torch {build.version} has no code for {has}", _install("12.6"))
    if gpu.capability >= _BLACKWELL and built < _SPLIT:
        return Unfit(f"torch {build.version} has no code for {has}", _install("13"))
    return None


def _a_cuda_build(cuda: CudaDriver | None) -> str:
    """Return how to install a torch for a CUDA version that the driver supports."""
    known = cuda.version[0] if cuda and cuda.version else max(_DRIVERS)
    if known < min(_DRIVERS):
        return f"install a newer driver ({_DRIVERS[max(_DRIVERS)]} or above); {_install('')}"
    return _install(str(known) if known < max(_DRIVERS) else "")


def _install(version: str) -> str:
    platform = f"CUDA {version}".strip()
    return f"pip uninstall torch, then the pip line of {_PAGE} for {platform}, then restart the kernel"


def _newer_driver(needed: int, known: int) -> str:
    oldest = _DRIVERS.get(needed)
    newer = f"install a newer driver ({oldest} or above)" if oldest else "install a newer driver"
    return newer if known < min(_DRIVERS) else f"{_install(str(known))}; or {newer}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# VGA, 3D and display controllers, and processing accelerators (AMD's Instinct).
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_ACCELERATOR = "0x1200"
# The address of the graphics in Intel's CPUs.
_INTEL_IN_CPU = "0000:00:02."


@dataclass(frozen=True)
class PciGpu:
    """A GPU on the PCI bus.

    bus: "0000:07:00.0". driver: Linux's driver ("nvidia", "amdgpu", "xe", "nouveau"), "" without one. is_accelerator:
    it is made to compute and has no display output.
    """

    vendor: str
    bus: str
    driver: str = ""
    is_accelerator: bool = False


def pci_gpus(root: Path = Path("/")) -> tuple[PciGpu, ...]:
    """Return the GPUs on the PCI bus in bus order, without those that are part of an Intel CPU."""
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
    """Return the names of the GPUs of NVIDIA's kernel driver that have a device file in this container."""
    found = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in _lines(path))}
        if (root / f"dev/nvidia{told.get('Device Minor', '')}").exists():
            found.append(told.get("Model", "NVIDIA GPU"))
    return tuple(found)


def near_cores(bus: str, root: Path = Path("/")) -> tuple[int, ...]:
    """Return the CPU cores on the socket of the PCI device at `bus`; () if Linux does not tell."""
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


_PCIE = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through the CPU's bridges",
    "SYS": "PCIe and the link between sockets",
}


@dataclass(frozen=True)
class GpuLink:
    """A link between two GPUs. kind: nvidia-smi's name: "NV18" for 18 NVLinks, "PIX", "PXB", "PHB", "NODE", "SYS"."""

    first: int
    second: int
    kind: str


@dataclass(frozen=True)
class Adapter:
    """A port that is up. kind: "InfiniBand", or "Ethernet" for RoCE. rate: in Gb/s."""

    name: str
    kind: str
    rate: float


def gpu_links() -> tuple[GpuLink, ...]:
    """Return the links that `nvidia-smi topo -m` lists; () if it is missing or fails (WSL)."""
    smi = nvidia_smi.find()
    try:
        return parse_topology(nvidia_smi.ask(smi, ["topo", "-m"])[0]) if smi else ()
    except (OSError, subprocess.SubprocessError):
        return ()


def parse_topology(table: str) -> tuple[GpuLink, ...]:
    """Return the links between GPUs in the table of `nvidia-smi topo -m`, each pair once."""
    # The columns are GPUs, then network cards, then cores.
    found = []
    for cells in map(str.split, table.splitlines()):
        if len(cells) < 2 or not re.fullmatch(r"GPU\d+", cells[0]) or "X" not in cells:
            continue  # the header, or the legend below the table
        row = int(cells[0].removeprefix("GPU"))
        found += [GpuLink(column, row, cells[column + 1]) for column in range(cells.index("X") - 1)]
    return tuple(found)


def show_links(links: Sequence[GpuLink]) -> str:
    """Return the links as text for people: "NVLink between all 8 (NV18)"; "" if there is none."""
    kinds = list(dict.fromkeys(link.kind for link in links))
    gpus = {number for link in links for number in (link.first, link.second)}
    if len(kinds) == 1:
        among = f"all {len(gpus)}" if len(gpus) > 2 else "both"
        return f"{_in_words(kinds[0])} between {among} ({kinds[0]})"
    # People look for NVLink, so it is listed with its pairs; the rest is PCIe.
    fast = [f"{link.first}-{link.second}" for link in links if link.kind.startswith("NV")]
    others = ", ".join(f"{_in_words(kind)} ({kind})" for kind in kinds if not kind.startswith("NV"))
    return f"NVLink between {', '.join(fast)}; else {others}" if fast else others


def _in_words(kind: str) -> str:
    return "NVLink" if kind.startswith("NV") else _PCIE.get(kind, "PCIe")


def network_adapters(root: Path = Path("/")) -> tuple[Adapter, ...]:
    """Return the ports in /sys/class/infiniband that are up."""
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        try:
            state, rate, kind = ((port / name).read_text().strip() for name in ("state", "rate", "link_layer"))
        except OSError:
            continue
        if state.endswith("ACTIVE"):
            found.append(Adapter(port.parents[1].name, kind, nvidia_smi.number(rate) or 0.0))
    return tuple(found)


def show_adapters(adapters: Sequence[Adapter]) -> str:
    """Return the adapters as text for people: "8 InfiniBand ports of 400 Gb/s (mlx5_0 to mlx5_7)"."""
    texts = []
    for kind, rate in dict.fromkeys((each.kind, each.rate) for each in adapters):
        names = [each.name for each in adapters if (each.kind, each.rate) == (kind, rate)]
        noun = "RoCE" if kind == "Ethernet" else kind
        ports = "1" if len(names) == 1 else str(len(names))
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        texts.append(f"{ports} {noun} port{'s' * (len(names) > 1)} of {rate:g} Gb/s ({span})")
    return ", ".join(texts)


_CGROUP = Path("/sys/fs/cgroup")


def cores_here() -> tuple[int, ...]:
    """Return the cores that this process may use, with the hardware threads of one physical core next to each other.

    Contiguous blocks then never split a physical core between two ranks, if the numbers divide evenly.
    """
    try:
        cores = os.sched_getaffinity(0)
    except AttributeError:  # macOS
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(cores, key=lambda core: (_first_sibling(core), core)))


def quota_here(cgroup: Path = _CGROUP) -> float | None:
    """Return the CPU limit of the container in cores (Kubernetes: limits.cpu), None without a limit.

    The affinity does not contain it: a pod with a limit of 4 sees all cores of its node.
    """
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None


def share_cores(count: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Return `count` contiguous blocks of cores. If they do not divide evenly, the first blocks have one core more.

    With more blocks than cores, block i has core i % len(cores). Raises UsageError without a core.
    """
    if not cores:
        raise UsageError("No CPU core to run on.", numbers="0 cores in this process's affinity")
    if count > len(cores):
        return [(cores[rank % len(cores)],) for rank in range(count)]
    size, larger = divmod(len(cores), count)
    ends = [(rank + 1) * size + min(rank + 1, larger) for rank in range(count)]
    return [tuple(cores[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def share_cores_near(near: Sequence[Sequence[int]], cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Return a block of cores for each rank, on the socket of its GPU.

    near: for each rank, the cores of that socket. Sockets are ignored, as in `share_cores`, if one of them has no core
    here, has fewer cores than ranks, or shares cores with another.
    """
    sockets = {frozenset(each) & frozenset(cores) for each in near}
    ranks_at = {socket: [rank for rank, each in enumerate(near) if socket == frozenset(each) & frozenset(cores)]
                for socket in sockets}  # fmt: skip
    apart = sum(map(len, sockets)) == len(frozenset().union(*sockets))
    if not apart or any(len(socket) < len(ranks) for socket, ranks in ranks_at.items()):
        return share_cores(len(near), cores)
    shares: dict[int, tuple[int, ...]] = {}
    for socket, ranks in ranks_at.items():
        own = [core for core in cores if core in socket]
        shares.update(zip(ranks, share_cores(len(ranks), own), strict=True))
    return [shares[rank] for rank in range(len(near))]


def show_cores(cores: Sequence[int]) -> str:
    """Return the cores as text for people: "core 3", "cores 0-3,8-11"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"core {text}" if len(cores) == 1 else f"cores {text}"


def _first_sibling(core: int) -> int:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return core


_VARIABLES = ("CUDA_VISIBLE_DEVICES", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG")
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_VARIABLES = ("KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")


@dataclass(frozen=True)
class Machine:
    """Everything that was read about the machine.

    survey: nvidia-smi's answers. held: names of the GPUs of NVIDIA's kernel driver. cuda: the CUDA driver's answers,
    None if it was not asked or did not answer. pci: GPUs on the PCI bus. near: address on the bus -> cores of its
    socket. links and adapters: read only for `nbkit doctor`.
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
    links: tuple[GpuLink, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Return the NVIDIA GPUs, each with the cores near it and, if no rank can compute on it, the reason."""
        found = self.survey.gpus or self._counted_by_cuda()
        known = {device.uuid: device.capability for device in (self.cuda.devices if self.cuda else ())}
        full = (replace(gpu, near=self.near.get(gpu.bus, ()), capability=known.get(gpu.uuid)) for gpu in found)
        return tuple(
            replace(gpu, unfit=unfit(gpu, build=self.torch, cuda=self.cuda, driver=self.survey.driver)) for gpu in full
        )

    def _counted_by_cuda(self) -> tuple[Gpu, ...]:
        """Return the GPUs that the CUDA driver lists, for a machine without nvidia-smi.

        The driver does not know which processes use them.
        """
        if self.survey.is_installed or self.cuda is None or self.cuda.error:
            return ()
        return tuple(
            Gpu(index, device.uuid, device.name, device.mib, None, bus=device.bus[-12:])
            for index, device in enumerate(self.cuda.devices)
        )


def read_machine(*, links: bool = False) -> Machine:
    """Read this machine. It takes as long as nvidia-smi. links: also read the links between GPUs, and the adapters."""
    held = nvidia_driver_gpus()
    # Both have to wake the GPUs, so ask them at the same time.
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
