"""Test that a rank that fails in a step wakes the others from their waits, all meet, and their groups work again."""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import next_generation, run_ranks

from nbkit.errors import ClusterError
from nbkit.rank.comm.delegating_group import DelegatingGroup
from nbkit.rank.world import failure_alarm
from nbkit.rank.world.failure_alarm import Alarm, AlarmHeard


def total(group: Any = None) -> float:
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return one.item()


def hears(alarm: Alarm) -> bool:
    """Return True if the alarm is heard within ten seconds. A rank that woke earlier closes its connections, which may
    end the wait before."""
    deadline = time.monotonic() + 10
    while not alarm.heard and time.monotonic() < deadline:
        time.sleep(0.01)
    return alarm.heard


def fails(alarm: Alarm, wait: Any, *, failing: bool) -> list[str]:
    alarm.begin()
    said = ""
    try:
        if failing:
            said = "no"
            alarm.ring()
        else:
            wait()
    except RuntimeError as error:
        said = "woken" if hears(alarm) and alarm.rung() else f"not woken: {error}"
    alarm.end()
    told = alarm.meet(said)
    alarm.mend()
    return told


def woken(world: Any) -> Any:
    rank = world.place.rank
    pair, everyone = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    told = [
        fails(Alarm("a"), lambda: total(everyone), failing=rank == 2),
        fails(Alarm("a"), lambda: dist.recv(torch.ones(1), 1), failing=rank == 1),
    ]
    sums = [total(), total(everyone), total(pair) if rank < 2 else 2.0, total(dist.new_group([0, 1, 2]))]
    # The next generation must form as usual.
    next_generation(world)
    sums += [total(), total(everyone)]
    told.append(fails(Alarm("a"), total, failing=rank == 0))
    return told, [*sums, total()], world.dirty, isinstance(dist.group.WORLD, DelegatingGroup)


def test_ranks_that_wait_for_a_failed_rank_wake_and_their_groups_work_again() -> None:
    for told, sums, dirty, delegating in run_ranks(woken, 3, generations=2):
        assert told == [["woken", "woken", "no"], ["woken", "no", "woken"], ["no", "woken", "woken"]]
        assert sums == [3.0, 3.0, 2.0, 3.0, 3.0, 3.0, 3.0] and dirty == "" and delegating


def alone(world: Any) -> list[Any]:
    alarm = Alarm("a")
    alarm.begin()
    alarm.check()
    alarm.ring()
    alarm.end()
    return [alarm.meet("me"), alarm.rung(), alarm.heard, alarm.mend()]


def test_an_alarm_in_a_world_of_one_has_no_effect() -> None:
    assert run_ranks(alone, 1) == [[["me"], False, False, None]]


def serve(port: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    time.sleep(600)


def unreachable(world: Any) -> bool:
    """Return True if an alarm ends after its store ended with the rank that held it."""
    forking = multiprocessing.get_context("fork")
    port, told = forking.Pipe(duplex=False)
    server = forking.Process(target=serve, args=(told,))
    server.start()
    own = dist.TCPStore("127.0.0.1", port.recv(), is_master=False, wait_for_workers=False)
    server.kill()
    server.join()
    whole, world._store = world._store, own
    alarm = Alarm("a")
    alarm.begin()
    ending = threading.Thread(target=alarm.end, daemon=True)
    ending.start()
    ending.join(10.0)
    world._store = whole
    return not ending.is_alive()


def test_an_alarm_ends_even_if_its_store_is_unreachable() -> None:
    assert run_ranks(unreachable, 2) == [True, True]


def left(world: Any) -> str:
    """Break rank 0 out, as after Stop or the death of a rank. Rank 1 never comes."""
    if world.place.rank == 1:
        return ""
    alarm = Alarm("a")
    alarm.begin()
    threading.Timer(0.5, failure_alarm.break_out, ("rank 1 died",)).start()
    alarm.ring()
    alarm.end()
    with pytest.raises(ClusterError) as error:
        alarm.meet("me")
    alarm.heard = True
    with pytest.raises(AlarmHeard):
        alarm.check()
    return f"{error.value.what} {error.value.numbers} {Alarm.possible()}"


def test_no_rank_waits_for_a_dead_rank() -> None:
    assert run_ranks(left, 2) == ["The ranks do not come together. rank 1 died False", ""]
