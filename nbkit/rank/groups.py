"""Every process group of a rank is one of these: a thin object that hands each call to an inner group.

The user's DDP, FSDP2 and DeviceMesh objects hold the outer object for life. A new generation of the world
replaces the inner one, so they train on. On the way through, calls are counted (which rank is behind?) and
told to whoever listens. How groups come to be is in forming.py.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nbkit.errors import ClusterError
from nbkit.rank.reduce_scatter import method

__all__ = [
    "FOREVER",
    "Broken",
    "DelegatingGroup",
    "fingerprint",
    "listeners",
    "live",
    "registered",
    "reset_counts",
    "where",
]

FOREVER = timedelta(days=365)
"""The time-out of a group whose user asked for none: torch's own 10 or 30 minutes would be a hidden one."""

_MONITORED_BARRIER_TIMEOUT = timedelta(minutes=30)

listeners: list[Callable[[str, str, int], None]] = []
"""Called at issue with (operation, group, bytes this rank contributes); nothing is computed while it is empty."""

# What each call is called by people, and the position of the argument that this rank contributes (of scatter: gets).
_COLLECTIVES: dict[str, tuple[str, int | None]] = {
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

# Handed on without counting: they issue nothing, or belong to operations already counted.
_SILENT = (
    "_backend_id",
    "_enable_collectives_timing",
    "_end_coalescing",
    "_get_backend",
    "_get_backend_name",
    "_get_sequence_number_for_group",
    "_has_hooks",
    "_register_on_completion_hook",
    "_set_sequence_number_for_group",
    "_start_coalescing",
    "_wait_for_pending_works",
    "abort",
    "get_group_store",
    "merge_remote_group",
    "name",
    "set_timeout",
)

_last: tuple[str, str, int, float] | None = None
_born: weakref.WeakSet[DelegatingGroup] = weakref.WeakSet()
_born_lock = threading.Lock()


class Broken:
    """Stands where an inner group was: every use raises `reason`."""

    def __init__(self, reason: str, *, numbers: str = "", hint: str = "") -> None:
        self._error = (reason, numbers, hint)

    def __getattr__(self, name: str) -> NoReturn:
        reason, numbers, hint = self._error
        raise ClusterError(reason, numbers=numbers, hint=hint)


class DelegatingGroup(ProcessGroup):
    """A process group over a replaceable inner one.

    members: global ranks, in group order. sockets: inodes of the TCP connections the inner group opened.
    recipe: what forming.py needs to build another inner group like this one.
    """

    def __init__(self, inner: ProcessGroup, *, members: tuple[int, ...]) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg,arg-type]
        self.inner: Any = inner
        self.members = members
        self.sockets: frozenset[int] = frozenset()
        self.recipe: dict[str, Any] = {}
        self.keep: list[object] = []  # Python halves of C++ objects that the inner group holds (a store)
        self.count = 0
        self.sent: dict[int | str, int] = {}
        self.received: dict[int | str, int] = {}
        self.split_into: Callable[[DelegatingGroup, ProcessGroup, tuple[int, ...]], DelegatingGroup] | None = None
        # Types without backends: torch reads them from the C++ side, and a backend registered there could
        # never be replaced.
        kinds = {torch.device(device): inner._get_backend(device).name() for device in inner._device_types}
        for device, kind in kinds.items():
            self._register_backend(device, getattr(ProcessGroup.BackendType, kind.upper()), None)  # type: ignore[arg-type]
        if inner.bound_device_id is not None:
            self.bound_device_id = inner.bound_device_id
        self._set_default_backend(getattr(ProcessGroup.BackendType, inner._get_backend_name().upper()))
        self._name, self._desc = inner.group_name, inner.group_desc
        self.label = _label(inner.group_name, inner.group_desc, members)
        with _born_lock:
            _born.add(self)

    def getBackendName(self) -> str:
        # Only C++ asks here: DDP's logger, which on "gloo" casts the backend registered on the C++ side.
        return "delegating"

    # Name and description live in C++ with the registered backends, of which this object has none.
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

    def monitored_barrier(self, timeout: timedelta = _MONITORED_BARRIER_TIMEOUT, wait_all_ranks: bool = False) -> None:
        """As torch's; without a time-out of the user it reports after torch's 30 minutes, which is its purpose."""
        if timeout == FOREVER:
            timeout = _MONITORED_BARRIER_TIMEOUT
        _monitored_barrier(self, timeout, wait_all_ranks)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self._transfer("send", tensors, peer, self.sent)
        return self.inner.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self._transfer("recv", tensors, peer, self.received)
        return self.inner.recv(tensors, peer, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        self._transfer("recv", tensors, "any", self.received)
        return self.inner.recv_anysource(tensors, tag)

    def split_group(  # type: ignore[override]
        self, ranks: Sequence[int], *args: Any, **kwargs: Any
    ) -> ProcessGroup | None:
        inner = self.inner.split_group(ranks, *args, **kwargs)
        if inner is None or self.split_into is None:
            return inner  # type: ignore[no-any-return]
        return self.split_into(self, inner, tuple(self.members[rank] for rank in ranks))

    def _transfer(
        self, operation: str, tensors: list[torch.Tensor], peer: int | str, counts: dict[int | str, int]
    ) -> None:
        global _last
        counts[peer] = number = counts.get(peer, 0) + 1
        _last = (f"{operation} {'to' if operation == 'send' else 'from'} {peer}", self.label, number, time.monotonic())
        for tell in listeners:
            tell(operation, self.label, _num_bytes(tensors))


def _collective(name: str, spoken: str, payload: int | None) -> Callable[..., Any]:
    def issue(self: DelegatingGroup, *args: Any, **kwargs: Any) -> Any:
        global _last
        self.count = number = self.count + 1
        _last = (spoken, self.label, number, time.monotonic())
        if listeners:
            values = (*args, *kwargs.values())
            moved = 0 if payload is None or payload >= len(values) else _num_bytes(values[payload])
            for tell in listeners:
                tell(spoken, self.label, moved)
        return method(self.inner, name)(*args, **kwargs)

    issue.__name__ = name
    return issue


def _silent(name: str) -> Callable[..., Any]:
    def hand_on(self: DelegatingGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    hand_on.__name__ = name
    return hand_on


_monitored_barrier = _collective("monitored_barrier", "monitored_barrier", None)

# Set in a loop because torch's own list differs by version; only what this torch knows is overridden.
for _name, (_spoken, _payload) in _COLLECTIVES.items():
    if hasattr(ProcessGroup, _name):
        setattr(DelegatingGroup, _name, _collective(_name, _spoken, _payload))
for _name in _SILENT:
    if hasattr(ProcessGroup, _name):
        setattr(DelegatingGroup, _name, _silent(_name))


def live() -> list[DelegatingGroup]:
    """Every delegating group that this process still holds, destroyed ones too. Callable from any thread."""
    with _born_lock:
        return list(_born)


def registered() -> list[DelegatingGroup]:
    """The delegating groups torch knows (created and not destroyed), in an order that is the same on all ranks."""
    names = dist.distributed_c10d._world.pg_names
    groups = [group for group in list(names) if isinstance(group, DelegatingGroup)]
    return sorted(groups, key=lambda group: (group is not dist.group.WORLD, names.get(group, ""), group.members))


def reset_counts() -> None:
    """Start counting anew in every group: a new generation begins on all ranks alike."""
    global _last
    _last = None
    for group in registered():
        group.count = 0
        group.sent.clear()
        group.received.clear()


def fingerprint() -> dict[str, int]:
    """How many operations this rank has issued, per group; for send and recv, per pair of ranks of the group.

    Equal groups bear equal keys on all ranks: `divergence.differences` compares.
    """
    # torch names the next group by this number: where it differs, the ranks would wait for each other in vain.
    counts = {"groups made": dist.distributed_c10d._world.group_count}
    for group in registered():
        me = group.rank()
        counts[group.label] = group.count
        for peer, number in list(group.sent.items()):  # another thread may ask, while operations are issued
            counts[f"{group.label}: {me}->{peer} sent"] = number
        for peer, number in list(group.received.items()):
            counts[f"{group.label}: {peer}->{me} received"] = number
    return counts


def where() -> str:
    """The operation this process issued last, which it waits in if it waits; "" before the first. Any thread."""
    if _last is None:
        return ""
    operation, label, number, since = _last
    return f"{operation} #{number} of group {label}, issued {time.monotonic() - since:.1f} s ago"


def _label(name: str, desc: str, members: tuple[int, ...]) -> str:
    if desc == "default_pg":
        return desc
    shown = ",".join(str(rank) for rank in members[:8]) + (",…" if len(members) > 8 else "")
    return f"{name} [{shown}]" if desc in ("", "undefined") else f"{desc} {name} [{shown}]"


def _num_bytes(payload: torch.Tensor | Iterable[Any] | Any) -> int:
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    return sum(_num_bytes(item) for item in payload) if isinstance(payload, (list, tuple)) else 0
