"""Test that every collective and message is recorded with axis and bytes, timed if possible, and never changed."""

from __future__ import annotations

import itertools
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbkit.errors import UsageError
from nbkit.mesh import Mesh
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.telemetry import collectives
from nbkit.rank.telemetry import collectives as timed
from nbkit.rank.telemetry.clock_offset import clock_offset
from nbkit.rank.telemetry.phases import clock, phase
from nbkit.rank.telemetry.session import Session, record_path
from nbkit.rank.world.world import World
from nbkit.records import record_file, records

N = 2
WIDTH = 16
LONG = 0.5  # seconds; long even compared with a moment on a busy machine
PARAMS = 2 * (WIDTH * WIDTH + WIDTH)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def noted(work: Any) -> list[tuple[Any, ...]]:
    start = collectives.ring.end
    work()
    # A backend's thread may report a moment after wait() has returned.
    time.sleep(0.2)
    calls, lost = collectives.ring.between(start, collectives.ring.end)
    assert lost == 0
    return [(c.op, c.axis, c.peer, c.bytes, c.seconds is not None, (c.blocked_seconds or 0) > 0) for c in calls]


def plain(rank: int, pair: Any) -> None:
    parts = [torch.zeros(4, dtype=torch.float64) for _ in range(N)]
    dist.all_reduce(torch.ones(8))
    dist.all_gather(parts, torch.ones(4, dtype=torch.float64), group=pair)
    dist.broadcast(torch.ones(2), src=0, group=pair)
    dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(6))
    dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0)
    dist.recv(torch.ones(5), 1) if rank == 0 else dist.send(torch.ones(5), 0)
    work = dist.all_reduce(torch.ones(7), async_op=True)
    assert work is not None
    work.wait()
    (funcol.all_reduce(torch.ones(9), "sum", dist.group.WORLD) + 0).sum()
    dist.barrier()


def ddp() -> None:
    model = nn.parallel.DistributedDataParallel(net())
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()


def fsdp(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard  # an import at the top would cost each worker a second

    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, WIDTH)).sum().backward()


def all_kinds(world: World) -> Any:
    warnings.simplefilter("ignore", FutureWarning)  # names that torch 2.13 deprecates and 2.11 needs
    rank = world.place.rank
    axes = Axes.of(Mesh(tp=N), rank)
    # A mesh over the whole world would be torch's default group, which belongs to no axis.
    mesh = DeviceMesh.from_group(dist.new_group([0, 1], group_desc="mesh_shard"), "cpu")
    named = noted(lambda: dist.all_reduce(torch.ones(1), group=axes.group("tp")))
    pair = dist.new_group([0, 1])
    answers = {"plain": noted(lambda: plain(rank, pair)), "ddp": noted(ddp), "fsdp": noted(lambda: fsdp(mesh))}
    collectives.set_mode("count")
    counted = noted(lambda: dist.all_reduce(torch.ones(8)))
    collectives.set_mode("off")
    off = noted(lambda: dist.all_reduce(torch.ones(8)))
    collectives.set_mode("time")
    shown = repr(collectives.recent(1)[0])
    same = clock_offset()
    # The ranks do not share a clock: rank 1's runs 5 s ahead.
    ahead = 5_000_000_000 * rank
    other = clock_offset(kernel=f"host {rank}", now=lambda: time.perf_counter_ns() + ahead)
    answers["early"], answers["messages"] = ended_early(), messages(rank)
    clock.begin()
    clock.listening = False
    answers["not listening"] = ended_early()
    with phase("outside"):
        answers["outside"] = ended_early()
    clock.end()
    answers["no training"] = ended_early()
    return answers, named, counted, off, shown, same, other


