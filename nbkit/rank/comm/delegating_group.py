"""A process group that passes every call on to an inner group. Every group of a rank is of this class.

The user's DDP, FSDP2 and DeviceMesh objects keep the outer object forever. A new generation of the world replaces only
the inner group, so these objects continue to train. Each call is counted, which shows which rank is behind, and is
reported to the listeners. group_creation.py makes the groups.

`COLLECTIVES` lists the operations of a process group by torch's names.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from time import perf_counter_ns as now
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nbkit.errors import ClusterError
from nbkit.rank.background_threads import started
from nbkit.rank.comm.background_creation import GroupRendezvous
from nbkit.rank.comm.gloo.collectives import EXCHANGED, method
from nbkit.rank.comm.gloo.interruptible_wait import Interruptible, has_left
from nbkit.rank.device import accelerator, backend_times, is_device_backend
from nbkit.rank.telemetry import collectives
from nbkit.rank.torch_private import group_tables
from nbkit.wire.activity import ANYONE, Operation

# torch's method name -> (common name, position of the argument that this rank contributes; for scatter, of the output).
COLLECTIVES: dict[str, tuple[str, int | None]] = {
    "barrier": ("barrier", None),
    "broadcast": ("broadcast", 0),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "gather_single": ("gather", 1),
    "gather_into_tensor": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
}

# Operations whose options, the last argument, name a root rank of the group.
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})

# The outer group implements these itself. A method in neither table is passed on without being counted: it issues no
# operation, belongs to an operation that was counted, or is newer than these tables.
OWN = frozenset({
    "BackendType", "_device_types", "_id", "_pybind11_conduit_v1_", "_register_backend", "_set_default_backend",
    "_set_group_desc", "_set_group_name", "bound_device_id", "boxed", "rank", "size", "unbox",
})  # fmt: skip


def num_bytes(payload: torch.Tensor | Iterable[Any] | Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists. Anything else has 0 bytes."""
    if type(payload) is list and len(payload) == 1:  # the most common case
        payload = payload[0]
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    return sum(map(num_bytes, payload)) if isinstance(payload, (list, tuple)) else 0


def first_of(payload: Any) -> Any:
    """Return the first item of nested lists. Anything else is returned unchanged."""
    while isinstance(payload, (list, tuple)) and payload:
        payload = payload[0]
    return payload


FOREVER = timedelta(days=365)
"""The time-out of a group if the user sets none. torch's default of 10 or 30 minutes would be a hidden limit."""

_MONITORED_BARRIER_TIMEOUT = timedelta(minutes=30)

listeners: list[Callable[[str, str, int], None]] = []
"""Called with (operation, label of the group, bytes that this rank contributes) when an operation is issued."""

P = TypeVar("P", bound=ProcessGroup)

_stand_in: ContextVar[ProcessGroup | None] = ContextVar("stand_in", default=None)
_standing: list[ProcessGroup] = []
"""The groups of all active `stand_in` contexts, innermost last. Empty during training, so that one check is enough."""

_OWN_REFERENCES = 2
"""The references that `drop` has itself: the list that holds the group, and the argument of getrefcount."""

_last: tuple[str, int | str | None, collectives.GroupInfo, int, int] | None = None
_born: weakref.WeakSet[DelegatingGroup] = weakref.WeakSet()
_born_lock = threading.Lock()


@contextmanager
def stand_in(group: P) -> Iterator[P]:
    """Use `group` as the world inside this context. Collectives over all ranks then run in `group`.

    This is for checks that run user code on one rank. The code may gather or sum over ranks, while the other ranks do
    not take part. A backward pass on an accelerator runs in one of torch's threads, which uses the innermost group.
    Collectives of a group of only some ranks raise NotImplementedError.
    """
    token = _stand_in.set(group)
    _standing.append(group)
    try:
        yield group
    finally:
        _standing.remove(group)
        _stand_in.reset(token)


