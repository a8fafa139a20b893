"""Hides the differences between kinds of devices. No other module of nbkit.rank refers to cuda or nccl.

The module is built on torch.accelerator, so ROCm works like CUDA. torch calls both of them cuda. `DeviceKind` has what
torch.accelerator lacks: the backend between devices, environment variables, names, texts of errors. Another kind is one
subclass. A package can provide it by an entry point of the group "nbkit.devices": see docs/reference/own-launchers.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from nbkit.device_kinds import BACKENDS, CPU, GLOO, NVIDIA
from nbkit.errors import UsageError
from nbkit.plugins import load, package_of

GROUP = "nbkit.devices"


class DeviceKind:
    """A kind of device, with the facts that torch.accelerator lacks.

    name: torch's name, as in `torch.device(name)`. backend: the torch.distributed backend between such devices.
    environment: variables that are set before the backend is used, unless the user has set them. interface_variable:
    the variable that restricts the backend to a network interface. times_collectives: True if the backend's works
    report how long they took.
    """

    name: ClassVar[str]
    backend: ClassVar[str]
    environment: ClassVar[Mapping[str, str]] = MappingProxyType({})
    interface_variable: ClassVar[str] = ""
    times_collectives: ClassVar[bool] = False

    error_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the texts of the device's errors."""

    no_memory: ClassVar[tuple[str, ...]] = ()
    """Texts of out-of-memory errors that are not torch.OutOfMemoryError."""

    context_lost: ClassVar[tuple[str, ...]] = ()
    """Texts of errors after which every later call in this process fails with the same error."""

    device_failed: ClassVar[tuple[str, ...]] = ()
    """Texts of errors that a bad device causes. A bad program can cause some of them too."""

    def module(self) -> Any:
        """Return torch's module for the kind."""
        return torch.get_device_module(self.name)

    def title(self, device: torch.device) -> str:
        """Return the maker's name of `device`, such as "Tesla T4"."""
        return str(self.module().get_device_name(device))

    def uuid(self, device: torch.device) -> str:
        """Return the UUID by which the notebook pins ranks to `device`; "" if it is not known."""
        return ""

    def backend_version(self) -> str:
        """Return the version of the backend's library; "" if it is unknown."""
        return ""

    def emulates_bf16(self, device: torch.device) -> bool:
        """Return True if `device` emulates bf16 by float32."""
        return False

    def multiplies_fp8(self, device: torch.device) -> bool:
        """Return True if `device` has matrix products in fp8."""
        return False


class Cuda(DeviceKind):
    """GPUs of NVIDIA, and of AMD under ROCm."""

    name = NVIDIA
    backend = BACKENDS[NVIDIA]
    environment = MappingProxyType(
        {
            # A failed collective must not end a process whose state the user wants to keep.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            # Otherwise torch prints a dump for each failed collective, but here the training continues.
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            # These turn on the flight recorder, which `%nbkit why` reads. Versions of torch differ in the name.
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            # Each communicator has a stream. A pipeline has four, beside the streams for computing and copying. With
            # CUDA's default of 8 hardware queues, a waiting stream would block others. CUDA reads this when first used.
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        }
    )
    interface_variable = "NCCL_SOCKET_IFNAME"
    times_collectives = True
    error_prefixes = ("CUDA error: ", "HIP error: ")
    no_memory = ("Failed to CUDA calloc", "Failed to CUDA malloc", "'out of memory'")  # NCCL, for a communicator
    context_lost = ("device-side assert", "illegal memory access", "unspecified launch failure", "misaligned address")
    device_failed = (
        "illegal memory access",
        "unspecified launch failure",
        "uncorrectable ECC error",
        "uncorrectable NVLink error",
        "hardware error",
        "hardware stack error",
        "busy or unavailable",
        "no CUDA-capable device",
    )

    def uuid(self, device: torch.device) -> str:
        """Return the UUID as nvidia-smi writes it, "GPU-..."; "" if torch does not know it."""
        found = getattr(self.module().get_device_properties(device), "uuid", "")
        return f"GPU-{str(found).removeprefix('GPU-')}" if found else ""

    def backend_version(self) -> str:
        """Return NCCL's version."""
        return ".".join(map(str, self.module().nccl.version()))

    def emulates_bf16(self, device: torch.device) -> bool:
        """Return True for GPUs before Ampere."""
        # Without the argument, torch returns True for these GPUs too.
        return not self.module().is_bf16_supported(including_emulation=False)

    def multiplies_fp8(self, device: torch.device) -> bool:
        """Return True for NVIDIA's GPUs from Ada and Hopper on. torchao's fp8 training was not tried on AMD's."""
        return torch.version.hip is None and self.module().get_device_capability(device) >= (8, 9)


