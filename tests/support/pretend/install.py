"""Replace the real GPU by the pretended one in this process: in nbkit, and in the groups that torch makes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from ranks import listeners
from torch._C._distributed_c10d import PrefixStore
from torch.utils._python_dispatch import _disable_current_modes

from nbkit.rank import device as seam
from nbkit.rank.comm import group_creation
from nbkit.rank.world import world as worlds
from pretend import sync_batch_norm
from pretend.communicator import PretendGroup
from pretend.device import PretendAccelerator

BACKENDS = "cpu:gloo,cuda:nccl"


def pretend_gpu(rank: int = 0) -> PretendAccelerator:
    """Pretend a place with "cuda" and "nccl" for the rest of this process's life. Call it before `World.join`."""
    gpu = PretendAccelerator(rank)
    seam._accelerator = gpu
    group_creation.install()
    made = group_creation._original
    delegate, reform = group_creation._delegate, group_creation.reform_group
    stores: dict[Any, Any] = {}
    assert made is not None

    def make(size: int, rank: int, members: list[int], backend: Any, store: Any, name: Any, **options: Any) -> Any:
        if "nccl" not in str(backend):
            return made(size, rank, members, backend, store, name, **options)
        options["backend_options"] = None
        raw, prefixed = made(size, rank, members, c10d.Backend("gloo"), store, name, **options)
        if isinstance(raw, dist.ProcessGroup):
            stores[raw] = PrefixStore(f"{name}/", store)
            c10d._world.pg_map[raw] = (BACKENDS, c10d._world.pg_map[raw][1])
        return raw, prefixed

    def wrapped(raw: Any, members: tuple[int, ...]) -> Any:
        return PretendGroup(gpu, raw, members, stores.pop(raw), BACKENDS) if raw in stores else raw

    def delegated(raw: Any, members: tuple[int, ...], recipe: dict[str, Any]) -> Any:
        group = delegate(wrapped(raw, members), members, recipe)
        return group

    def reformed(group: Any, store: Any, **how: Any) -> None:
        reform(group, store, **how)
        group.inner = wrapped(group.inner, group.members)

    group_creation._original = make
    group_creation._delegate = delegated
    group_creation.reform_group = worlds.reform_group = reformed
    torch.cuda.nccl.version = lambda: (2, 27, 3)  # torch's error messages name it
    _fill_what_is_freed(gpu)
    _count_assigned_numbers(gpu)
    sync_batch_norm.install()
    return gpu


def place(rank: int, ranks: int) -> worlds.RankPlace:
    """Return the place of a rank with a pretended GPU. From here on the process has that GPU."""
    pretend_gpu(rank)
    return worlds.RankPlace(rank, ranks, rank, ranks, "cuda", "nccl")


def join(rank: int, ranks: int) -> tuple[Any, PretendAccelerator]:
    """Return (world, its GPU) in a rank that `run_ranks(..., join=False)` has made."""
    address, port = listeners[0].getsockname()
    world = worlds.World.join(place(rank, ranks), listen=listeners[0], address=address, port=port)
    gpu = seam.accelerator()
    assert isinstance(gpu, PretendAccelerator)
    return world, gpu


def _fill_what_is_freed(gpu: PretendAccelerator) -> None:
    """Fill memory when it is freed: it may be reused at once, so no operation may still use it."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        if size == 0 and storage.nbytes():
            gpu.order.touch(gpu.stream, storage, "freeing it", write=True)
            storage.fill_(0xFF)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]


def _count_assigned_numbers(gpu: PretendAccelerator) -> None:
    """Count assignments of a number to one element: torch copies the number from memory that is not pinned.

    A number for a slice is an argument of the kernel. A torch function mode would miss calls of autograd.
    """
    assign = torch.Tensor.__setitem__

    def assigned(tensor: torch.Tensor, index: Any, value: Any) -> None:
        if isinstance(value, int | float) and gpu.holds(tensor):
            with _disable_current_modes():
                gpu.counts["unpinned copy"] += tensor.detach()[index].ndim == 0
        assign(tensor, index, value)

    torch.Tensor.__setitem__ = assigned  # type: ignore[assignment,method-assign]
