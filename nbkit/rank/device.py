"""Hides the differences between kinds of devices. Nothing else in the rank wing refers to cuda.

The module is built on torch.accelerator, so ROCm works like CUDA; torch calls both of them cuda. To add a kind of
device, add a line to `BACKENDS`, and a line here for everything that torch.accelerator lacks (names, bf16).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

BACKENDS = {"cuda": "nccl"}
"""The backend between devices of each kind. With kinds that are not listed, ranks train on the CPU."""

_NO_MEMORY = (
    *("can't allocate memory", "not enough memory: you tried to allocate"),  # torch's allocator on the CPU
    *("Failed to CUDA calloc", "Failed to CUDA malloc", "'out of memory'"),  # NCCL, for a communicator
)
"""Texts of out-of-memory errors that have no type of their own."""

_CONTEXT_LOST = ("device-side assert", "illegal memory access", "unspecified launch failure", "misaligned address")
"""Texts of CUDA errors after which every later call in this process fails with the same error."""

_DEVICE_FAILED = (
    "illegal memory access",
    "unspecified launch failure",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware error",
    "hardware stack error",
    "busy or unavailable",
    "no CUDA-capable device",
)
"""Texts of CUDA errors that a bad device causes. A bad program can cause some of them too."""

Event = Any
"""A place in a stream, with query() and synchronize(). A stamp also has elapsed_time(later), in ms."""

_CPU = torch.device("cpu")


class Accelerator:
    """The devices of this process, as torch sees them. If there are none, `holds` is False for everything.

    Creating an Accelerator touches no device, so a process that has imported this module can be forked.
    """

    def __init__(self) -> None:
        self._copying: dict[torch.device, torch.Stream] = {}

    @property
    def kind(self) -> str:
        """Return torch's name for the devices of this machine that ranks can compute on; "cpu" if there are none."""
        found = torch.accelerator.current_accelerator(check_available=True)
        return found.type if found is not None and found.type in BACKENDS else "cpu"

    def count(self) -> int:
        """Return the number of devices that this process sees."""
        return torch.accelerator.device_count() if self.kind != "cpu" else 0

    def choose(self, index: int) -> None:
        """Make this thread compute on device `index`."""
        torch.accelerator.set_device_index(index)

    def chosen(self) -> int:
        """Return the index of the device that this thread computes on."""
        return torch.accelerator.current_device_index()

    def device(self, kind: str) -> torch.device:
        """Return the device for the tensors of a rank whose place says `kind`: the chosen device, or the CPU."""
        return _CPU if kind == "cpu" else torch.device(kind, self.chosen())

    def holds(self, what: Tensor | torch.device | None) -> bool:
        """Return True if `what` is an accelerator device, or a tensor on one.

        Operations on such a tensor run asynchronously from the host.
        """
        return what is not None and getattr(what, "device", what).type in BACKENDS

    def stamp(self) -> Event:
        """Record an event with a time in the current stream, and return it. It has elapsed_time."""
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def event(self, device: torch.device) -> Event:
        """Return an event for everything in the current stream of `device` so far."""
        return torch.accelerator.current_stream(device).record_event()

    @contextmanager
    def beside(self, device: torch.device, *, after: Event) -> Iterator[None]:
        """Enqueue everything inside on a separate stream that waits only for `after`. Nothing waits for that stream."""
        stream = torch.Stream(device)
        stream.wait_event(after)
        with stream:
            yield

    def wait_for_stream(self, device: torch.device) -> None:
        """Wait until everything in the current stream of `device` has been computed."""
        torch.accelerator.current_stream(device).synchronize()

    def wait_for_all(self, device: torch.device) -> None:
        """Wait until `device` has nothing to do. Raises RuntimeError if it no longer computes."""
        torch.accelerator.synchronize(device)

    def fetch(self, tensor: Tensor) -> tuple[Tensor, Event]:
        """Return (host memory, event after which it holds the numbers of `tensor`). Waits for nothing."""
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

        An accelerator copies it from pinned memory while the host goes on, on a separate stream. The host is a step
        ahead of the device, so the data of a step is there before the device has ended the step before.
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
        """Return host memory that a device can read and write by itself."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Return the bytes that tensors take on `device`: (now, at the peak)."""
        return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)

    def reset_peak(self, device: torch.device) -> None:
        """Count the peak from here on."""
        torch.accelerator.reset_peak_memory_stats(device)

    def free_memory(self, device: torch.device) -> int:
        """Return the bytes that tensors can still take: free on `device`, or reserved by torch's allocator."""
        reserve = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return torch.accelerator.get_memory_info(device)[0] + reserve

    def occupied(self, device: torch.device) -> tuple[int, int, int]:
        """Return bytes of `device`: (all, used by any process, reserved by torch's allocator in this process)."""
        free, total = torch.accelerator.get_memory_info(device)
        return total, total - free, torch.accelerator.memory_reserved(device)

    def trim(self) -> None:
        """Give the reserve of torch's allocator back to the device. NCCL takes its memory from there."""
        torch.accelerator.empty_cache()

    def context_lost(self, error: BaseException) -> str:
        """Return the device's message if this process can no longer compute on it; "" for other errors."""
        said = _first_line(error)
        return said if any(sign in said for sign in _CONTEXT_LOST) else self.failed(error)

    def failed(self, error: BaseException) -> str:
        """Return the device's message if another device may not give the error; "" for errors of the program."""
        said = _first_line(error)
        ours = "CUDA error: " in said or "HIP error: " in said
        return said if ours and any(sign in said for sign in _DEVICE_FAILED) else ""

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if `error` says that memory could not be allocated, on a device or on the host."""
        return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)
        )

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
        kind = next((d.type for d in devices if self.holds(d)), "cuda")
        return torch.random.fork_rng(devices=held, device_type=kind)

    @contextmanager
    def drawing_by(self, seed: int, device: torch.device) -> Iterator[None]:
        """Make what torch draws on `device` depend only on `seed` inside, and restore the generator on exit."""
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
        """Return the maker's name of `device`, such as "Tesla T4"."""
        return str(torch.get_device_module(device).get_device_name(device))

    def uuid(self, device: torch.device) -> str:
        """Return the UUID as nvidia-smi writes it, "GPU-..."; "" for the CPU, or if torch does not know it."""
        if not self.holds(device):
            return ""
        found = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", "")
        return f"GPU-{str(found).removeprefix('GPU-')}" if found else ""

    def runs_triton(self, tensor: Tensor) -> bool:
        """Return True if a Triton kernel can be launched on `tensor`, provided that Triton is installed."""
        return self.holds(tensor) and type(tensor) is Tensor

    def emulates_bf16(self, device: torch.device) -> bool:
        """Return True if `device` computes bf16 by way of float32."""
        # Without the argument torch says yes to GPUs before Ampere too.
        return not torch.get_device_module(device).is_bf16_supported(including_emulation=False)


def _first_line(error: BaseException) -> str:
    try:
        return str(error).partition("\n")[0]
    except BaseException:  # raised by user code that makes the text
        return ""


_accelerator = Accelerator()


def accelerator() -> Accelerator:
    """Return the Accelerator of this process."""
    return _accelerator
