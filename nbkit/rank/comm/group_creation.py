"""Creates process groups. torch makes a group, and a delegating group replaces it in all of torch's tables.

Call `install()` once per process, before user code. After that, init_process_group, new_group (also with an explicit
backend), DeviceMesh and split_group return delegating groups for gloo and nccl. Other backends are not changed.
torch's tables keep the official names, so `get_backend()` and torch's own checks give the same answers as before.

`dist.batch_isend_irecv` is replaced too, so that it makes one batch over delegating groups if the backend supports
batches. torch does this only for its own group type. For other types it issues one send after the other, and on nccl
two ranks that both send first would then wait for each other.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from nbkit.device_kinds import GLOO
from nbkit.rank.background_threads import started
from nbkit.rank.comm.background_creation import BreakableStore, GroupRendezvous, forming
from nbkit.rank.comm.delegating_group import FOREVER, Broken, DelegatingGroup, live
from nbkit.rank.comm.gloo.interruptible_wait import end_futures, interrupt
from nbkit.rank.device import backends, is_device_backend
from nbkit.rank.torch_private import CAN_BATCH_P2P, CAN_DELEGATE_GROUPS, group_tables
from nbkit.rank.world import sockets


def install_batched() -> None:
    """Replace torch's batch_isend_irecv by ours, if this torch supports it. `install` calls this once."""
    if not CAN_BATCH_P2P:
        return
    plain = c10d.batch_isend_irecv

    @functools.wraps(plain)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
        c10d._check_p2p_op_list(p2p_op_list)
        group, device = p2p_op_list[0].group, p2p_op_list[0].tensor.device
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, DelegatingGroup) or not group._get_backend(device).supports_coalescing:
            return plain(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as batch:
            for op in p2p_op_list:
                peer = "group_dst" if op.op is dist.isend else "group_src"
                op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer})
        works: list[Any] = batch.works
        return works

    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


_ABORT_SECONDS = _RELEASE_SECONDS = 2.0
_original: Callable[..., Any] | None = None

breaking_off: list[Callable[[], None]] = []
"""Called, from any thread, before running operations are broken off, so that code that waits for a device can stop.

An abort may end only the last part of what NCCL sends, because each part uses another channel."""


def install(*, unlimited: bool = True) -> None:
    """Make all later groups of this process delegating groups, if nbkit knows the backend.

    If this torch version does not support that, groups stay torch's own. unlimited: a group has no time-out unless the
    user sets one, and nbkit can end waits for its futures. False keeps torch's default time-out and torch's futures. A
    second call changes only the futures.
    """
    global _original
    end_futures(unlimited)
    if _original is not None or not CAN_DELEGATE_GROUPS:
        return
    _original = c10d._new_process_group_helper
    c10d._new_process_group_helper = functools.wraps(_original)(_form)
    name_of = c10d._process_group_name

    @functools.wraps(name_of)
    def name_in_order(*args: Any, **kwargs: Any) -> Any:
        forming.join()  # torch names groups by a counter, which the background thread changes
        return name_of(*args, **kwargs)

    c10d._process_group_name = name_in_order
    default_timeout = c10d._get_default_timeout

    @functools.wraps(default_timeout)
    def timeout_of(backend: Any) -> timedelta:
        return FOREVER if unlimited and _delegated(backend) else default_timeout(backend)

    c10d._get_default_timeout = timeout_of
    get_backend = c10d.get_backend

    @functools.wraps(get_backend)
    def backend_of(group: dist.ProcessGroup | None = None) -> Any:
        name = get_backend(group)
        # A group with gloo and nccl is reported as nccl, because user code compares the name with "nccl".
        kinds = _kinds(name) - {GLOO} if ":" in name and GLOO in _kinds(name) else set()
        device = next(iter(kinds), "")
        return c10d.Backend(device) if len(kinds) == 1 and is_device_backend(device) else name

    c10d.get_backend = dist.get_backend = backend_of
    install_batched()


