"""Test that a rank that dies while it sends a message releases the ranks that wait for the rest, and they go on.

`make long` has the other operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import listeners, run_ranks
from torch import Tensor, nn

from nbkit.rank.comm.delegating_group import live
from nbkit.rank.comm.gloo import interruptible_wait
from nbkit.rank.telemetry import collectives
from nbkit.rank.world import failure_alarm, sockets
from nbkit.rank.world.world import RankPlace, World

N, DYING = 4, 1
BYTES = 100_000_000
TOLD = "told of the death"
NEVER = 30.0  # seconds; a released rank returns long before


def text() -> Tensor:
    return torch.ones(BYTES, dtype=torch.uint8)


def broadcast(rank: int) -> None:
    dist.broadcast(text(), DYING)


def broadcast_waited_for_later(rank: int) -> None:
    work = dist.broadcast(text(), DYING, async_op=True)
    assert work is not None
    for thread in threading.enumerate():
        if thread.name == TOLD:
            thread.join()
    work.wait()


def broadcast_with_a_timeout(rank: int) -> None:
    work = dist.broadcast(text(), DYING, async_op=True)
    assert work is not None
    work.wait(timedelta(hours=1))


def reduce_scatter(rank: int) -> None:
    part = torch.ones(BYTES // 4 // N)
    dist.reduce_scatter_single(part, torch.ones(BYTES // 4 // N * N))


def functional(rank: int) -> None:
    (funcol.broadcast(text(), DYING, dist.group.WORLD) + 0).sum()


def message(rank: int) -> None:
    if rank == DYING:
        works = [dist.isend(text(), other) for other in range(N) if other != rank]
        for work in works:
            assert work is not None
            work.wait()
    else:
        dist.recv(text(), DYING)


def message_from_anybody(rank: int) -> None:
    if rank == DYING:
        for other in (0, 2, 3):
            dist.send(text(), other)
    else:
        dist.recv(text())


def backward_of_ddp(rank: int) -> None:
    """Run the backward pass of DDP, where C++ waits in the future of a collective."""

    def told_by_the_dying(gradients: Tensor) -> torch.futures.Future[Tensor]:
        work = dist.broadcast(gradients, DYING, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    model = nn.parallel.DistributedDataParallel(nn.Linear(BYTES // 4000, 1000, bias=False), bucket_cap_mb=1000)
    model.register_comm_hook(None, lambda _, bucket: told_by_the_dying(bucket.buffer()))
    output = model(torch.ones(1, BYTES // 4000)).sum()
    _begin()
    output.backward()


BEGIN_LATE = (backward_of_ddp,)


def _begin() -> None:
    """Arrange that the dying rank ends as soon as it has sent a third of the bytes."""
    dist.barrier()
    if dist.get_rank() == DYING:
        _in_the_middle(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def _in_the_middle(act: Callable[[frozenset[int]], object]) -> None:
    """Watch this rank's connections in a thread, and act when a third of the bytes has passed them."""
    own = frozenset[int]().union(*(group.sockets for group in live()))
    third = sockets.moved_bytes(own) + BYTES // 3

    def watch() -> None:
        while sockets.moved_bytes(own) < third:
            time.sleep(0.001)
        act(own)

    threading.Thread(target=watch, daemon=True).start()


def _told_when_it_is_dead(pid: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # its parent has reaped it
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
    failure_alarm.break_out(f"rank {DYING} died")


def released(world: World, wait: Callable[[int], None], mode: str) -> float:
    """Return the sum of ones over the surviving ranks, in a new world, after the wait has raised."""
    rank, pids = world.place.rank, torch.zeros(N, dtype=torch.int64)
    collectives.set_mode(mode)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    if wait not in BEGIN_LATE:
        _begin()
    told = threading.Thread(target=_told_when_it_is_dead, args=(int(pids[DYING]),), name=TOLD)
    if rank != DYING:
        told.start()
    began = time.monotonic()
    with contextlib.suppress(RuntimeError):  # on a busy machine some ranks may have received all of it
        wait(rank)
    assert time.monotonic() - began < NEVER
    told.join()
    place, (address, port) = rank - (rank > DYING), listeners[1].getsockname()
    listen = listeners[1] if place == 0 else None
    world.resize(
        RankPlace(place, N - 1, place, N - 1, "cpu", "gloo"), 2, listen=listen, address=address, port=port, timeout_s=20
    )
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()


ALL = [
    *((wait, "time") for wait in (broadcast, message, backward_of_ddp)),
    *(
        pytest.param(wait, mode, marks=pytest.mark.long)
        for wait, mode in (
            (broadcast, "off"), (message, "off"), (backward_of_ddp, "off"), (broadcast_waited_for_later, "time"),
            (broadcast_with_a_timeout, "time"), (reduce_scatter, "time"), (functional, "time"), (functional, "count"),
            (message_from_anybody, "time"),
        )
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("wait", "mode"), ALL)
def test_a_rank_that_waits_for_the_rest_of_a_message_is_released(wait: Callable[[int], None], mode: str) -> None:
    answers = run_ranks(released, N, wait, mode, dying=frozenset({DYING}), generations=2)
    assert answers == [None if rank == DYING else N - 1.0 for rank in range(N)]


def destroyed_after_it(world: World) -> bool:
    """Destroy the group of an unfinished collective, as user code may, and leave the world: neither waits for it."""
    dist.barrier()
    if world.place.rank:
        _in_the_middle(sockets.shut)
    threading.Timer(1.5, failure_alarm.break_out, ["planted"]).start()
    with contextlib.suppress(RuntimeError):
        dist.broadcast(text(), 1)
    dist.destroy_process_group()
    world.leave()
    return True


def test_a_group_with_an_unfinished_collective_can_be_destroyed() -> None:
    assert run_ranks(destroyed_after_it, 2) == [True, True]


def aborted(world: World) -> list[object]:
    """Abort a receive without a sender. The handle of a collective is not touched."""
    group, abort = dist.group.WORLD, interruptible_wait.known()
    assert group is not None and abort is not None
    receive = group.inner.recv([torch.ones(1)], 1 - world.place.rank, 0)
    threading.Timer(0.2, abort, [receive]).start()
    answers = [receive.wait()]
    one = torch.ones(1)
    collective = group.inner.allreduce([one])
    answers += [abort(collective), collective.wait(), one.item()]
    return answers


def test_a_receive_is_aborted_and_nothing_else_is_touched() -> None:
    assert run_ranks(aborted, 2) == [[False, False, True, 2.0]] * 2


def test_reading_the_abi_of_torch_keeps_references_to_interpreter_data() -> None:
    """Check the count of references: if it fell, the data would be freed, and torch would read another object."""
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = api.PyInterpreterState_GetDict.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
    references = ctypes.c_ssize_t.from_address(api.PyInterpreterState_GetDict(api.PyInterpreterState_Get()))
    before = references.value

    interruptible_wait._abi_of_pybind11()

    assert references.value == before
