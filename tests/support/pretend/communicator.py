"""A process group that follows NCCL's rules over gloo.

- One communicator for the collectives and batches of a group, and one for each pair of ranks that send single
  messages. Each is created at its first use, which blocks the host until all of its members use it.
- Operations on a communicator run one after the other. A send ends when it is received. Tags do not matter.
- A result is valid only after `wait`. Until then its tensor holds poison. A tensor that is being sent must not change
  or move. `wait` makes the current stream wait, and raises nothing if the operation was aborted.
- A handle keeps its outputs for as long as it lives.
- `abort` waits for the device, which other stuck communicators keep busy; after `shutdown` it touches freed memory.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from nbkit.rank.comm.delegating_group import COLLECTIVES
from nbkit.rank.comm.gloo.collectives import method
from pretend.device import PretendAccelerator, poison


class Limits:
    """Limits in seconds: an operation that takes longer counts as hanging."""

    come, abort, wait = 5.0, 6.0, 30.0


IN_PLACE = {"broadcast", "allreduce", "allreduce_coalesced", "reduce"}
_FLAT = {"all_gather_single", "_allgather_base"}


class Stuck(RuntimeError):
    """An operation that would have hung."""


class ChangedInFlight(RuntimeError):
    """A tensor changed, or its memory was freed, between issue and wait."""


class AbortAfterShutdown(RuntimeError):
    """A communicator was aborted after it had been destroyed: its memory is freed."""


works: weakref.WeakSet[Work] = weakref.WeakSet()
"""All handles that are still referenced."""


class Op:
    """An operation on a communicator."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act
        self.done = threading.Event()


class Communicator:
    """A FIFO of operations and the thread that runs them. key: its name, which is the same on all its members."""

    everyone: ClassVar[list[Communicator]] = []

    def __init__(self, key: str, members: tuple[int, ...]) -> None:
        self.key, self.members = key, members
        self.parent, self.children = "", 0  # the communicator that this one was split from; how many were split
        self.aborted = threading.Event()
        self.shut = self.met = False
        self.under_way: Op | None = None
        self._ops: queue.SimpleQueue[Op | None] = queue.SimpleQueue()
        self._issued: deque[Op] = deque()  # operations that may not have ended
        self.everyone.append(self)
        threading.Thread(target=self._run, name=f"pretend {key}", daemon=True).start()

    def issue(self, op: Op) -> None:
        if self.aborted.is_set():
            raise RuntimeError(f"NCCL communicator was aborted: {op.name} on {self.key}")
        self.under_way = self.under_way or op
        self._issued.append(op)
        while self._issued[0].done.is_set():
            self._issued.popleft()
            if not self._issued:
                break
        self._ops.put(op)

    @property
    def stuck(self) -> bool:
        return self.under_way is not None and not self.aborted.is_set()

    def abort(self) -> None:
        if self.shut:
            raise AbortAfterShutdown(f"{self.key} was aborted after it had been shut down")
        self._release()
        until = time.monotonic() + Limits.abort
        while any(other.stuck for other in list(self.everyone)):
            if time.monotonic() > until:
                raise Stuck(f"the abort of {self.key} waits for {[c.key for c in self.everyone if c.stuck]}")
            time.sleep(0.004)

    @classmethod
    def give_up(cls) -> None:
        """End all stuck operations of this process."""
        for one in list(cls.everyone):
            if one.stuck:
                one._release()

    def _release(self) -> None:
        self.aborted.set()
        for op in list(self._issued):
            op.done.set()

    def shutdown(self) -> None:
        self.shut = True
        self._ops.put(None)
        if self in self.everyone:
            self.everyone.remove(self)

    def _run(self) -> None:
        while (op := self._ops.get()) is not None:
            self.under_way = op
            if not self.aborted.is_set():
                try:
                    op.act()
                except Exception:
                    continue  # gloo was aborted; NCCL would not notice, and would wait until it is aborted too
            op.done.set()
            if self._ops.empty() and not self.aborted.is_set():
                self.under_way = None