def release(groups: Iterable[DelegatingGroup], instead: Callable[[DelegatingGroup], Broken]) -> None:
    """Remove the inner groups of `groups` permanently: shut their connections and drop the last references."""
    groups = list(groups)
    for tell in breaking_off:
        tell()
    for group in groups:
        sockets.shut(group.sockets)
    interrupt("its group has ended")
    abort(groups)
    dropping = [group.drop(instead(group)) for group in groups]
    until = time.monotonic() + _RELEASE_SECONDS
    for over in dropping:
        over.wait(max(until - time.monotonic(), 0.0))


def abort(groups: Iterable[DelegatingGroup], *, seconds: float = _ABORT_SECONDS) -> None:
    """Abort the device communicators of `groups`, all at the same time, and wait at most `seconds`.

    Each abort waits for the device, which the other communicators keep busy. So aborts one after the other would wait
    for each other.
    """
    backends = [backend for group in groups if (backend := device_backend(group)) is not None]
    until = time.monotonic() + seconds
    threads = [started(backend.abort, "nbkit-abort") for backend in backends]
    for thread in filter(None, threads):
        thread.join(max(until - time.monotonic(), 0.0))


def reform_group(group: DelegatingGroup, store: Store, *, meets_as: str = "") -> None:
    """Give `group` a new inner group, whose members find each other in `store`. Every member must call this.

    If there are several groups, members call this in the same order. meets_as: a name that is equal on all members, for
    a group whose own name may differ between them.
    """
    name = group_tables.pg_names[group]
    members = [] if group is group_tables.default_pg else list(group.members)
    recipe = {**group.recipe, "pg_tag": None}  # a tag would make torch find the old group again
    if recipe.get("backend_options") is not None:
        recipe["backend_options"].split_from = None
    # A split from the default group would be collective over all ranks, but here only members take part.
    split_source, c10d._get_split_source = c10d._get_split_source, lambda *_, **__: None
    # torch refuses a name that is in use. So the outer group gets another name while the inner group is formed.
    group_tables.pg_names[group] = f"{name} (before)"  # type: ignore[assignment]
    c10d._unregister_process_group(name)  # type: ignore[attr-defined]
    try:
        raw, prefixed, held = _make(group.size(), group.rank(), members, store, meets_as or name, recipe)
        _forget(raw)
    finally:
        c10d._get_split_source = split_source
        group_tables.pg_names[group] = name
        c10d._register_process_group(name, group)  # type: ignore[attr-defined]
    group_tables.pg_map[group] = (group_tables.pg_map[group][0], prefixed)
    group.inner, group.sockets, group.meeting = raw, held.sockets, held.meeting
    group.formed, group.destroyed = group.formed + 1, False
    group.keep[:] = [held.store]


@contextmanager
def split_from_world(group: dist.ProcessGroup) -> Iterator[None]:
    """Make the first use of `group` split its communicator from that of all ranks, inside this context.

    Does nothing if the backend cannot split. Collective over the world: every rank enters with a group, and different
    groups share no rank. No operation of all ranks may be under way. torch would split by itself if the default group
    were bound to a device. But then single messages of the user's code would wait for each other in one communicator.
    """
    world: Any = dist.group.WORLD
    own = device_backend(group) if isinstance(group, DelegatingGroup) else None
    source = device_backend(world) if isinstance(world, DelegatingGroup) else None
    if own is None or not getattr(source, "supports_splitting", False) or not hasattr(own, "options"):
        yield
        return
    if world.meeting is not None:  # a split blocks until all ranks have come, and cannot be broken off
        before = sum(place.startswith("split") for place in world.meeting.been)  # ranks differ in other places
        world.meeting.at(f"split {before}", world.size())
    own.options.split_from, own.options.split_color = source, min(group.members)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        own.options.split_from = None  # this reference would keep the world's communicator alive


class _Held:
    """The store, meeting and sockets of an inner group."""

    def __init__(self, store: Store, meeting: GroupRendezvous | None) -> None:
        self.store, self.meeting = store, meeting
        self.sockets: frozenset[int] = frozenset()