_kinds: dict[str, DeviceKind] = {Cuda.name: Cuda()}
"""The kinds of device that ranks can compute on. If a machine has only other kinds, ranks train on the CPU."""

_plugins_are_read = False


def find_kind(name: str) -> DeviceKind | None:
    """Return the kind of device that torch calls `name`; None for the CPU and for unknown kinds."""
    global _plugins_are_read
    if name != CPU and name not in _kinds and not _plugins_are_read:
        for entry in entry_points(group=GROUP):
            found = load(entry, "kind of device", UsageError)
            derived = isinstance(found, type) and issubclass(found, DeviceKind)
            if not derived or not getattr(found, "name", "") or not getattr(found, "backend", ""):
                raise UsageError(
                    "A kind of device is a class that derives from nbkit.rank.device.DeviceKind, with a name and a "
                    "backend.",
                    numbers=f"entry point {entry.name} of {GROUP}: {entry.value}",
                    hint=f"pip uninstall {package_of(entry)}",
                )
            _kinds.setdefault(found.name, found())
        _plugins_are_read = True
    return _kinds.get(name)


def backends() -> set[str]:
    """Return the names of the backends that nbkit's groups may have."""
    return {GLOO, *(kind.backend for kind in _kinds.values())}


def is_device_backend(backend: str) -> bool:
    """Return True if `backend` sends from device to device, without copies to the host."""
    return any(kind.backend == backend for kind in _kinds.values())


def kind_names() -> list[str]:
    """Return torch's names of the kinds of device that ranks can compute on."""
    return list(_kinds)


def interface_variables() -> list[str]:
    """Return the variables that restrict the backends between devices to a network interface."""
    return [kind.interface_variable for kind in _kinds.values() if kind.interface_variable]


def backend_times(backend: str) -> bool:
    """Return True if works of `backend` report how long they took."""
    return any(kind.backend == backend and kind.times_collectives for kind in _kinds.values())


_NO_MEMORY = ("can't allocate memory", "not enough memory: you tried to allocate")  # torch's allocator on the CPU

Event = Any
"""An event in a stream, with query() and synchronize(). The events of `stamp` also have elapsed_time(later), in ms."""

_CPU = torch.device(CPU)


