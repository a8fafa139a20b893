"""Measures once how far this rank's clock is from rank 0's.

Ranks on one kernel share its monotonic clock, so their offset is exactly zero. One rank of every other host exchanges
messages with rank 0. The offset comes from the quickest round, and its error is at most half of the time of that round
(Cristian 1989).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from time import perf_counter_ns

import torch
import torch.distributed as dist

from nbkit.rank.world import world
from nbkit.wire.processes import boot_id

_ROUNDS = 16


def kernel_of() -> str:
    """Return a name that is equal on processes with the same perf_counter: one boot of a kernel, one time namespace."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return socket.gethostname()


def clock_offset(*, kernel: str | None = None, now: Callable[[], int] = perf_counter_ns) -> int:
    """Return the nanoseconds to add to this rank's perf_counter to get rank 0's. Collective over the world.

    kernel, now: tests replace this rank's kernel name and clock.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    rank, size = dist.get_rank(), dist.get_world_size()
    here = world.current()
    device = None if here is None else here.place.message_device
    kernels: list[str] = [""] * size
    dist.all_gather_object(kernels, kernel or kernel_of())
    offsets = torch.zeros(size, dtype=torch.int64, device=device)
    ping = torch.zeros(1, dtype=torch.int64, device=device)
    firsts = [kernels.index(name) for name in dict.fromkeys(kernels)]
    for other in firsts[1:]:
        if rank == 0:
            for _ in range(_ROUNDS):
                dist.recv(ping, other)
                # Reading the message makes the host wait for it, so the time sent back lies between both messages.
                int(ping)
                dist.send(torch.tensor([now()], device=device), other)
        elif rank == other:
            offsets[rank] = _ping(now, device)
    dist.all_reduce(offsets)
    return int(offsets[kernels.index(kernels[rank])])


def _ping(now: Callable[[], int], device: torch.device | None) -> int:
    answer, rounds = torch.zeros(1, dtype=torch.int64, device=device), []
    for _ in range(_ROUNDS):
        left = now()
        dist.send(torch.zeros(1, dtype=torch.int64, device=device), 0)
        dist.recv(answer, 0)
        theirs = int(answer)
        back = now()
        rounds.append((back - left, theirs - (left + back) // 2))
    return min(rounds)[1]
