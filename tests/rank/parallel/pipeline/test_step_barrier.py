"""Test that no pipeline rank updates weights before all have their gradients, and no rank waits for the messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import quiet
from pretend import join
from ranks import run_ranks
from torch import Tensor, nn

from nbkit.rank.parallel.pipeline.executor import Barrier, Pipeline
from nbkit.rank.telemetry import collectives
from nbkit.schedules import BUILT_IN, Schedule


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3))


def came(world: Any) -> list[list[bool]]:
    """Return for each round which ranks had come when this rank went on. A different rank is late in each round."""
    rank, ranks = world.place.rank, world.place.world_size
    barrier, store = Barrier(dist.group.WORLD), dist.distributed_c10d._get_default_store()
    found = []
    for round_ in range(ranks):
        barrier.open(tag=round_)
        if rank == round_:
            time.sleep(0.3)
        store.set(f"{round_}/{rank}", "here")
        barrier.meet()
        found.append([store.check([f"{round_}/{other}"]) for other in range(ranks)])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_barrier_opens_when_the_last_rank_has_come(ranks: int) -> None:
    assert run_ranks(came, ranks) == [[[True] * ranks] * ranks] * ranks


def summed(world: Any) -> list[tuple[float, ...]]:
    """Return the sums over ranks of some numbers for each round. A different rank is late in each round."""
    rank, ranks = world.place.rank, world.place.world_size
    barrier, store = Barrier(dist.group.WORLD), dist.distributed_c10d._get_default_store()
    found = []
    for round_ in range(ranks):
        barrier.open(tag=round_, count=2)
        if rank == round_:
            time.sleep(0.2)
        store.set(f"{round_}/{rank}", "here")
        numbers = torch.tensor([0.1 ** (rank + 1), 10.0**rank], dtype=torch.float64)
        barrier.meet(numbers)
        assert store.check([f"{round_}/{other}" for other in range(ranks)])
        found.append(tuple(numbers.tolist()))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_barrier_carries_sums_that_are_equal_on_all_ranks(ranks: int) -> None:
    found = run_ranks(summed, ranks)

    assert all(rank == found[0] for rank in found)
    assert found[0][0] == pytest.approx((sum(0.1 ** (rank + 1) for rank in range(ranks)), (10**ranks - 1) / 9))


def pipelined(world: Any, strategy: str) -> tuple[list[str], list[float]]:
    """Return (collectives of a steady step, losses)."""
    ends: list[int] = []
    callbacks = [lambda trainer, record: ends.append(collectives.ring.end)]
    trainer = quiet(model=blocks, strategy=strategy, callbacks=callbacks)
    trainer.fit(5)
    calls = collectives.ring.between(ends[2], ends[3])[0]
    return [call.op for call in calls if call.peer is None], [record["loss"] for record in trainer.history]


def test_a_step_of_one_pipeline_needs_no_extra_reduction_for_its_numbers() -> None:
    (alone, losses), (beside, expected) = run_ranks(pipelined, 2, "pp=2")[0], run_ranks(pipelined, 2, "ddp")[0]

    assert "all_reduce" in beside and alone == []
    assert losses == pytest.approx(expected, rel=1e-5)


def order(world: Any, ordered: dist.ProcessGroup | None = None) -> dict[str, list[str]]:
    """Return the operations of this rank in a run of each schedule, and "told" where it sends its numbers."""
    rank = world.place.rank
    found = {}
    for name in BUILT_IN:
        done: list[str] = []
        pipeline = Pipeline(Schedule.of(name, 2, 4), dist.group.WORLD, rank, torch.device("cpu"), ordered=ordered)
        weight, last = nn.Parameter(torch.ones(3)), pipeline.schedule.num_stages - 1

        def forward(
            stage: int,
            micro: int,
            received: tuple[Tensor, ...],
            weight: nn.Parameter = weight,
            last: int = last,
        ) -> tuple[Tensor, ...]:
            x = weight * (received[0] if received else 1.0)
            return (x.sum(),) if stage == last else (x,)

        def on_op(kind: str, stage: int, micro: int, done: list[str] = done) -> Callable[[], None]:
            return lambda: done.append(f"{kind}{stage}")

        def told(done: list[str] = done) -> None:
            done.append("told")

        pipeline.run(4, forward, lambda micro: "same", launch=told, on_op=on_op)
        pipeline.meet()
        found[name] = done
    return found


def test_a_rank_sends_its_numbers_after_its_last_forward_and_message() -> None:
    first, second = run_ranks(order, 2)
    for name in BUILT_IN:
        for done in (first[name], second[name]):
            assert done.count("told") == 1
            assert not any(op.startswith("F") for op in done[done.index("told") :])
    # The step waits for this rank, which has backward passes left that hide the message.
    assert first["1f1b"][-3:] == ["told", "B0", "B0"]
    # An earlier message would only delay the last backward pass of the other stage.
    assert second["1f1b"][-2:] == ["B1", "told"]


def order_under_nccl(rank: int) -> dict[str, list[str]]:
    world, _ = join(rank, 2)
    return order(world, dist.new_group([0, 1]))


def test_under_nccl_ranks_send_their_numbers_at_the_end() -> None:
    """Check that no operation follows: the device waits for these messages, and there is no barrier."""
    for found in run_ranks(order_under_nccl, 2, join=False):
        assert all(done[-1] == "told" for done in found.values())


def numbered(world: Any) -> list[Any]:
    """Return this rank's messages in a run of each schedule: {"send" or "recv": [(number, bytes), ...]}."""
    found = []
    for name in BUILT_IN:
        pipeline = Pipeline(Schedule.of(name, 2, 4), dist.group.WORLD, world.place.rank, torch.device("cpu"))
        weight, last = nn.Parameter(torch.ones(3)), pipeline.schedule.num_stages - 1

        def forward(
            stage: int, micro: int, received: tuple[Tensor, ...], weight: nn.Parameter = weight, last: int = last
        ) -> tuple[Tensor, ...]:
            x = weight * (received[0] if received else torch.ones(micro + 1, 3))
            return (x.sum(),) if stage == last else (x,)

        began = collectives.ring.end
        pipeline.run(4, forward, lambda micro: micro)
        pipeline.meet()
        calls = collectives.ring.between(began, collectives.ring.end)[0]
        found.append({op: [(call.place, call.bytes) for call in calls if call.op == op] for op in ("send", "recv")})
    return found


def test_messages_are_received_in_the_order_of_sending() -> None:
    """Compare the numbers, by which telemetry finds both ends of a message."""
    first, second = run_ranks(numbered, 2)
    for one, other in zip(first, second, strict=True):
        assert one["send"] == other["recv"] and other["send"] == one["recv"]
        assert one["send"][-1][1] == 0
