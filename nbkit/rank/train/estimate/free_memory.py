"""Find how much memory a rank can still allocate. A switch uses this to decide if two models fit beside each other.

On a GPU: the driver's free memory plus the reserve of torch's allocator. On CPU ranks: the memory that the kernel or
the tightest cgroup has available, divided by the ranks of the node. NBKIT_MEMORY_LIMIT=BYTES limits each rank to
fewer bytes, on a shared machine, in tests and in benchmarks. NBKIT_TENSOR_LIMIT: see tensor_limit.py.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

import torch

from nbkit.errors import UsageError
from nbkit.planner.peak import fits
from nbkit.rank.device import accelerator
from nbkit.rank.host_memory import free_on_host
from nbkit.rank.parallel.reshard.redistribute import ROUND_BYTES
from nbkit.rank.telemetry.health import bytes_held
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.out_of_memory import tensor_limit
from nbkit.rank.world import world
from nbkit.strategy import Strategy

MOST_ROUND_BYTES = 32 * ROUND_BYTES
"""Limit of `round_bytes`, 768 MB.

At 300 GB/s, 24 MB take 0.08 ms, which is less than the host needs to start a round. 768 MB take 2.6 ms.
"""

# Only glibc has malloc_trim. Other C libraries return free memory by themselves.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def crowded(num_bytes: int, *, free: int | None) -> bool:
    """Return True if this rank lacks room for a sharded model of `num_bytes` beside the one in force.

    free: see `left`.
    """
    return not fits(num_bytes, buffers=2 * min(ROUND_BYTES, num_bytes), left=free)


def round_bytes(num_bytes: int, device: torch.device, *, free: int | None) -> int:
    """Return the bytes that this rank may send, and receive, in a round of a switch to a model of `num_bytes`.

    free: see `left`. On a GPU, the two buffers of a round take at most a quarter of the memory that is left beside the
    new model, because the allocator may have it in pieces, and communicators need memory too. The result is at least
    ROUND_BYTES, for which `crowded` keeps room, and at most MOST_ROUND_BYTES. It is ROUND_BYTES times a power of two,
    so that it seldom changes between the preparation of a switch and the switch.
    """
    # On CPU ranks, rounds of 96 MB took 0.9 to 1.1 times the CPU time, and a single round 1.3 to 1.7 times (measured).
    if free is None or not accelerator().holds(device):
        return ROUND_BYTES
    spare = free - num_bytes
    times = min(max(spare // 4 // (2 * ROUND_BYTES), 1), MOST_ROUND_BYTES // ROUND_BYTES)
    return ROUND_BYTES << times.bit_length() - 1


def roomy(device: torch.device, peak_bytes: int) -> bool:
    """Return True if at least `peak_bytes` are free, so that this rank can make a step and keep what it holds now."""
    free = left(device)
    return free is None or free >= peak_bytes


def side_bytes(builder: Builder, kinds: Mapping[str, Mapping[str, int]], strategy: Strategy, rank: int) -> int:
    """Return the bytes that `rank` holds on its device between steps under `strategy`, including gradient buffers.

    kinds: see job_state.bytes_per_element. Raises StrategyError if the model cannot be split.
    """
    skeleton, rank_layouts = builder.skeleton, builder.plan(strategy).layouts
    weights, held, summed = rank_layouts.weights[rank], rank_layouts.held[rank], rank_layouts.summed[rank]
    total = sum(layout.numel * kinds[name]["weight"] for name, layout in held.items() if summed[name] != layout)
    total += sum(layout.numel * kinds[name]["weight"] for name, layout in weights.items())
    if strategy.dp > 1:
        grads = summed if strategy.zero > 1 else weights
        trained = {name for name, p in skeleton.named_parameters() if p.requires_grad}
        total += sum(layout.numel * kinds[name]["weight"] for name, layout in grads.items() if name in trained)
    if not builder.offload:
        total += sum(layout.numel * _of_state(kinds[name]) for name, layout in held.items())
    return total


def _of_state(kinds: Mapping[str, int]) -> int:
    return sum(size for kind, size in kinds.items() if kind != "weight")


def trim(device: torch.device) -> None:
    """Release unused memory that torch's allocator (on a device) or the C library (on the CPU) has reserved."""
    if accelerator().holds(device):
        accelerator().trim()
    elif _malloc_trim is not None:
        _malloc_trim(0)


def left(device: torch.device, *, ranks: int | None = None) -> int | None:
    """Return the bytes that this rank can still allocate; None if unknown.

    ranks: the number of ranks that share this host's memory; default: all ranks of this host. Raises UsageError if
    NBKIT_MEMORY_LIMIT is not a number of bytes.
    """
    found = [_own_limit(device)]
    if accelerator().holds(device):
        found.append(accelerator().free_memory(device))
    else:
        here, free = world.current(), free_on_host()
        if free is not None:
            found.append(free // (ranks or (here.place.local_world_size if here is not None else 1)))
        if (limit := tensor_limit.in_force()) is not None:
            found.append(limit.left)
    return min((max(free, 0) for free in found if free is not None), default=None)


def _own_limit(device: torch.device) -> int | None:
    text = os.environ.get("NBKIT_MEMORY_LIMIT")
    if not text:
        return None
    if not text.isdigit():
        raise UsageError(
            "NBKIT_MEMORY_LIMIT is not a number of bytes.", numbers=repr(text), hint="NBKIT_MEMORY_LIMIT=8000000000"
        )
    return int(text) - bytes_held(device)[0]
