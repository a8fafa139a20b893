"""Test breaking a rank out of a wait, and reporting where it is."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import next_generation, run_ranks
from torch import nn
from torch.utils.data import DataLoader

from nbkit.rank.world import failure_alarm
from nbkit.rank.world.world import World
from nbkit.wire import process_state

GENEROUS = 20.0  # seconds; a released rank returns long before


def wait_in_all_reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(1000))


def wait_in_ddp_backward(rank: int) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(10, 10))
    if rank:
        model(torch.ones(4, 10)).sum().backward()


def wait_in_recv(rank: int) -> None:
    dist.recv(torch.ones(1), 0)


def wait_in_a_later_group(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank:
        dist.barrier(group)


def wait_in_an_async_collective(rank: int) -> None:
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()


def wait_in_forming_a_group(rank: int) -> None:
    dist.new_group([0, 1])


# (wait, whether rank 0 takes part at first); rank 0 never comes to the call that waits
WAITS: list[tuple[Callable[[int], None], bool]] = [
    (wait_in_all_reduce, False),
    (wait_in_ddp_backward, True),
    (wait_in_recv, False),
    (wait_in_a_later_group, True),
    (wait_in_an_async_collective, False),
    (wait_in_forming_a_group, False),
]


def broken_out(world: World) -> Any:
    """Break rank 1 out of each wait from one of its threads, while rank 0 stays away."""
    rank = world.place.rank
    # The user's own connection and the store must not be touched.
    listener = socket.create_server(("127.0.0.1", 0))
    mine = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    done = []
    for wait, rank_0_begins in WAITS:
        released = threading.Event()

        def breaker(released: threading.Event = released) -> None:
            released.wait(0.3)
            failure_alarm.break_out("a test")
            failure_alarm.break_out("again")

        if rank:
            thread = threading.Thread(target=breaker)
            thread.start()
            started = time.monotonic()
            with pytest.raises(RuntimeError if wait is not wait_in_forming_a_group else Exception):
                wait(rank)
            assert time.monotonic() - started < GENEROUS
            released.set()
            thread.join()
            assert world.dirty == "a test" and not world.alive()
        elif rank_0_begins:
            wait(rank)
        done.append(wait.__name__)
        next_generation(world)
        assert world.dirty == "" and world.alive()
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 2
    mine.sendall(b"untouched")
    return done, other.recv(9)


def test_break_out_releases_every_wait_and_touches_nothing_else() -> None:
    expected = [wait.__name__ for wait, _ in WAITS], b"untouched"
    assert run_ranks(broken_out, 2, generations=len(WAITS) + 1) == [expected] * 2


def broken_by_a_peer(world: World) -> str:
    """Break out on rank 0 only. The others wake because its ends of the connections are shut."""
    if world.place.rank == 0:
        failure_alarm.break_out("rank 0 failed")
        return world.dirty
    with pytest.raises(RuntimeError, match="closed by peer"):
        dist.all_reduce(torch.ones(1))
    return world.dirty


def test_peers_wake_when_one_rank_breaks_out() -> None:
    assert run_ranks(broken_by_a_peer, 3) == ["rank 0 failed", "", ""]


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def with_workers(world: World) -> bool:
    """Break out while the DataLoader's workers hold duplicates of the connections. They must not prevent it."""
    loader = iter(DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"))
    next(loader)
    if world.place.rank == 0:
        failure_alarm.break_out("stop")
    else:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
    return next(loader) is not None


def test_break_out_works_while_loader_workers_are_alive() -> None:
    assert run_ranks(with_workers, 2) == [True, True]


def seen_from_a_thread(world: World) -> Any:
    if world.place.rank:
        time.sleep(1.0)
        dist.all_reduce(torch.ones(1))
        return None
    seen: list[Any] = []

    def look() -> None:
        deadline = time.monotonic() + GENEROUS
        while not re.search("in a_function.*all_reduce", failure_alarm.where()) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.extend([failure_alarm.main_thread_stack(), failure_alarm.where()])

    thread = threading.Thread(target=look)
    thread.start()
    a_function_of_the_user()
    thread.join()
    return seen


def a_function_of_the_user() -> None:
    dist.all_reduce(torch.ones(1))


def test_where_reports_the_users_line_and_the_collective() -> None:
    stack, where = run_ranks(seen_from_a_thread, 2)[0]

    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "def a_function" in text) + 1
    assert stack[-1] == f"{__file__}:{line} in a_function_of_the_user"
    assert stack[-2].endswith(" in seen_from_a_thread")
    assert not any("distributed_c10d" in frame or "threading.py" in frame for frame in stack)
    assert where.startswith(f"{stack[-1]}; last issued all_reduce #1 of group world, issued ")


def dumped(world: World, path: str) -> str:
    failure_alarm.dump_on_signal(path)
    failure_alarm.dump_on_signal(path)
    os.kill(os.getpid(), signal.SIGUSR1)
    return Path(path).read_text()


def test_a_signal_writes_the_stacks_into_the_file(tmp_path: Path) -> None:
    (text,) = run_ranks(dumped, 1, str(tmp_path / "stacks"))

    assert f'File "{__file__}"' in text and "in dumped" in text


def broken_out_in_mid_message(world: World) -> float:
    """Break two living ranks out while a message between them is half sent."""
    message = torch.full((100_000_000,), world.place.rank, dtype=torch.uint8)
    ends = dist.isend(message, 0) if world.place.rank == 1 else dist.irecv(message, 1)
    released = threading.Timer(0.02, failure_alarm.break_out, ["planted"])
    released.start()
    assert ends is not None
    with contextlib.suppress(RuntimeError):  # raised if the wait began after the connection had ended
        ends.wait()
    released.join()
    next_generation(world)
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()


def test_break_out_does_not_cut_a_message_between_living_ranks() -> None:
    # gloo never wakes a rank that waits for the rest of a message.
    assert run_ranks(broken_out_in_mid_message, 2, generations=2, timeout=40) == [2.0, 2.0]


ASKED_WHILE_THREADS_END = """
import os, signal, sys, threading, time
from nbkit.rank.world import failure_alarm as watchdog
watchdog.dump_on_signal(sys.argv[1])

def ask():
    for _ in range(150):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)

asking = threading.Thread(target=ask)
asking.start()
while asking.is_alive():
    threading.Thread(target=lambda: [str(i) for i in range(200)]).start()
"""


@pytest.mark.long
def test_a_rank_whose_threads_start_and_end_survives_stack_dumps(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    asked = subprocess.run([sys.executable, "-c", ASKED_WHILE_THREADS_END, str(dump)], timeout=60)
    assert asked.returncode == 0
    assert process_state.main_thread_of(dump.read_text())[-1].function == "<module>"
