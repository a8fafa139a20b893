"""Test that the pretended GPU finds bugs of real GPUs: each planted bug alone, and nothing without it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretend import Communicator, Limits, PretendAccelerator, checked, join
from ranks import run_ranks

from nbkit.rank.comm.delegating_group import DelegatingGroup

_CPU = torch.device("cpu")


def bare_group() -> Any:
    """Return a group whose members do not meet in Python before the first use, as in plain torch."""
    group: Any = dist.new_group([0, 1])
    group.meeting = None
    return group


def no_wait(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    x = torch.ones(4)
    work = dist.all_reduce(x, group=group, async_op=True)
    if not bug:
        work.wait()
    (x + 1).sum()


def freed_before_the_wait(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    x = torch.ones(4)
    work = dist.all_reduce(x, group=group, async_op=True)
    if bug:
        x.untyped_storage().resize_(0)
    work.wait()
    if not bug:
        x.untyped_storage().resize_(0)


def sent_memory_changed_in_flight(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    part, whole = torch.ones(2), torch.empty(4)
    work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
    if bug:
        part.data.add_(1)
    work.wait()
    part.add_(1)


def result_given_on_before_the_wait(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    x, other = torch.ones(4), dist.group.WORLD
    first = dist.all_reduce(x, group=group, async_op=True)
    if not bug:
        first.wait()
    dist.all_reduce(x, group=other, async_op=True).wait()


def host_copy_read_before_its_event(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    there, copied = gpu.fetch(torch.ones(4))
    if not bug:
        copied.synchronize()
    assert there.tolist() == [1.0] * 4


def event_recorded_before_the_copy(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    x = torch.ones(4)
    early = gpu.event(_CPU)
    there, late = gpu.fetch(x)
    (early if bug else late).synchronize()
    assert there.tolist() == [1.0] * 4


def stream_beside_that_waits_for_too_little(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    x = torch.zeros(4)
    early = gpu.event(_CPU)
    x.add_(1)
    with gpu.beside(_CPU, after=early if bug else gpu.event(_CPU)):
        x.sum()


def written_while_a_stream_beside_reads(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    x = torch.zeros(4)
    kept = x if bug else x.clone()
    with gpu.beside(_CPU, after=gpu.event(_CPU)):
        kept.sum()
    x.add_(1)


def both_directions_on_one_communicator(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    other, out, into = 1 - gpu.rank, torch.ones(2), torch.empty(2)
    ways = {0: ("send", "recv"), 1: ("send", "recv") if bug else ("recv", "send")}[gpu.rank]
    works = [group.send([out], other, 0) if way == "send" else group.recv([into], other, 0) for way in ways]
    for work in works:
        work.wait()


def first_uses_in_another_order(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    groups = [bare_group(), bare_group()]
    for one in reversed(groups) if bug and gpu.rank else groups:
        dist.all_reduce(torch.ones(1), group=one)


def member_that_never_comes(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    own = bare_group()
    if not (bug and gpu.rank):
        dist.all_reduce(torch.ones(1), group=own)
    elif bug:
        raise RuntimeError("not there")


def aborts_one_after_the_other(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(2)]
    for one in groups:
        dist.all_reduce(torch.ones(1), group=one)
        if gpu.rank == 0:
            dist.all_reduce(torch.ones(1), group=one, async_op=True)  # rank 1 never answers
    failed: list[BaseException] = []

    def abort(group: DelegatingGroup) -> None:
        try:
            group.inner.abort()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=abort, args=(one,)) for one in groups]
    for thread in threads:
        thread.start()
        if bug:
            thread.join()
    for thread in threads:
        thread.join()
    if failed or (gpu.rank and bug):
        raise failed[0] if failed else RuntimeError("rank 0 failed")


def abort_after_shutdown(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    own: Any = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=own)
    inner = own.inner
    if not bug:
        inner.abort()
    inner.shutdown()
    if bug:
        inner.abort()


def work_kept(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    kept, whole = [], torch.empty(1 << 10)
    work = dist.all_gather_into_tensor(whole, torch.ones(1 << 9), group=group, async_op=True)
    work.wait()
    if bug:
        kept.append(work)
    del work
    storage = weakref.ref(whole.untyped_storage())
    del whole
    gc.collect()
    assert storage() is None


def number_read_in_a_step(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    before, loss = gpu.counts["host synchronisation"], torch.ones(3).sum()
    if bug:
        loss.item()
    assert gpu.counts["host synchronisation"] == before


def list_read_in_a_step(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    before, loss = gpu.counts["host synchronisation"], torch.ones(3)
    if bug:
        loss.tolist()
    assert gpu.counts["host synchronisation"] == before


def unpinned_copy(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    before, batch = gpu.counts["unpinned copy"], gpu.host(torch.ones(3))
    there = batch.to(_CPU) if bug else gpu.send(batch, _CPU)
    assert gpu.holds(there)
    assert gpu.counts["unpinned copy"] == before


def host_memory_in_an_operation_of_the_device(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    batch = gpu.host(torch.ones(3))
    torch.ones(3) + (batch if bug else gpu.send(batch, _CPU))


def host_memory_in_a_collective(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    number = gpu.host(torch.ones(3))
    dist.all_reduce(number if bug else gpu.send(number, _CPU), group=group)


def device_used_after_an_assert(gpu: PretendAccelerator, group: Any, bug: bool) -> None:
    gpu.lost = "device-side assert triggered" if bug else ""
    try:
        torch.ones(2) + 1
    finally:
        gpu.lost = ""


PLANTED: list[Callable[[PretendAccelerator, Any, bool], None]] = [
    no_wait,
    freed_before_the_wait,
    sent_memory_changed_in_flight,
    result_given_on_before_the_wait,
    host_copy_read_before_its_event,
    event_recorded_before_the_copy,
    stream_beside_that_waits_for_too_little,
    written_while_a_stream_beside_reads,
    both_directions_on_one_communicator,
    first_uses_in_another_order,
    member_that_never_comes,
    aborts_one_after_the_other,
    abort_after_shutdown,
    work_kept,
    number_read_in_a_step,
    list_read_in_a_step,
    unpinned_copy,
    host_memory_in_an_operation_of_the_device,
    host_memory_in_a_collective,
    device_used_after_an_assert,
]


def verdicts(rank: int) -> dict[str, dict[bool, str]]:
    """Return for each planted bug the error with it and without it."""
    Limits.come = Limits.abort = Limits.wait = 0.7
    _, gpu = join(rank, 2)
    found: dict[str, dict[bool, str]] = {}
    for number, plant in enumerate(PLANTED):
        found[plant.__name__] = {}
        for bug in (False, True):
            group = dist.new_group([0, 1], group_desc=f"planted {number} {bug}")
            try:
                with checked(gpu):
                    plant(gpu, group, bug)
                found[plant.__name__][bug] = ""
            except BaseException as error:
                found[plant.__name__][bug] = f"{type(error).__name__}: {error}"
            Communicator.give_up()
    return found


@pytest.fixture(scope="module")
def both() -> list[dict[str, dict[bool, str]]]:
    return run_ranks(verdicts, 2, join=False, timeout=120)


@pytest.mark.parametrize("name", [plant.__name__ for plant in PLANTED])
def test_each_planted_bug_is_found_and_nothing_without_it(name: str, both: list[dict[str, dict[bool, str]]]) -> None:
    assert [found[name][False] for found in both] == ["", ""]
    assert all(found[name][True] for found in both), both