class Work(dist.Work):
    """NCCL's handle: `wait` makes the current stream wait."""

    def __init__(
        self, gpu: PretendAccelerator, where: Communicator, op: Op, inputs: list[Tensor], kept: list[Tensor],
        outputs: list[Tensor], filled: list[Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        works.add(self)
        self._gpu, self._where, self._op = gpu, where, op
        self._inputs, self._kept, self._outputs, self._filled = inputs, kept, outputs, filled
        self._began, self._waited = time.perf_counter(), False
        self._addresses = [t.data_ptr() for t in (*inputs, *outputs)]
        self._event = gpu.order.now(where.key)

    def wait(self, *timeout: Any) -> bool:
        if not self._op.done.wait(Limits.wait):
            raise Stuck(f"{self._op.name} on {self._where.key} does not end")
        self._gpu.order.after(self._gpu.stream, self._event)
        if not self._waited and not self._where.aborted.is_set():
            self._waited = True
            with _disable_current_modes(), torch.no_grad():
                if [t.data_ptr() for t in (*self._inputs, *self._outputs)] != self._addresses:
                    raise ChangedInFlight(f"memory of {self._op.name} on {self._where.key} was freed before its wait")
                for tensor, copy in zip(self._inputs, self._kept, strict=True):
                    if not _same(tensor, copy):
                        raise ChangedInFlight(f"what {self._op.name} on {self._where.key} sends was changed in flight")
                for tensor, value in zip(self._outputs, self._filled, strict=True):
                    tensor.data.copy_(value)
        self._inputs, self._kept = [], []  # torch releases the tensors that it kept
        return True

    def is_completed(self) -> bool:
        return self._op.done.is_set()

    def is_success(self) -> bool:
        return self._op.done.is_set()

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._outputs

    def _get_duration(self) -> float:
        return (time.perf_counter() - self._began) * 1e3


class PretendGroup:
    """The group inside a DelegatingGroup, instead of NCCL's."""

    def __init__(self, gpu: PretendAccelerator, gloo: Any, members: tuple[int, ...], store: Any, backend: str) -> None:
        self._gpu, self._gloo, self.members, self._store = gpu, gloo, members, store
        self._communicators: dict[str, Communicator] = {}
        self._batch: list[tuple[str, Tensor, int]] | None = None
        self._sent: dict[tuple[str, int], itertools.count[int]] = {}
        self._device_types = [torch.device("cpu")]
        self.bound_device_id = None
        self.supports_coalescing, self._backend_name = True, backend
        self.supports_splitting, self.options = True, SimpleNamespace(split_from=None, split_color=-1)
        self.group_name, self.group_desc = gloo.group_name, gloo.group_desc

    def name(self) -> str:
        return "nccl"

    def _get_backend(self, device: Any) -> PretendGroup:
        return self

    def _get_backend_name(self) -> str:
        return "nccl"

    def _enable_collectives_timing(self) -> None:
        pass

    def _has_hooks(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name in COLLECTIVES:
            return lambda *args, **kwargs: self._collective(name, *args, **kwargs)
        return getattr(self._gloo, name)

    def abort(self) -> None:
        for one in list(self._communicators.values()):
            one.abort()

    def shutdown(self) -> None:
        for one in self._communicators.values():
            one.shutdown()
        self._gloo.shutdown()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._message("send", tensors[0], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._message("recv", tensors[0], peer)

    def _start_coalescing(self, device: Any) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any) -> Any:
        batch, self._batch = self._batch or [], None
        where = self._meet("all", self.members)
        staged = [_copy(t) if kind == "send" else torch.empty_like(t) for kind, t, _ in batch]
        tags = [(1 << 20) + next(self._sent.setdefault((kind, peer), itertools.count())) for kind, _, peer in batch]

        def act() -> None:
            works = []
            for (kind, _, peer), data, tag in zip(batch, staged, tags, strict=True):
                works.append(getattr(self._gloo, kind)([_bytes(data)], peer, tag))
            for work in works:
                work.wait()

        sent = [i for i, (kind, _, _) in enumerate(batch) if kind == "send"]
        received = [i for i, (kind, _, _) in enumerate(batch) if kind == "recv"]
        return self._issue(
            where, Op("batch", act), [batch[i][1] for i in sent], [staged[i] for i in sent],
            [batch[i][1] for i in received], [staged[i] for i in received],
        )  # fmt: skip

    def _message(self, kind: str, tensor: Tensor, peer: int) -> Any:
        if self._batch is not None:
            self._batch.append((kind, tensor, peer))
            return None
        me = self._gloo.rank()
        pair = (min(me, peer), max(me, peer))
        where = self._meet(f"{pair[0]}:{pair[1]}", (self.members[pair[0]], self.members[pair[1]]))
        number = next(self._sent.setdefault((where.key, -1), itertools.count()))
        staged, token = (_copy(tensor) if kind == "send" else torch.empty_like(tensor)), torch.zeros(1)

        def act() -> None:
            # The sender's part can end only after the receiver has reached this point.
            if kind == "send":
                self._gloo.recv([token], peer, 2 * number).wait()
                self._gloo.send([_bytes(staged)], peer, 2 * number + 1).wait()
            else:
                self._gloo.send([token], peer, 2 * number).wait()
                self._gloo.recv([_bytes(staged)], peer, 2 * number + 1).wait()

        if kind == "send":
            return self._issue(where, Op(f"send to {peer}", act), [tensor], [staged], [], [])
        return self._issue(where, Op(f"recv from {peer}", act), [], [], [tensor], [staged])

    def _collective(self, name: str, *args: Any, **kwargs: Any) -> Any:
        where = self._meet("all", self.members)
        args = (*args, *kwargs.values())
        options = args[-1] if args else None
        if name == "barrier":
            op = Op(name, lambda: self._gloo.barrier().wait())
            return self._issue(where, op, [], [], [], [], at_once=not getattr(options, "asyncOp", True))
        source = getattr(options, "rootRank", None)
        reads_only = (name == "broadcast" and source == self._gloo.rank()) or (
            name == "reduce" and source != self._gloo.rank()
        )
        written = [] if reads_only else _tensors(args[0])
        read = _tensors(args[0]) if name in IN_PLACE else _tensors(args[1])
        staged: dict[int, Tensor] = {}

        def stage(value: Any, copy: bool) -> Any:
            def one(t: Any) -> Any:
                if not isinstance(t, Tensor):
                    return t
                staged[id(t)] = _copy(t) if copy else torch.empty_like(t)
                return staged[id(t)]

            return pytree.tree_map(one, value)

        with _disable_current_modes(), torch.no_grad():
            if name in IN_PLACE:
                handed = [stage(args[0], True), *args[1:]]
                filled = [staged[id(t)] for t in written]
                kept = [_copy(t) for t in read] if reads_only else []
                inputs = read if reads_only else []
            else:
                outputs = stage(args[0], False)
                filled = [staged[id(t)] for t in written]
                handed = [outputs, stage(args[1], True), *args[2:]]
                # Do not compare a tensor that is input and output, as in an all-gather into the memory of its own part.
                mine = {_place(t) for t in written}
                inputs = [t for t in read if _place(t) not in mine]
                kept = [_copy(t) for t in inputs]
        if name in _FLAT:
            handed[:2] = [t.view(-1) for t in handed[:2]]  # NCCL ignores shapes, but gloo refuses some
        op = Op(name, lambda: _wait(method(self._gloo, name)(*handed)))
        at_once = not getattr(options, "asyncOp", True)
        return self._issue(where, op, inputs, kept, written, filled, at_once=at_once)

    def _issue(
        self, where: Communicator, op: Op, inputs: list[Tensor], kept: list[Tensor], outputs: list[Tensor],
        filled: list[Tensor], *, at_once: bool = False,
    ) -> Work | None:  # fmt: skip
        gpu = self._gpu
        gpu.check_context()
        # The communicator's stream waits for all earlier work of the current stream.
        gpu.order.follow(gpu.stream, "host")
        gpu.order.follow(where.key, gpu.stream)
        for tensors, write in ((inputs, False), (outputs, True)):
            for tensor in tensors:
                if gpu.is_host(tensor):
                    raise RuntimeError(f"No backend type associated with device type cpu: {op.name} of host memory")
                gpu.order.touch(where.key, tensor, op.name, write=write)
        work = Work(gpu, where, op, inputs, kept, outputs, filled)
        with _disable_current_modes(), torch.no_grad():
            for tensor in outputs:
                poison(tensor)
        where.issue(op)
        if at_once:
            work.wait()
            return None
        return work

    def _meet(self, key: str, members: tuple[int, ...]) -> Communicator:
        where = self._communicators.get(key)
        if where is None:
            where = self._communicators[key] = Communicator(f"{self.group_name}/{key}", members)
        if not where.met and key == "all" and self.options.split_from is not None:
            self._split(where)
        if not where.met:
            until, name = time.monotonic() + Limits.come, f"pretend/{key}"
            self._store.add(name, 1)
            while self._store.add(name, 0) < len(members):
                if time.monotonic() > until:
                    raise Stuck(
                        f"the first use of {self.group_desc} {where.key} waits for its members {members}, of whom "
                        f"{self._store.add(name, 0)} have come"
                    )
                time.sleep(0.004)
            where.met = True
        return where

    def _split(self, where: Communicator) -> None:
        """Split `where` from another communicator, as ncclCommSplit does: all members of that one must call it."""
        parent = self.options.split_from
        source = parent._communicators.get("all")
        if source is None or any(not op.done.is_set() for op in source._issued):
            raise Stuck(f"{where.key} is split from a communicator that is not there, or is in use")
        source.children += 1
        name, until = f"pretend/split {source.children}", time.monotonic() + Limits.come
        color = f"{self.options.split_color} {self.members}"
        parent._store.set(f"{name} of {self.options.split_color}", color)
        parent._store.add(name, 1)
        while parent._store.add(name, 0) < len(parent.members):
            if time.monotonic() > until:
                raise Stuck(f"a split for {where.key} waits for all members of {source.key}")
            time.sleep(0.004)
        if parent._store.get(f"{name} of {self.options.split_color}").decode() != color:
            raise RuntimeError(f"two groups of one split have the color {self.options.split_color}")
        where.parent = source.key


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _copy(tensor: Tensor) -> Tensor:
    with _disable_current_modes(), torch.no_grad():
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(_bytes(_copy(one)), _bytes(other)) if one.numel() else True