def _form(
    group_size: int,
    group_rank: int,
    global_ranks_in_group: list[int],
    backend: Any,
    store: Store,
    group_name: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace torch's _new_process_group_helper, with the same arguments and result."""
    assert _original is not None
    if args or not _delegated(backend):
        return _original(group_size, group_rank, global_ranks_in_group, backend, store, group_name, *args, **kwargs)
    recipe = {"backend": backend, **kwargs}
    raw, prefixed, held = _make(group_size, group_rank, global_ranks_in_group, store, group_name, recipe)
    if not isinstance(raw, dist.ProcessGroup) or isinstance(raw, DelegatingGroup):
        return raw, prefixed  # this rank is not a member, or torch found an existing group by its tag
    group = _delegate(raw, tuple(global_ranks_in_group) or tuple(range(group_size)), recipe)
    group.sockets, group.meeting = held.sockets, held.meeting
    group.keep.append(held.store)
    _replace(raw, group, prefixed)
    return group, prefixed


def _delegate(raw: dist.ProcessGroup, members: tuple[int, ...], recipe: dict[str, Any]) -> DelegatingGroup:
    group = DelegatingGroup(raw, members=members)
    group.recipe = recipe
    group.split_into = _adopt_split
    return group


def _make(
    size: int, rank: int | None, members: Sequence[int], store: Store, name: Any, recipe: dict[str, Any]
) -> tuple[Any, Any, _Held]:
    assert _original is not None
    # nccl's threads read their store at any time, even at exit. So only gloo may get a store written in Python.
    only_gloo = _kinds(recipe["backend"]) == {"gloo"}
    meeting = None if only_gloo else GroupRendezvous(PrefixStore(f"{name}/meeting", store))
    held = _Held(BreakableStore(store) if only_gloo else store, meeting)
    if meeting is not None and rank is not None:
        meeting.at("forming", size)
    with forming.lock:
        forming.before = before = sockets.inodes()
    try:
        options = dict(recipe)
        raw, prefixed = _original(size, rank, list(members), options.pop("backend"), held.store, name, **options)
    finally:
        with forming.lock:
            forming.before = None
    if isinstance(raw, dist.ProcessGroup):
        held.sockets = sockets.inodes() - before
        if not isinstance(raw, DelegatingGroup):
            prefixed = PrefixStore(f"{name}/", store)
    return raw, prefixed, held


def _replace(raw: dist.ProcessGroup, group: DelegatingGroup, store: Store) -> None:
    """Replace `raw` by `group` in all of torch's tables."""
    world = group_tables
    name = world.pg_names[raw]
    world.pg_map[group] = (world.pg_map[raw][0], store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = world.pg_backend_config[raw]
    world.pg_to_tag[group] = world.pg_to_tag[raw]
    for tag in _forget(raw):
        world.tags_to_pg.setdefault(tag, []).append(group)
    c10d._register_process_group(name, group)  # type: ignore[attr-defined]


def _forget(raw: dist.ProcessGroup) -> list[str]:
    """Remove `raw` from torch's tables, and return its tags."""
    tagged = group_tables.tags_to_pg
    tags = [tag for tag, groups in tagged.items() if raw in groups]
    c10d._cleanup_process_group_global_state(raw)
    for tag in tags:
        if raw in tagged.get(tag, []):
            tagged[tag].remove(raw)
    return tags


def _adopt_split(parent: DelegatingGroup, inner: dist.ProcessGroup, members: tuple[int, ...]) -> DelegatingGroup:
    recipe = {**parent.recipe, "group_desc": inner.group_desc, "pg_tag": None, "backend_options": None}
    return _delegate(inner, members, recipe)


def _kinds(backend: Any) -> set[str]:
    return set(c10d.BackendConfig(c10d.Backend(str(backend))).get_device_backend_map().values())


def _delegated(backend: Any) -> bool:
    return bool(kinds := _kinds(backend)) and kinds <= backends()


def device_backend(group: DelegatingGroup) -> Any:
    """Return the group's backend that sends from device to device; None if there is none."""
    if isinstance(group.inner, Broken) or group.destroyed:
        return None  # aborting a destroyed group would use freed memory
    backends = [group.inner._get_backend(torch.device(kind)) for kind in group.inner._device_types]
    return next((backend for backend in backends if is_device_backend(backend.name())), None)


def shut_all() -> int:
    """Shut the gloo connections of every group of this process, and return how many were shut.

    A group that is being formed is included. Messages under way between living ranks arrive first.
    """
    known = sockets.of_plain_groups.union(*(group.sockets for group in live()))
    sockets.settle(known)
    return sockets.shut(known | forming.young())
