"""Lets all ranks agree on the largest value of a number, on a flag, or on an error that every rank then raises.

`all_gather_objects` gathers small objects. Every rank gives one object and gets the objects of all ranks.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from time import perf_counter_ns as now
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nbkit.errors import NbkitError, TrainingError
from nbkit.rank.comm.gloo.interruptible_wait import wait

_HINT = "a path that every rank sees, with free space and write permission"


def largest(numbers: Sequence[int], *, device: torch.device | str) -> list[int]:
    """Return the largest value over all ranks, for each of `numbers`.

    Collective: one small all-reduce. Waits for the device.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def any_rank(flag: bool, *, device: torch.device | str) -> bool:
    """Return True if `flag` is true on any rank. Collective: see `largest`."""
    return bool(largest([int(flag)], device=device)[0])


def agree(act: Callable[[], str | None], *, what: str, hint: str = _HINT) -> None:
    """Run `act` on every rank, and compare the results. Collective.

    Every rank raises TrainingError if `act` failed on any rank, or if the ranks returned different texts. The error
    contains `what`, and the reason of the first rank that failed. A rank whose `act` raised an NbkitError raises that
    error instead.
    """
    failure, mark, own = "", None, None
    try:
        mark = act()
    except NbkitError as error:
        own, failure = error, error.what + f" {error.numbers}" * bool(error.numbers)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    reported = [(failure, mark)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        reported = [("", None)] * dist.get_world_size()
        dist.all_gather_object(reported, (failure, mark))
    if failed := [(rank, text) for rank, (text, _) in enumerate(reported) if text]:
        raise own or failed_on(what, failed, hint)
    if other := [rank for rank, (_, mark) in enumerate(reported) if mark != reported[0][1]]:
        raise failed_on(what, [(rank, "its result differs from that of rank 0") for rank in other], hint)


def failed_on(what: str, failures: Sequence[tuple[int, str]], hint: str = _HINT) -> TrainingError:
    """Return the error that every rank raises. It contains `what`, and the reason of the first rank that failed."""
    more = f"   (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
    return TrainingError(what, numbers=f"rank {failures[0][0]}: {failures[0][1]}{more}", hint=hint)


USUAL_BYTES, _COUNT = 1016, 8

T = TypeVar("T")


def all_gather_objects(own: T, *, world_size: int, device: torch.device, group: Any = None) -> list[T]:
    """Return the objects of all ranks, by rank. Collective: one all-gather, and a second one if an object is large.

    group: a group of all ranks, made by the backend itself, whose operations nbkit does not count or time. None uses
    the default group.
    """
    if world_size == 1:
        return [own]
    packed = zlib.compress(pickle.dumps(own), level=1)
    found = _gathered(packed, USUAL_BYTES, world_size, device, group)
    longest = max(int.from_bytes(each[:_COUNT], "little") for each in found)
    if longest > USUAL_BYTES:
        found = _gathered(packed, longest, world_size, device, group)
    # The bytes after the end of the compressed stream are padding.
    return [pickle.loads(zlib.decompressobj().decompress(each[_COUNT:])) for each in found]


def _gathered(packed: bytes, room: int, world_size: int, device: torch.device, group: Any) -> list[bytes]:
    """Return bytes for every rank: the length of what it packed, and the first `room` bytes of that."""
    framed = len(packed).to_bytes(_COUNT, "little") + packed[:room].ljust(room, b"\0")
    sent = torch.frombuffer(bytearray(framed), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(world_size)]
    if group is None:
        dist.all_gather(received, sent)
    else:
        wait(group.allgather([received], [sent]), now())
    return [bytes(each.cpu().numpy()) for each in received]
