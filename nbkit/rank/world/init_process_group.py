"""Makes init_process_group and destroy_process_group harmless on a rank that is in a world.

A second init is harmless; after a destroy it joins the current generation again. So code written for torchrun,
which does both by itself, runs in a cell as it is.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import Store  # type: ignore[attr-defined]

DESTROYED = "the default process group was destroyed by user code"

init_process_group: Callable[..., None] = c10d.init_process_group
"""torch's own."""
_destroy_process_group: Callable[..., None] = c10d.destroy_process_group


class _World(Protocol):
    """What this file needs to know of a world."""

    dirty: str
    place: Any

    def rejoin(self, backend: str | None = None, **options: Any) -> None: ...


_world: _World | None = None


def guard(world: _World | None) -> None:
    """From now on user code's init and destroy act on `world`; with None they are torch's own again."""
    global _world
    _world = world
    module: Any
    for module in (c10d, dist):
        module.init_process_group = _init if world else init_process_group
        module.destroy_process_group = _destroy if world else _destroy_process_group


@functools.wraps(init_process_group)
def _init(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
    **others: Any,
) -> None:
    if dist.is_initialized():
        present = dist.get_backend()
        if backend is not None and str(backend).lower() not in ("undefined", present, *_parts(backend, present)):
            warnings.warn(
                f"init_process_group({backend!r}): the process group is up already and goes on with {present}.",
                stacklevel=2,
            )
        return
    ours = (
        _world is not None
        and store is None
        and not others
        and world_size in (-1, _world.place.world_size)
        and rank in (-1, _world.place.rank)
        and (backend is None or set(_names(backend)) <= {"gloo", "nccl"})
    )
    if _world is None or not ours:
        init_process_group(
            backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id, **others
        )
        return
    _world.rejoin(backend, timeout=timeout, pg_options=pg_options, device_id=device_id)


@functools.wraps(_destroy_process_group)
def _destroy(group: dist.ProcessGroup | None = None) -> None:
    is_default = group is None or group is dist.group.WORLD
    _destroy_process_group(group)
    if is_default and _world is not None and not _world.dirty:
        _world.dirty = DESTROYED


def _names(backend: str) -> list[str]:
    """ "cpu:gloo,cuda:nccl" -> ["gloo", "nccl"]"""
    return [part.split(":")[-1] for part in str(backend).lower().split(",")]


def _parts(backend: str, present: str) -> list[str]:
    return [str(backend).lower()] if present in _names(backend) else []
