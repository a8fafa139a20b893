"""Agreement of all ranks: on the largest of a number, on a flag, and on a failure, which all of them then raise.

The one gather of small objects: every rank gives one and gets those of all, in few bytes.
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

_HINT = "a path that every rank sees, with room and rights to write"


def largest(numbers: Sequence[int], *, device: torch.device | str) -> list[int]:
    """Of each of these numbers the largest of all ranks. Collective: one small all-reduce; waits for the device."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def any_rank(flag: bool, *, device: torch.device | str) -> bool:
    """Return True if it is so on any rank. Collective: see `largest`."""
    return bool(largest([int(flag)], device=device)[0])


def agree(act: Callable[[], str | None], *, what: str, hint: str = _HINT) -> None:
    """Run `act` on every rank. Raises TrainingError on all of them when it failed on any, or returned other texts.

    It says `what`, and why of the first rank that failed; on a rank whose own was an error of ours, that one is raised.
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
        raise failed_on(what, [(rank, "it sees another one than rank 0") for rank in other], hint)


def failed_on(what: str, failures: Sequence[tuple[int, str]], hint: str = _HINT) -> TrainingError:
    """The error that every rank raises: `what`, and why of the first of the ranks that failed."""
    more = f"   (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
    return TrainingError(what, numbers=f"rank {failures[0][0]}: {failures[0][1]}{more}", hint=hint)


USUAL_BYTES, _COUNT = 1016, 8

T = TypeVar("T")


def all_gather_objects(own: T, *, world_size: int, device: torch.device, group: Any = None) -> list[T]:
    """Return the objects of all ranks, by rank. Collective: one all-gather, and another where one is larger than usual.

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
