"""What differs between kinds of devices, asked in this one place: nobody else in the rank wing asks for cuda.

Built on torch.accelerator, so that ROCm, which torch calls cuda too, comes with CUDA. A further kind of device is a
line in `BACKENDS`, and what torch.accelerator does not have for it (names, bf16) a line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

BACKENDS = {"cuda": "nccl"}
"""Kind of device -> the backend between devices of that kind. What is not here trains on the CPU."""

_NO_MEMORY = (
    *("can't allocate memory", "not enough memory: you tried to allocate"),  # torch's allocator on the CPU
    *("Failed to CUDA calloc", "Failed to CUDA malloc", "'out of memory'"),  # NCCL, for a communicator
)
"""In errors that have no type of their own."""

_CONTEXT_LOST = ("device-side assert", "illegal memory access", "unspecified launch failure", "misaligned address")
"""In an error of CUDA: every later call in this process gives the same one."""

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
"""In an error of CUDA that a bad device gives, some of them a bad program too."""

Event = Any
"""A place in a stream: query(), synchronize(); a stamp also elapsed_time(later), in ms."""

_CPU = torch.device("cpu")


class Accelerator:
    """The devices of this process, as torch has them. Without any, `holds` is False of everything.

    Making one touches no device, so that a process which has imported this can be forked.
    """

    def __init__(self) -> None:
        self._copying: dict[torch.device, torch.Stream] = {}

    @property
    def kind(self) -> str:
        """Return what torch calls the devices of this machine that ranks can compute on, "cpu" without one."""
        found = torch.accelerator.current_accelerator(check_available=True)
        return found.type if found is not None and found.type in BACKENDS else "cpu"

    def count(self) -> int:
        """Devices that this process sees."""
        return torch.accelerator.device_count() if self.kind != "cpu" else 0

    def choose(self, index: int) -> None:
        """This thread computes on device `index`."""
        torch.accelerator.set_device_index(index)

    def chosen(self) -> int:
        """The device that this thread computes on."""
        return torch.accelerator.current_device_index()

    def device(self, kind: str) -> torch.device:
        """Where the tensors of a rank lie whose place says `kind`: on the chosen device, or on the CPU."""
        return _CPU if kind == "cpu" else torch.device(kind, self.chosen())

    def holds(self, what: Tensor | torch.device | None) -> bool:
        """Return True if a tensor lies on a device, and the host is only told of what becomes of it; or: whether it is
        one."""
        return what is not None and getattr(what, "device", what).type in BACKENDS

    def stamp(self) -> Event:
        """When the current stream comes to here, once it has: with elapsed_time."""
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def event(self, device: torch.device) -> Event:
        """Return what is in the current stream of `device` so far."""
        return torch.accelerator.current_stream(device).record_event()

    @contextmanager
    def beside(self, device: torch.device, *, after: Event) -> Iterator[None]:
        """What is enqueued inside goes to a stream of its own, waits for `after` alone, and nobody waits for it."""
        stream = torch.Stream(device)
        stream.wait_event(after)
        with stream:
            yield

    def wait_for_stream(self, device: torch.device) -> None:
        """Until what is in the current stream of `device` has been computed."""
        torch.accelerator.current_stream(device).synchronize()

    def wait_for_all(self, device: torch.device) -> None:
        """Until `device` has nothing to do. Raises RuntimeError when it does not compute any more."""
        torch.accelerator.synchronize(device)

    def fetch(self, tensor: Tensor) -> tuple[Tensor, Event]:
        """(memory of the host, the event after which it holds the numbers of `tensor`). Waits for nothing."""
        host = self.pinned(tensor.shape, tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        return host, self.event(tensor.device)

    def fetch_into(self, host: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy `tensors` of one device into pinned memory of the host, one each, and wait once for all of them."""
        for there, tensor in zip(host, tensors, strict=True):
            there.copy_(tensor, non_blocking=True)
        self.wait_for_stream(tensors[0].device)

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """`tensor` of the host on `device`. On a device it is copied while the host goes on, from pinned memory.

        It travels on a stream of its own. The host is a step ahead of the device: so what a step needs is there before
        the device has ended the step in front of it.
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
        """Memory of the host that a device can write to, and read, by itself."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Bytes that tensors take on `device`: (now, at the peak)."""
        return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)

    def reset_peak(self, device: torch.device) -> None:
        """The peak counts from here on."""
        torch.accelerator.reset_peak_memory_stats(device)

    def free_memory(self, device: torch.device) -> int:
        """Bytes that tensors can still take: free on `device`, or in reserve of torch's allocator."""
        reserve = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return torch.accelerator.get_memory_info(device)[0] + reserve

    def occupied(self, device: torch.device) -> tuple[int, int, int]:
        """Return bytes of `device`: (all, used by any process, reserved by torch's allocator in this one)."""
        free, total = torch.accelerator.get_memory_info(device)
        return total, total - free, torch.accelerator.memory_reserved(device)

    def trim(self) -> None:
        """Give what torch's allocator has in reserve back to the device, where NCCL takes its own memory from."""
        torch.accelerator.empty_cache()

    def context_lost(self, error: BaseException) -> str:
        """Return what the device says when nothing can be computed on it any more by this process; "" of other
        errors."""
        said = _first_line(error)
        return said if any(sign in said for sign in _CONTEXT_LOST) else self.failed(error)

    def failed(self, error: BaseException) -> str:
        """As `context_lost`, of the errors that another device may not give; "" of those that are the program's."""
        said = _first_line(error)
        ours = "CUDA error: " in said or "HIP error: " in said
        return said if ours and any(sign in said for sign in _DEVICE_FAILED) else ""

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if `error` says that memory could not be allocated, of a device or of the host."""
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
        """After it, torch's generator of the CPU and those of `devices` are as before."""
        held = sorted({d.index for d in devices if self.holds(d) and d.index is not None})
        kind = next((d.type for d in devices if self.holds(d)), "cuda")
        return torch.random.fork_rng(devices=held, device_type=kind)

    @contextmanager
    def drawing_by(self, seed: int, device: torch.device) -> Iterator[None]:
        """Inside, what torch draws on `device` follows from `seed` alone; after it, its generator is as before."""
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
        """As its maker calls it: "Tesla T4"."""
        return str(torch.get_device_module(device).get_device_name(device))

    def uuid(self, device: torch.device) -> str:
        """As nvidia-smi writes it: "GPU-..."; "" where torch does not know it, and of the CPU."""
        if not self.holds(device):
            return ""
        found = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", "")
        return f"GPU-{str(found).removeprefix('GPU-')}" if found else ""

    def runs_triton(self, tensor: Tensor) -> bool:
        """Return True if a kernel of Triton can be launched on `tensor`, where there is Triton."""
        return self.holds(tensor) and type(tensor) is Tensor

    def emulates_bf16(self, device: torch.device) -> bool:
        """Return True if `device` computes bf16 by way of float32."""
        # Without the argument torch says yes to GPUs before Ampere too.
        return not torch.get_device_module(device).is_bf16_supported(including_emulation=False)


def _first_line(error: BaseException) -> str:
    try:
        return str(error).partition("\n")[0]
    except BaseException:  # by code of the user's, which makes the text
        return ""


_accelerator = Accelerator()


def accelerator() -> Accelerator:
    """Of this process."""
    return _accelerator
