"""The one gather of small objects: every rank gives one and gets those of all, in few bytes."""

from __future__ import annotations

import pickle
import zlib
from time import perf_counter_ns as now
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nbkit.rank.comm.gloo.interruptible_wait import wait

USUAL_BYTES, _COUNT = 1016, 8

T = TypeVar("T")


def all_gather_objects(own: T, *, world_size: int, device: torch.device, group: Any = None) -> list[T]:
    """The objects of all ranks, by rank. Collective: one all-gather, and another where one is larger than usual.

    group: a backend's own group of all ranks, past what counts and times the default group's operations.
    """
    if world_size == 1:
        return [own]
    packed = zlib.compress(pickle.dumps(own), level=1)
    found = _gathered(packed, USUAL_BYTES, world_size, device, group)
    longest = max(int.from_bytes(each[:_COUNT], "little") for each in found)
    if longest > USUAL_BYTES:
        found = _gathered(packed, longest, world_size, device, group)
    # What follows the end of a stream is padding.
    return [pickle.loads(zlib.decompressobj().decompress(each[_COUNT:])) for each in found]


def _gathered(packed: bytes, room: int, world_size: int, device: torch.device, group: Any) -> list[bytes]:
    """Of every rank the length of its bytes, and as many of them as there is room for."""
    framed = len(packed).to_bytes(_COUNT, "little") + packed[:room].ljust(room, b"\0")
    sent = torch.frombuffer(bytearray(framed), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(world_size)]
    if group is None:
        dist.all_gather(received, sent)
    else:
        wait(group.allgather([received], [sent]), now())
    return [bytes(each.cpu().numpy()) for each in received]