def messages(rank: int) -> list[float | None]:
    """Return the seconds until each of two messages came, as rank 1 knows them. It waits for the first at once, for the
    second long after it came."""
    found = []
    for late in (True, False):
        x, begun = torch.ones(3), None
        dist.barrier()
        if rank == 1:
            begun = dist.irecv(x, 0)
        elif late:
            time.sleep(LONG)
        if not late:
            dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        if not late:
            time.sleep(LONG)
        if begun is not None:
            with pytest.MonkeyPatch.context() as patch:
                # A busy machine needs longer even for a message that is already there.
                patch.setattr(timed, "_AT_ONCE_NS", int(LONG * 0.2e9))
                begun.wait()
            found.append(collectives.recent(1 + (not late))[0].seconds)
        dist.barrier()
    return found


def ended_early() -> bool | None:
    """Return True if a collective ended before the wait for it began, None if this is unknown."""
    dist.barrier()
    work = dist.all_reduce(torch.ones(8), async_op=True)
    time.sleep(LONG)
    assert work is not None
    work.wait()
    call = collectives.recent(1)[0]
    assert call.waited is not None
    return None if call.done is None else call.done < call.waited


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    return run_ranks(all_kinds, N, timeout=120)


def test_plain_collectives_and_messages_have_bytes_axis_and_time(answers: list[Any]) -> None:
    for rank, (answer, *_) in enumerate(answers):
        own = answer["plain"][1][1]  # torch's name for a group that belongs to no axis
        assert own.isdigit()
        messages = [("send", 12), ("recv", 20)] if rank == 0 else [("recv", 12), ("send", 20)]
        assert [call[:4] for call in answer["plain"]] == [
            ("all_reduce", "world", None, 32),
            ("all_gather", own, None, 32),
            ("broadcast", own, None, 8),
            ("reduce_scatter", "world", None, 24),
            *[(op, "world", 1 - rank, size) for op, size in messages],
            ("all_reduce", "world", None, 28),
            ("all_reduce", "world", None, 36),
            ("barrier", "world", None, 0),
        ]
        assert all(stood and (timed or peer is not None) for _, _, peer, _, timed, stood in answer["plain"])


def test_arrival_of_a_message_is_known_only_if_the_rank_waited_for_it(answers: list[Any]) -> None:
    waited, found = answers[1][0]["messages"]
    assert LONG / 2 <= waited < 60
    assert found is None


def test_a_collective_that_ended_during_other_work_ended_before_the_wait(
    answers: list[Any],
) -> None:
    assert [answer["early"] for answer, *_ in answers] == [True] * N


def test_the_end_of_a_collective_is_unknown_in_a_step_that_does_not_listen(answers: list[Any]) -> None:
    told = [(answer["not listening"], answer["outside"], answer["no training"]) for answer, *_ in answers]
    assert told == [(None, True, True)] * N


def test_collectives_of_torch_ddp_are_recorded(answers: list[Any]) -> None:
    for answer, *_ in answers:
        gradients = [call for call in answer["ddp"] if call[0] == "all_reduce" and call[3] == 4 * PARAMS]
        assert len(gradients) == 2
        # DDP waits in C++, so the time that it blocked is unknown; the end is known.
        assert all(call[1] == "world" and call[4] for call in gradients)


def test_collectives_of_fsdp2_are_recorded_with_the_axis_of_its_mesh(answers: list[Any]) -> None:
    for answer, *_ in answers:
        calls = [call for call in answer["fsdp"] if call[1] == "shard"]
        gathers, scatters = ([call for call in calls if call[0] == op] for op in ("all_gather", "reduce_scatter"))
        half = 4 * PARAMS // 2 // N
        # Each layer is gathered in forward and, freed after it, again in backward.
        assert [call[3] for call in gathers] == [half] * 4
        assert [call[3] for call in scatters] == [4 * PARAMS // 2] * 2
        assert all(call[4] for call in calls)


def test_groups_of_a_mesh_have_its_axis_and_modes_count_and_off_record_less(answers: list[Any]) -> None:
    for _, named, counted, off, shown, *_ in answers:
        assert [call[:4] for call in named] == [("all_reduce", "tp", None, 4)]
        assert counted == [("all_reduce", "world", None, 32, False, False)]
        assert off == []
        assert shown == "<all_reduce on world: 32 bytes, not timed>"


def test_clocks_on_one_host_agree_and_those_of_other_hosts_are_measured(answers: list[Any]) -> None:
    assert [answer[-2] for answer in answers] == [0, 0]
    assert answers[0][-1] == 0
    assert abs(answers[1][-1] + 5_000_000_000) < 5_000_000


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="off, count, time"):
        collectives.set_mode("fast")