def _standing_in() -> ProcessGroup | None:
    group = _stand_in.get()
    if group is None and type(threading.current_thread()).__name__ == "_DummyThread":
        return _standing[-1]
    return group


class Broken:
    """A placeholder for an inner group that no longer exists. Every use raises ClusterError with `reason`."""

    def __init__(self, reason: str, *, numbers: str = "", hint: str = "") -> None:
        self._error = (reason, numbers, hint)

    def __getattr__(self, name: str) -> NoReturn:
        reason, numbers, hint = self._error
        raise ClusterError(reason, numbers=numbers, hint=hint)


before_collective: ContextVar[Callable[[Any], None] | None] = ContextVar("before_collective", default=None)
"""Called with the arguments of each collective, which may write into them. torch does not show this to a mode."""


class DelegatingGroup(ProcessGroup):
    """A process group that uses a replaceable inner group.

    members: the global ranks of the members, in the group's order. sockets: the inodes of the TCP connections that the
    inner group has opened. recipe: the arguments with which group_creation.py makes another inner group of this kind.
    """

    def __init__(self, inner: ProcessGroup, *, members: tuple[int, ...]) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg,arg-type]
        self.inner: Any = inner
        self.members = members
        self.sockets: frozenset[int] = frozenset()
        self.recipe: dict[str, Any] = {}
        self.formed, self.destroyed = 1, False  # number of inner groups so far; True after this group was shut down
        self.meeting: GroupRendezvous | None = (
            None  # members meet here before the first use, if the first use could block forever
        )
        self.keep: list[object] = []  # Python parts of C++ objects that the inner group uses, such as a store
        self.count = 0
        self.sent: dict[int | str, int] = {}
        self.received: dict[int | str, int] = {}
        self.split_into: Callable[[DelegatingGroup, ProcessGroup, tuple[int, ...]], DelegatingGroup] | None = None
        # Register backend types without backends. torch reads the types from C++, and a backend registered there
        # could never be replaced.
        kinds = {torch.device(device): inner._get_backend(device).name() for device in inner._device_types}
        for device, kind in kinds.items():
            self._register_backend(
                device, getattr(ProcessGroup.BackendType, kind.upper(), ProcessGroup.BackendType.CUSTOM), None
            )  # type: ignore[arg-type]
        if inner.bound_device_id is not None:
            self.bound_device_id = inner.bound_device_id
        self._name, self._desc, self._rank = inner.group_name, inner.group_desc, inner.rank()
        self.label = _label(inner.group_name, inner.group_desc, members)
        self.seen = collectives.GroupInfo(self.label, collectives.axis_of(inner.group_desc, inner.group_name), members)
        self._between_devices, self._batching = any(map(is_device_backend, kinds.values())), False
        if any(map(backend_times, kinds.values())):
            inner._enable_collectives_timing()  # type: ignore[attr-defined]
        with _born_lock:
            _born.add(self)

    def rank(self) -> int:
        if _standing and (group := _standing_in()) is not None:
            return group.rank()
        return self._rank

    def size(self) -> int:
        if _standing and (group := _standing_in()) is not None:
            return group.size()
        return len(self.members)

    def _instead(self, name: str) -> Callable[..., Any] | None:
        """Return the stand-in group's method for the collective `name`; None if no group stands in."""
        if (group := _standing_in()) is None:
            return None
        if len(self.members) < len(dist.group.WORLD.members):  # type: ignore[union-attr]
            raise NotImplementedError(
                f"{name} in a group of some ranks is not possible while nbkit runs the model on one rank"
            )
        if (own := getattr(type(group), name, None)) is None or own is getattr(ProcessGroup, name, None):
            raise NotImplementedError(f"{name} is not possible while nbkit runs the model on one rank")
        return getattr(group, name)  # type: ignore[no-any-return]

    def getBackendName(self) -> str:
        # Only C++ calls this, in DDP's logger. For "gloo" it would cast the backend that is registered in C++.
        return "delegating"

    # torch keeps name and description in the registered C++ backends, which this object does not have.
    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def use_pg_for_symm_mem_rendezvous(self) -> bool:
        return self.inner.use_pg_for_symm_mem_rendezvous  # type: ignore[no-any-return]

    @use_pg_for_symm_mem_rendezvous.setter
    def use_pg_for_symm_mem_rendezvous(self, value: bool) -> None:
        self.inner.use_pg_for_symm_mem_rendezvous = value

    def shutdown(self) -> None:
        if isinstance(self.inner, Broken):
            return
        if self.inner._has_hooks():
            self.inner._wait_for_pending_works()
        self.inner.shutdown()
        self.destroyed = True
        if has_left():
            self.drop(Broken(f"Process group {self.label} was destroyed."))

    def drop(self, instead: Broken) -> threading.Event:
        """Release the inner group in a thread. The returned event is set when it is gone, or if it is still in use.

        The destructor of a gloo group waits for gloo's threads, and one of them may wait forever for the rest of a
        message. The destructor of an NCCL group can probably take a minute after a rank has died. So a thread with
        other work must not run the destructor. The thread made here keeps the group until it has the last reference.
        Another reference may be in a stack frame of the error that broke the group.
        """
        inner, over = [self.inner], threading.Event()
        self.inner, self.sockets, self.meeting = instead, frozenset(), None
        self.keep.clear()

        def release() -> None:
            pause = 0.01
            while sys.getrefcount(inner[0]) > _OWN_REFERENCES:
                over.set()
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
            inner.clear()
            over.set()

        if started(release, "nbkit-release") is None:
            if has_left():
                # Keep the group alive, because its destructor would never return, here or at interpreter exit.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner[0]))
            inner.clear()
            over.set()
        return over

    def monitored_barrier(self, timeout: timedelta = _MONITORED_BARRIER_TIMEOUT, wait_all_ranks: bool = False) -> None:
        """Run torch's monitored barrier. If the user sets no time-out, it fails after torch's default of 30 minutes."""
        if timeout == FOREVER:
            timeout = _MONITORED_BARRIER_TIMEOUT
        _monitored_barrier(self, timeout, wait_all_ranks)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._transfer("send", tensors, peer, self.sent, self.inner.send, (peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._transfer("recv", tensors, peer, self.received, self.inner.recv, (peer, tag))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        return self._transfer("recv", tensors, "any", self.received, self.inner.recv_anysource, (tag,))

    def _start_coalescing(self, device: torch.device) -> None:
        self._batching = True
        if self.meeting is not None:
            self.meeting.at("all", self.size())
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        # Only nccl makes batches. The batch is timed as a whole, without its parts.
        self._batching = False
        if collectives.mode() != "time":
            return self.inner._end_coalescing(device)
        call = collectives.begin(
            collectives.BATCH, self.seen, None, self.count, 0, on_device=accelerator().holds(device)
        )
        return collectives.follow(call, self.inner._end_coalescing(device))

    def split_group(  # type: ignore[override]
        self, ranks: Sequence[int], *args: Any, **kwargs: Any
    ) -> ProcessGroup | None:
        inner = self.inner.split_group(ranks, *args, **kwargs)
        if inner is None or self.split_into is None:
            return inner  # type: ignore[no-any-return]
        return self.split_into(self, inner, tuple(self.members[rank] for rank in ranks))

    def _transfer(
        self,
        operation: str,
        tensors: list[torch.Tensor],
        peer: int | str,
        counts: dict[int | str, int],
        issue: Callable[..., Any],
        how: tuple[int, ...],
    ) -> Any:
        global _last
        if _standing and (instead := self._instead(operation)) is not None:
            return instead(tensors, *how) if isinstance(peer, int) else instead(tensors, peer, *how)
        if isinstance(peer, int) and not 0 <= peer < len(self.members):
            raise ValueError(
                f"{operation} with rank {peer} is not possible: the group has ranks 0 to {len(self.members) - 1}."
            )
        counts[peer] = number = counts.get(peer, 0) + 1
        _last = (operation, peer, self.seen, number, now())
        alone = not self._batching and isinstance(peer, int)
        if self.meeting is not None and alone and accelerator().holds(tensors[0]):
            # nccl uses a separate communicator for each pair of ranks that send outside a batch.
            low, high = sorted((self.rank(), peer))
            self.meeting.at(f"{low}:{high}", 2)
        for tell in listeners:
            tell(operation, self.label, num_bytes(tensors))
        if collectives.mode() == "off":
            return self._handle(issue(tensors, *how), tensors[0], _last[-1], message=True)
        other = self.members[peer] if isinstance(peer, int) else ANYONE
        timed = not self._batching
        on_device = timed and self._between_devices and accelerator().holds(tensors[0])
        call = collectives.begin(
            operation,
            self.seen,
            other,
            number,
            num_bytes(tensors),
            on_device=on_device,
            dtype=tensors[0].dtype,
            tag=how[-1],
        )
        work = issue(tensors, *how)
        if collectives.mode() != "time":
            return self._handle(work, tensors[0], call.issued, message=True)
        return collectives.follow(call, work) if timed else work

    def _handle(self, work: Any, tensor: torch.Tensor | None, issued: int, *, message: bool) -> Any:
        """Return the handle for an operation that is not timed. On the host, the handle's wait can be ended."""
        on_device = self._between_devices and (self._batching or tensor is None or accelerator().holds(tensor))
        return work if work is None or on_device else Interruptible(work, issued, message)


def _collective(name: str, spoken: str, payload: int | None) -> Callable[..., Any]:
    exchanged, rooted = name in EXCHANGED, spoken in ROOTED

    # This runs for every collective of a training. So constants are computed above, and the clock is read once.
    def issue(self: DelegatingGroup, *args: Any, **kwargs: Any) -> Any:
        global _last
        if (tell_first := before_collective.get()) is not None:
            tell_first(args)
        if _standing and (instead := self._instead(name)) is not None:
            return instead(*args, **kwargs)
        entered = now()
        self.count = number = self.count + 1
        _last = (spoken, None, self.seen, number, entered)
        if self.meeting is not None and "all" not in self.meeting.been and name != "monitored_barrier":
            tensor = _tensor(args[payload]) if payload is not None and payload < len(args) else None
            # CPU tensors of such a group use gloo, whose ranks met when the group was formed.
            if tensor is None or accelerator().holds(tensor):
                self.meeting.at("all", self.size())
                entered = now()
        own = method(self.inner, name) if exchanged else getattr(self.inner, name)
        noting = collectives.mode() != "off"
        values = (*args, *kwargs.values()) if kwargs else args
        given = None if payload is None or payload >= len(values) else values[payload]
        tensor = _tensor(given)
        if not noting and not listeners:
            return self._handle(own(*args, **kwargs), tensor, entered, message=False)
        moved = num_bytes(given)
        for tell in listeners:
            tell(spoken, self.label, moved)
        if not noting:
            return self._handle(own(*args, **kwargs), tensor, entered, message=False)
        timed = not self._batching
        call = collectives.begin(
            spoken,
            self.seen,
            None,
            number,
            moved,
            on_device=timed and self._between_devices and accelerator().holds(tensor),
            dtype=None if tensor is None else tensor.dtype,
            entered=entered,
        )
        if rooted:
            call.root = self.members[args[-1].rootRank]
        work = own(*args, **kwargs)
        if collectives.mode() != "time":
            return self._handle(work, tensor, call.issued, message=False)
        if not timed:
            return work
        # The last argument is torch's options, which say whether the caller waits at once.
        return collectives.follow(call, work, at_once=bool(args) and not getattr(args[-1], "asyncOp", True))

    issue.__name__ = name
    return issue


def _tensor(payload: Any) -> torch.Tensor | None:
    first = first_of(payload)
    return first if isinstance(first, torch.Tensor) else None


def _silent(name: str) -> Callable[..., Any]:
    def hand_on(self: DelegatingGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    hand_on.__name__ = name
    return hand_on


_monitored_barrier = _collective("monitored_barrier", "monitored_barrier", None)

# A loop overrides the methods, because they differ between torch versions. Only methods of this torch are overridden.
for _name, (_spoken, _payload) in COLLECTIVES.items():
    if hasattr(ProcessGroup, _name):
        setattr(DelegatingGroup, _name, _collective(_name, _spoken, _payload))
for _name in (
    vars(ProcessGroup).keys() - vars(DelegatingGroup).keys() - OWN - ProcessGroup.BackendType.__members__.keys()
):
    if not _name.startswith("__"):
        setattr(DelegatingGroup, _name, _silent(_name))


def live() -> list[DelegatingGroup]:
    """Return all delegating groups that exist in this process, including destroyed ones. Any thread may call it."""
    with _born_lock:
        return list(_born)


def registered() -> list[DelegatingGroup]:
    """Return the delegating groups that are registered in torch (not destroyed), in the same order on all ranks."""
    names = group_tables.pg_names
    groups = [group for group in list(names) if isinstance(group, DelegatingGroup)]
    return sorted(groups, key=lambda group: (group is not dist.group.WORLD, names.get(group, ""), group.members))


def reset_counts() -> None:
    """Set the counts of every group to zero, when a new generation begins on all ranks."""
    global _last
    _last = None
    collectives.ring.generation = collectives.ring.end
    for group in registered():
        group.count, group._batching = 0, False
        group.sent.clear()
        group.received.clear()


def fingerprint() -> dict[str, int]:
    """Return the number of operations that this rank has issued, by group; for send and recv, by pair of ranks.

    A group has the same key on all ranks. `divergence.differences` compares the numbers of ranks.
    """
    # torch names the next group by this number. If the ranks' numbers differ, they would wait for each other forever.
    counts = {"groups made": group_tables.group_count}
    for group in registered():
        me = group.rank()
        counts[group.label] = group.count
        for peer, number in list(group.sent.items()):  # another thread may issue operations meanwhile
            counts[f"{group.label}: {me}->{peer} sent"] = number
        for peer, number in list(group.received.items()):
            counts[f"{group.label}: {peer}->{me} received"] = number
    return counts


def num_issued() -> int:
    """Return the number of operations that this rank has issued in its current groups. Any thread may call it."""
    groups = registered()
    return sum(group.count + sum([*group.sent.values(), *group.received.values()]) for group in groups)


def where() -> str:
    """Return the operation that this process issued last, as text; "" before the first. Any thread may call it.

    If the process waits in an operation, it waits in this one.
    """
    if _last is None:
        return ""
    operation, peer, seen, number, since = _last
    whom = "" if peer is None else f" {'to' if operation == 'send' else 'from'} {peer}"
    return f"{operation}{whom} #{number} of group {seen.label}, issued {(now() - since) / 1e9:.1f} s ago"


def last_issued() -> Operation | None:
    """Return the operation issued last; None before the first. Any thread may call it.

    The Operation has only the fields that are known without a recorded call.
    """
    if _last is None:
        return None
    operation, peer, seen, number, since = _last
    other = peer if peer is None else seen.members[peer] if isinstance(peer, int) else ANYONE
    seconds = (now() - since) / 1e9
    return Operation(operation, seen.label, seen.axis, seen.members, number, other, seconds=seconds)


def _label(name: str, desc: str, members: tuple[int, ...]) -> str:
    if desc == "default_pg":
        return "world"
    shown = ",".join(str(rank) for rank in members[:8]) + (",…" if len(members) > 8 else "")
    return f"{name} [{shown}]" if desc in ("", "undefined") else f"{desc} {name} [{shown}]"