class Accelerator:
    """The devices of this process, as torch sees them. If there are none, `holds` always returns False.

    Creating an Accelerator uses no device, so a process that has imported this module can be forked.
    """

    def __init__(self) -> None:
        self._copying: dict[torch.device, torch.Stream] = {}

    @property
    def kind(self) -> str:
        """Return torch's name for the devices of this machine that ranks can compute on; "cpu" if there are none."""
        found = torch.accelerator.current_accelerator(check_available=True)
        return found.type if found is not None and find_kind(found.type) is not None else CPU

    @property
    def backend(self) -> str:
        """Return the backend between such devices; "gloo" if there are none."""
        kind = find_kind(self.kind)
        return GLOO if kind is None else kind.backend

    def count(self) -> int:
        """Return the number of devices that this process sees."""
        return torch.accelerator.device_count() if self.kind != CPU else 0

    def choose(self, index: int) -> None:
        """Make this thread compute on device `index`."""
        torch.accelerator.set_device_index(index)

    def choose_in_thread(self, device: torch.device) -> None:
        """Make this thread compute on `device`. A new thread starts on the first device that the process sees."""
        if self.holds(device):
            self.choose(device.index or 0)

    def chosen(self) -> int:
        """Return the index of the device that this thread computes on."""
        return torch.accelerator.current_device_index()

    def device(self, kind: str) -> torch.device:
        """Return the device for tensors of a rank with this kind of device: the chosen device, or the CPU."""
        return _CPU if kind == CPU else torch.device(kind, self.chosen())

    def own(self) -> torch.device:
        """Return the device of this rank: the chosen one, or the CPU."""
        return self.device(self.kind)

    def holds(self, what: Tensor | torch.device | None) -> bool:
        """Return True if `what` is an accelerator device, or a tensor on one.

        Operations on such a tensor run asynchronously from the host.
        """
        return what is not None and getattr(what, "device", what).type in _kinds

    def stamp(self) -> Event:
        """Record an event in the current stream, and return it. It has elapsed_time."""
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def event(self, device: torch.device) -> Event:
        """Record an event in the current stream of `device`, and return it. It has no elapsed_time."""
        return torch.accelerator.current_stream(device).record_event()

    @contextmanager
    def beside(self, device: torch.device, *, after: Event) -> Iterator[None]:
        """Enqueue the operations inside on a new stream that waits only for `after`. No other stream waits for it."""
        stream = torch.Stream(device)
        stream.wait_event(after)
        with stream:
            yield

    def wait_for_stream(self, device: torch.device) -> None:
        """Wait until `device` has finished everything in its current stream."""
        torch.accelerator.current_stream(device).synchronize()

    def wait_for_all(self, device: torch.device) -> None:
        """Wait until `device` has finished everything. Raises RuntimeError if the device no longer works."""
        torch.accelerator.synchronize(device)

    def fetch(self, tensor: Tensor) -> tuple[Tensor, Event]:
        """Return (host tensor, event after which it holds the values of `tensor`). Does not wait."""
        host = self.pinned(tensor.shape, tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        return host, self.event(tensor.device)

    def fetch_into(self, host: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy `tensors` of one device into the pinned host tensors `host`, and wait once for all of them."""
        for there, tensor in zip(host, tensors, strict=True):
            there.copy_(tensor, non_blocking=True)
        self.wait_for_stream(tensors[0].device)

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a copy of the host tensor `tensor` on `device`.

        For an accelerator, the copy is made from pinned memory on a separate stream, and the host does not wait. The
        host is a step ahead of the device, so the data arrives before the device has finished the previous step.
        """
        if not self.holds(device) or self.holds(tensor):
            return tensor.to(device, non_blocking=True)
        if (stream := self._copying.get(device)) is None:
            stream = self._copying[device] = torch.Stream(device)
        with stream:
            there = tensor.pin_memory().to(device, non_blocking=True)
        current = torch.accelerator.current_stream(device)
        current.wait_stream(stream)
        there.record_stream(current)
        return there

    def pinned(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Return an empty tensor in pinned host memory, which a device can read and write directly."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Return the bytes that tensors take on `device`: (now, at the peak)."""
        return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)

    def elsewhere(self, own: int) -> dict[int, int]:
        """Return index -> bytes of this process's tensors, for all devices that it sees except `own`."""
        held = {i: torch.accelerator.memory_allocated(i) for i in range(self.count()) if i != own}
        return {index: size for index, size in held.items() if size}

    def reset_peak(self, device: torch.device) -> None:
        """Reset the peak of `memory` on `device`, so that it counts from now on."""
        torch.accelerator.reset_peak_memory_stats(device)

    def free_memory(self, device: torch.device) -> int:
        """Return the bytes that are left for tensors: free on `device`, or reserved by torch's allocator and unused."""
        reserve = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return torch.accelerator.get_memory_info(device)[0] + reserve

    def occupied(self, device: torch.device) -> tuple[int, int, int]:
        """Return bytes of `device`: (total, used by all processes, reserved by torch's allocator in this process)."""
        free, total = torch.accelerator.get_memory_info(device)
        return total, total - free, torch.accelerator.memory_reserved(device)

    def trim(self) -> None:
        """Return the unused memory of torch's allocator to the device, because NCCL allocates from the device."""
        torch.accelerator.empty_cache()

    def context_lost(self, error: BaseException) -> str:
        """Return the device's message if this process can no longer compute on it; "" for other errors."""
        said = _first_line(error)
        lost = any(sign in said for kind in _kinds.values() for sign in kind.context_lost)
        return said if lost else self.failed(error)

    def failed(self, error: BaseException) -> str:
        """Return the device's message if a bad device may have caused the error; "" for errors of the program."""
        said = _first_line(error)
        failed = any(
            any(prefix in said for prefix in kind.error_prefixes) and any(sign in said for sign in kind.device_failed)
            for kind in _kinds.values()
        )
        return said if failed else ""

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if `error` says that memory could not be allocated, on a device or on the host."""
        return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in self._no_memory)
        )

    @property
    def _no_memory(self) -> Iterator[str]:
        yield from _NO_MEMORY
        for kind in _kinds.values():
            yield from kind.no_memory

    def seed(self, value: int) -> None:
        """Seed the generator of the chosen device, if this process has used one."""
        if (found := torch.accelerator.current_accelerator()) is None:
            return
        module = torch.get_device_module(found)
        if module.is_initialized():
            module.manual_seed(value)

    def generators_kept(self, devices: Iterable[torch.device]) -> AbstractContextManager[None]:
        """Restore torch's generators of the CPU and of `devices` on exit."""
        held = sorted({d.index for d in devices if self.holds(d) and d.index is not None})
        kind = next((d.type for d in devices if self.holds(d)), NVIDIA)
        return torch.random.fork_rng(devices=held, device_type=kind)

    def generator_states(self, device: torch.device) -> list[Tensor]:
        """Return the states of torch's generators of the CPU and of `device`."""
        states = [torch.default_generator.get_state()]
        return [*states, self._generator(device).get_state()] if self.holds(device) else states

    @contextmanager
    def drawing_by(self, seed: int, device: torch.device) -> Iterator[None]:
        """Seed torch's generator of `device` with `seed` inside this context, and restore it on exit."""
        generator = self._generator(device)
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)

    def _generator(self, device: torch.device) -> torch.Generator:
        if not self.holds(device):
            return torch.default_generator
        return torch.get_device_module(device).default_generators[device.index]  # type: ignore[no-any-return]

    def name(self, device: torch.device) -> str:
        """Return the maker's name of `device`, such as "Tesla T4"; "CPU" for the CPU."""
        return _kinds[device.type].title(device) if self.holds(device) else "CPU"

    def backend_version(self) -> str:
        """Return the version of the backend between such devices; "" if there are none, or if it is not known."""
        kind = find_kind(self.kind)
        return "" if kind is None else kind.backend_version()

    def uuid(self, device: torch.device) -> str:
        """Return the UUID of `device`; "" for the CPU, or if it is not known."""
        return _kinds[device.type].uuid(device) if self.holds(device) else ""

    def runs_triton(self, tensor: Tensor) -> bool:
        """Return True if a Triton kernel can be launched on `tensor`, provided that Triton is installed."""
        return self.holds(tensor) and type(tensor) is Tensor

    def emulates_bf16(self, device: torch.device) -> bool:
        """Return True if `device` emulates bf16 by float32."""
        return _kinds[device.type].emulates_bf16(device)

    def multiplies_fp8(self, device: torch.device) -> bool:
        """Return True if `device` has matrix products in fp8. A CPU has none."""
        return self.holds(device) and _kinds[device.type].multiplies_fp8(device)


def _first_line(error: BaseException) -> str:
    try:
        return str(error).partition("\n")[0]
    except BaseException:  # user code makes the text of its errors, and may raise
        return ""


_accelerator = Accelerator()


def accelerator() -> Accelerator:
    """Return the Accelerator of this process."""
    return _accelerator