@pytest.mark.parametrize(
    ("desc", "axis"),
    [("mesh_shard", "shard"), ("pp up", "pp"), ("default_pg", "world"), ("undefined", "7"), ("mine", "mine")],
)
def test_the_axis_of_a_group_comes_from_its_description_in_torch(desc: str, axis: str) -> None:
    assert collectives.axis_of(desc, "7") == axis


def test_the_ring_keeps_the_newest_calls_and_counts_the_lost_ones() -> None:
    ring, group = collectives.Ring(8), collectives.GroupInfo("dp 1 [0,1]", "dp", (0, 1))
    for i in range(20):
        ring.put(collectives.CollectiveCall("send", group, 1, i, i))

    calls, lost = ring.between(5, 20)

    assert [call.bytes for call in calls] == list(range(12, 20))
    assert lost == 7


def own_loop(world: World, folder: str) -> Any:
    """Run a loop without a job, like user code in a cell, with a run directory."""
    rank = world.place.rank
    older = Session(Path(folder) / "older", rank=rank, world_size=N)
    session = Session(Path(folder), rank=rank, world_size=N)
    dist.all_reduce(torch.ones(2))
    session.begin()
    for number in range(1, 5):
        with phase("data"):
            time.sleep(0.005)
        with phase("forward"):
            dist.all_reduce(torch.ones(4))
        with phase("outside"):
            dist.all_reduce(torch.ones(16))
            time.sleep(0.02)
        clock.step(number)
    session.end()
    dist.all_reduce(torch.ones(3))
    session.close()
    older.close()
    return record_path(Path(folder), rank)


def test_records_of_a_users_own_loop_are_on_disk_after_its_end(tmp_path: Path) -> None:
    paths = run_ranks(own_loop, N, str(tmp_path))

    assert list(record_file.rank_files(tmp_path)) == [0, 1]
    found, _ = record_file.read_since(paths[1])
    header, *rest = found
    assert isinstance(header, records.Header) and (header.rank, header.world_size) == (1, N)
    steps = [one for one in rest if isinstance(one, records.StepRecord)]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert [(row.op, row.axis, row.calls, row.bytes, row.timed) for row in step.traffic] == [
            ("all_reduce", "world", 1, 16, 1)
        ]
        assert step.parts["data"] >= 0.005
        # The collective counts as communication, not as part of the forward pass around it.
        assert step.parts["exposed"] >= step.traffic[0].blocked - 1e-6 and step.traffic[0].blocked > 0
        assert sum(step.parts.values()) == pytest.approx(step.seconds, abs=1e-6)
        assert step.own_seconds > 0 and step.cpu_seconds > 0 and step.lost == 0
    for one, following in itertools.pairwise(steps):
        assert (following.start_ns - one.start_ns) / 1e9 >= one.seconds + 0.02  # work between steps is in no step
    outside = [one for one in rest if isinstance(one, records.Outside)]
    assert sum(row.bytes for one in outside for row in one.traffic) == 8 + 4 * 64 + 12
    details = [one for one in rest if isinstance(one, records.Detail)]
    assert [detail.step for detail in details] == [1, 2, 3]
    for detail in details:
        assert all(first[2] == second[1] for first, second in zip(detail.laps, detail.laps[1:], strict=False))
        (call,) = detail.calls
        assert call.waited is not None and call.done is not None
        assert call.issued <= call.waited and call.issued <= call.done
    assert len(record_file.read_overview(paths[1])) == 4
    # An idle job in the same process does not record what this one sends.
    others, _ = record_file.read_since(record_path(tmp_path / "older", 1))
    assert [one for one in others if isinstance(one, records.Outside)] == []
