"""Whether the installed torch can compute on an NVIDIA GPU: what `import torch` would find out too late."""

from __future__ import annotations

from nbkit.notebook.cluster.launch.platform_check import release
from nbkit.notebook.cluster.machine.cuda_driver import CudaDriver
from nbkit.notebook.cluster.machine.gpus import Gpu, Unfit
from nbkit.notebook.cluster.machine.torch_build import TorchBuild

# The CUDA that PyTorch's wheels of now are built for -> the oldest driver that it runs on.
_DRIVERS = {12: "525", 13: "580"}
# Which GPUs those wheels have code for: from CUDA 12.8 on none before Turing; Blackwell since then.
_TURING, _BLACKWELL, _SPLIT = (7, 5), (10, 0), (12, 8)

_PAGE = "PyTorch's install page"
_ERRORS = {
    802: "sudo systemctl start nvidia-fabricmanager   (GPUs joined by NVSwitch need it)",
    803: "restart the machine: the driver was updated while it ran",
    804: "leave out the cuda-compat folder: LD_LIBRARY_PATH= (it is for data centre GPUs alone)",
}
_LIBRARY_MISSING = "in a container, docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install it"


def unfit(gpu: Gpu, *, torch: TorchBuild, cuda: CudaDriver | None, driver: str) -> Unfit | None:
    """Why no rank can compute on `gpu`, None if nothing speaks against it. driver: NVIDIA's version of it, or ""."""
    if not torch.version:
        return gpu.unfit  # what to install is said elsewhere
    if not torch.cuda:
        return Unfit(f"torch {torch.version} is built for {torch.kind}", _a_cuda_build(cuda))
    # What concerns one GPU says more than what CUDA says of all, and that less than a driver that fits none.
    return _driver_unfit(torch, cuda, driver) or gpu.unfit or _error_of(cuda) or _too_old_or_new(gpu, torch)


def _driver_unfit(torch: TorchBuild, cuda: CudaDriver | None, driver: str) -> Unfit | None:
    if cuda is None:
        return None
    if cuda.version is None:
        return Unfit(cuda.error, _LIBRARY_MISSING)
    needed, known = release(torch.cuda), cuda.version
    # Within a major release, any driver runs it ("minor version compatibility").
    if needed[0] <= known[0]:
        return None
    named = f"the driver {driver}".strip()
    why = f"{named} knows CUDA {_dotted(known)} and torch {torch.version} is built for CUDA {torch.cuda}"
    return Unfit(why, _newer_driver(needed[0], known[0]))


def _error_of(cuda: CudaDriver | None) -> Unfit | None:
    if cuda is None or not cuda.error:
        return None
    fix = _ERRORS.get(cuda.code, "run nvidia-smi in a terminal; after a driver update, restart the machine")
    return Unfit(f"CUDA does not start: {cuda.error} ({cuda.code})", fix)


def _too_old_or_new(gpu: Gpu, torch: TorchBuild) -> Unfit | None:
    if gpu.capability is None or not torch.is_official:
        return None
    has, built = f"compute capability {_dotted(gpu.capability)}", release(torch.cuda)[:2]
    if gpu.capability < _TURING and built >= _SPLIT:
        return Unfit(f"torch {torch.version} has no code for {has}", _install("12.6"))
    if gpu.capability >= _BLACKWELL and built < _SPLIT:
        return Unfit(f"torch {torch.version} has no code for {has}", _install("13"))
    return None


def _a_cuda_build(cuda: CudaDriver | None) -> str:
    """How to come to a torch for CUDA that the driver runs."""
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
