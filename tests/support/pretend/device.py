"""The pretended device: nbkit's Accelerator for CPU tensors that count as tensors of a GPU.

Kernels run at once, on the host. Only the time at which their results are valid is pretended. A tensor is in host
memory after `host`, `pinned` or `fetch`, or if an operation made it from such tensors only.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nbkit.rank.device import Accelerator
from pretend.order import HOST, Order

_CPU = torch.device("cpu")
_SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::unique2"}
_READS_ON_HOST = (Tensor.tolist, Tensor.numpy, Tensor.cpu)
_MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)


class HostMix(RuntimeError):
    """An operation of the device got host memory, or an operation of the host got device memory."""


class ContextLost(RuntimeError):
    """The error after an assert in a kernel: every later use of the device raises it."""


class Event:
    """An event like torch.Event, with timing."""

    def __init__(self, order: Order, actor: str, lands: Any = None) -> None:
        self._order, self.clock, self._lands = order, order.now(actor), lands
        self._at = time.perf_counter()

    def query(self) -> bool:
        self._land()
        return True

    def synchronize(self) -> None:
        self._order.after(HOST, self.clock)
        self._land()

    def elapsed_time(self, later: Event) -> float:
        return (later._at - self._at) * 1e3

    def _land(self) -> None:
        if self._lands is not None:
            self._lands()
            self._lands = None


class PretendAccelerator(Accelerator):
    """The GPU of a rank. counts: calls that cost the host time, by kind; see `checked`."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank, self.order, self.counts = rank, Order(), Counter[str]()
        self.lost = ""
        self._hosts: set[int] = set()
        self._here = threading.local()

    @property
    def kind(self) -> str:
        return "cuda"

    @property
    def stream(self) -> str:
        """The current stream of this thread."""
        return getattr(self._here, "stream", "stream 0")

    def count(self) -> int:
        return 8

    def choose(self, index: int) -> None:
        self._here.index = index

    def chosen(self) -> int:
        return getattr(self._here, "index", 0)

    def device(self, kind: str) -> torch.device:
        return _CPU

    def holds(self, what: Any) -> bool:
        if isinstance(what, Tensor):
            return what.device == _CPU and what.layout == torch.strided and not self.is_host(what)
        return what == _CPU

    def is_host(self, tensor: Tensor) -> bool:
        """Return True if the tensor lies in memory of the host."""
        return bool(self._hosts) and _storage(tensor)._cdata in self._hosts

    def host(self, tensor: Tensor) -> Tensor:
        """Return `tensor`. From here on its memory counts as memory of the host."""
        storage = _storage(tensor)
        if storage._cdata not in self._hosts:
            self._hosts.add(storage._cdata)
            weakref.finalize(storage, self._hosts.discard, storage._cdata)
        return tensor

    def stamp(self) -> Event:
        return Event(self.order, self.stream)

    def event(self, device: torch.device) -> Event:
        return self.stamp()

    @contextmanager
    def beside(self, device: torch.device, *, after: Event) -> Iterator[None]:
        outer, self._here.stream = self.stream, self.order.new_stream()
        self.order.after(self.stream, after.clock)
        try:
            with checked(self):
                yield
        finally:
            self._here.stream = outer

    def wait_for_stream(self, device: torch.device) -> None:
        self.counts["synchronize"] += 1
        self.order.follow(HOST, self.stream)

    def wait_for_all(self, device: torch.device) -> None:
        self.check_context()
        self.wait_for_stream(device)

    def check_context(self) -> None:
        if self.lost:
            raise ContextLost(f"CUDA error: {self.lost}")

    def fetch(self, tensor: Tensor) -> tuple[Tensor, Event]:
        self.check_context()
        with _disable_current_modes(), torch.no_grad():
            there, value = self.pinned(tensor.shape, tensor.dtype), tensor.detach().clone()
            poison(there)
        self.order.follow(self.stream, HOST)
        self.order.touch(self.stream, tensor, "a copy to the host", write=False)
        self.order.touch(self.stream, there, "a copy to the host", write=True)

        def land() -> None:
            with _disable_current_modes():
                there.data.copy_(value)

        return there, Event(self.order, self.stream, land)

    def fetch_into(self, host: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self.order.follow(self.stream, HOST)
        with _disable_current_modes(), torch.no_grad():
            for there, tensor in zip(host, tensors, strict=True):
                assert self.is_host(there), "a copy into memory that is not the host's"
                self.order.touch(self.stream, tensor, "a copy to the host", write=False)
                self.order.touch(self.stream, there, "a copy to the host", write=True)
                there.copy_(tensor)
        self.wait_for_stream(_CPU)

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        if self.is_host(tensor):
            self.counts["pinned copy"] += 1
            with _disable_current_modes():
                return tensor.detach().clone()
        return tensor

    def pinned(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        return self.host(torch.empty(tuple(shape), dtype=dtype))

    def memory(self, device: torch.device) -> tuple[int, int]:
        return 1 << 20, 1 << 20

    def reset_peak(self, device: torch.device) -> None:
        pass

    def free_memory(self, device: torch.device) -> int:
        return 1 << 40

    def trim(self) -> None:
        pass

    def seed(self, value: int) -> None:
        pass  # the only generator has been seeded

    def generators_kept(self, devices: Iterable[torch.device]) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[])

    def _generator(self, device: torch.device) -> torch.Generator:
        return torch.default_generator

    def name(self, device: torch.device) -> str:
        return "Pretended GPU"

    def uuid(self, device: torch.device) -> str:
        return f"GPU-{self.rank:08d}" if device == _CPU else ""

    def runs_triton(self, tensor: Tensor) -> bool:
        return False

    def emulates_bf16(self, device: torch.device) -> bool:
        return False


class _Functions(TorchFunctionMode):
    """Handles what the dispatcher does not see: reads on the host, copies to the device, tensors from numbers."""

    def __init__(self, gpu: PretendAccelerator) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = self._gpu
        if func in _READS_ON_HOST:
            if gpu.is_host(args[0]):
                gpu.order.touch(HOST, args[0], func.__name__, write=False)
            else:
                gpu.counts["host synchronisation"] += 1
                gpu.order.follow(HOST, gpu.stream)
        elif func is Tensor.to and gpu.is_host(args[0]) and any(a == _CPU or a == "cpu" for a in args[1:]):
            gpu.counts["unpinned copy"] += 1
            with _disable_current_modes():
                return args[0].detach().clone()
        elif func in _MADE_OF_NUMBERS:
            return self._made_of_numbers(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _made_of_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a tensor from a list, in host memory. If a device is given, count the copy to it."""
        gpu, made = self._gpu, func(*args, **kwargs)
        if isinstance(args[-1], Tensor):
            return made
        if kwargs.get("device") == _CPU or (func is Tensor.new_tensor and not gpu.is_host(args[0])):
            gpu.counts["unpinned copy"] += 1
            return made
        return gpu.host(made)


class _Operations(TorchDispatchMode):
    def __init__(self, gpu: PretendAccelerator) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self._gpu, kwargs or {}
        read, written = _touched(func, args, kwargs)
        touched = [*read, *written]
        hosts = [t for t in touched if gpu.is_host(t)]
        if func._schema.name in _SYNCS and touched and not hosts:
            gpu.counts["host synchronisation"] += 1
            gpu.order.follow(HOST, gpu.stream)
        if hosts and len(hosts) < len(touched) and func._schema.name not in ("aten::copy_", "aten::_to_copy"):
            if any(t.ndim for t in hosts):
                raise HostMix(f"{func} was given tensors of the host and of the device")
        if hosts and len(hosts) < len(touched) and func._schema.name == "aten::copy_":
            gpu.counts["unpinned copy"] += 1
        gpu.check_context()
        actor = HOST if hosts and len(hosts) == len(touched) else gpu.stream
        if actor != HOST:
            gpu.order.follow(actor, HOST)
        inputs = {_storage(t)._cdata for t in touched}
        for tensors, write in ((read, False), (written, True)):
            for tensor in tensors:
                gpu.order.touch(actor, tensor, str(func), write=write)
        found = func(*args, **kwargs)
        for made in pytree.tree_leaves(found):
            if isinstance(made, Tensor) and made.device == _CPU and _storage(made)._cdata not in inputs:
                if actor == HOST and touched:
                    gpu.host(made)
                if read:
                    gpu.order.touch(actor, made, str(func), write=True)
        return found


@contextmanager
def checked(gpu: PretendAccelerator) -> Iterator[Counter[str]]:
    """Check every operation of this thread inside. Yield gpu.counts, what the host did."""
    with _Functions(gpu), _Operations(gpu):
        yield gpu.counts


def host(tensor: Tensor) -> Tensor:
    """Call `host` of the PretendAccelerator in force."""
    from nbkit.rank.device import accelerator

    here: Any = accelerator()
    found: Tensor = here.host(tensor)
    return found


def poison(tensor: Tensor) -> None:
    """Fill the tensor with a value that nobody should read: NaN, or the largest number of its type."""
    if tensor.dtype is torch.bool:
        tensor.data.fill_(True)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    else:
        tensor.data.fill_(torch.iinfo(tensor.dtype).max)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _touched(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors whose memory `func` reads, and those whose memory it writes. A view touches nothing."""
    schema = func._schema
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return [], []
    if schema.name in ("aten::detach", "aten::set_", "aten::resize_", "aten::empty_like", "aten::new_empty"):
        return [], []
    read: list[Tensor] = []
    written: list[Tensor] = []
    values = list(args) + [kwargs.get(a.name) for a in schema.arguments[len(args) :]]
    for argument, value in zip(schema.arguments, values, strict=False):
        into = written if argument.alias_info is not None and argument.alias_info.is_write else read
        into += [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and _plain(t)]
    return read, written


def _plain(tensor: Tensor) -> bool:
    return tensor.device == _CPU and tensor.layout == torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)
