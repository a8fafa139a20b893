"""What went wrong on GPUs alone, on the pretended one: memory kept by telemetry, standstills, crashes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from jobs import quiet
from pretend import Communicator, Limits, PretendAccelerator, checked, join, works
from ranks import next_generation, run_ranks
from torch import nn

from nbkit.errors import NbkitError, StrategyError, TrainingError
from nbkit.rank import device
from nbkit.rank.comm import link_probe
from nbkit.rank.comm.delegating_group import DelegatingGroup
from nbkit.rank.parallel.pipeline.p2p import Channels
from nbkit.rank.telemetry import collectives
from nbkit.rank.world import watchdog


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3))


def _works_between_steps(mode: str) -> int:
    """The most handles of collectives that are alive between two steps."""
    most: list[int] = []

    def counted(trainer: Any, record: dict[str, Any]) -> None:
        gc.collect()
        most.append(len(works))

    collectives.set_mode(mode)
    trainer = quiet(model=blocks, strategy="zero3", callbacks=[counted])
    trainer.fit(4)
    del trainer
    gc.collect()
    return max(most[1:])


def telemetry(world: Any, gpu: PretendAccelerator) -> tuple[int, int]:
    """(without, with) telemetry."""
    collectives.ring = collectives.Ring()
    return _works_between_steps("off"), _works_between_steps("time")


def pipeline(world: Any, gpu: PretendAccelerator) -> list[float]:
    """Losses of a training under a pipeline, with a new generation of the world after two steps: an error in a cell."""
    trainer = quiet(model=blocks, strategy="pp=2")
    trainer.fit(2)
    next_generation(world)
    trainer.fit(2)
    return [record["loss"] for record in trainer.history]


def letters() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 6), *blocks()[:4], nn.Linear(6, 8))


def writer(strategy: str) -> Any:
    texts = torch.arange(9) % 8
    return quiet(
        model=letters,
        strategy=strategy,
        loss=lambda logits, ids: nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()),
        data=[(texts[i : i + 4], texts[i + 1 : i + 5]) for i in range(4)] * 8,
    )


def generating(world: Any, gpu: PretendAccelerator) -> list[list[int]]:
    """Texts from a pipeline, with a new generation of the world between them: each the first use of a group."""
    texts, job = torch.arange(9) % 8, writer("pp=2")
    found = [job.generate(texts[:3], 3).tolist()]
    next_generation(world)
    return [*found, job.generate(texts[:3], 3).tolist()]


CHAIN = ("zero3", "tp", "pp=2", "zero2", "ddp", "pp=2 schedule=zbv", "zero1", "tp", "zero3", "pp=2")


def ten_switches(world: Any, gpu: PretendAccelerator) -> list[int]:
    """Communicators beside that of all ranks: after a first step, and after one under each strategy of CHAIN."""

    def open_now() -> int:
        return sum(one.met and not one.shut for one in Communicator.everyone) - others

    gc.collect()
    others = 0
    trainer, others = writer("ddp"), open_now()
    trainer.fit(1)
    counts = [open_now()]
    for number, strategy in enumerate(CHAIN):
        trainer.switch(strategy, beside=bool(number % 2))
        trainer.fit(1)
        counts.append(open_now())
    trainer.undo()
    trainer.fit(1)
    return counts


def _released(wait: Callable[[], Any]) -> str:
    """What becomes of `wait` in a thread when the rank is broken out 0.3 s later: "" when nothing does."""
    ended: list[str] = []

    def run() -> None:
        try:
            wait()
            ended.append("returned")
        except BaseException as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.3)
    watchdog.break_out("a test")
    thread.join(2.0)
    return "".join(ended)


def stuck_in_two(world: Any, gpu: PretendAccelerator) -> str:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    found = ""
    if gpu.rank == 0:
        pending = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups]
        found = _released(lambda: [work.wait() for work in reversed(pending)])
    Communicator.give_up()
    next_generation(world)
    return found


def alone_in_a_first_use(world: Any, gpu: PretendAccelerator) -> str:
    group = dist.new_group([0, 1])
    found = ""
    if gpu.rank == 0:
        found = _released(lambda: dist.all_reduce(torch.ones(1), group=group))
    next_generation(world)
    return found


def alone_in_new_group(world: Any, gpu: PretendAccelerator) -> str:
    return _released(lambda: dist.new_group([0, 1])) if gpu.rank == 0 else ""


def asserted(world: Any, gpu: PretendAccelerator) -> str:
    def breaks(trainer: Any, record: dict[str, Any]) -> None:
        gpu.lost = "device-side assert triggered" if record["step"] == 2 else ""

    trainer = quiet(callbacks=[breaks])
    try:
        with checked(gpu):
            trainer.fit(4)
    except TrainingError as error:
        return error.what
    finally:
        gpu.lost = ""
    return ""


def queues(world: Any, gpu: PretendAccelerator) -> str:
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")


def leaving(world: Any, gpu: PretendAccelerator) -> str:
    """With a group that somebody holds, as a mesh of the user's does."""
    held = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=held)
    world.leave()
    return ""


def each(rank: int, scenes: list[Callable[..., Any]]) -> dict[str, Any]:
    Limits.come, Limits.abort, Limits.wait = 3.0, 4.0, 20.0
    link_probe._LARGE_ON_DEVICES = 1 << 14
    world, gpu = join(rank, 2)
    found: dict[str, Any] = {}
    for scene in scenes:
        try:
            found[scene.__name__] = scene(world, gpu)
        except (NbkitError, RuntimeError) as error:
            found[scene.__name__] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def lasting() -> list[dict[str, Any]]:
    """By rank: what became of the scenes after which the ranks go on."""
    first = [ten_switches]  # no other scene has made groups yet
    scenes = [*first, telemetry, pipeline, generating, stuck_in_two, alone_in_a_first_use, asserted, queues, leaving]
    return run_ranks(each, 2, scenes, join=False, generations=5, timeout=120)


def test_telemetry_keeps_nothing_alive_that_would_not_live_without_it(lasting: list[dict[str, Any]]) -> None:
    for rank in lasting:
        silent, told = rank["telemetry"]
        assert told == silent


def test_a_pipeline_goes_on_in_a_world_that_was_formed_again(lasting: list[dict[str, Any]]) -> None:
    losses = [rank["pipeline"] for rank in lasting]

    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_a_pipeline_generates_where_the_first_use_of_a_group_waits_for_all_members(
    lasting: list[dict[str, Any]],
) -> None:
    first, second = lasting[0]["generating"]

    assert first == second and len(first) == 6
    assert lasting[1]["generating"] == [first, second]


def test_of_ten_switches_only_the_communicators_are_left_that_the_strategy_or_an_undo_uses(
    lasting: list[dict[str, Any]],
) -> None:
    own = {name: {"tp"} if name == "tp" else {"up", "down"} if name[:2] == "pp" else {"dp"} for name in ("ddp", *CHAIN)}
    expected = [len(own[new] | own[old]) for old, new in pairwise(("ddp", "ddp", *CHAIN))]

    for rank in lasting:
        assert rank["ten_switches"] == expected


def test_a_rank_that_is_stuck_in_two_communicators_is_released_from_both(lasting: list[dict[str, Any]]) -> None:
    assert lasting[0]["stuck_in_two"] == "returned"


def test_a_rank_that_comes_alone_to_the_first_use_of_a_group_is_released(lasting: list[dict[str, Any]]) -> None:
    assert lasting[0]["alone_in_a_first_use"] == "ClusterError"


def test_a_device_that_computes_nothing_any_more_is_named(lasting: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(lasting):
        assert rank["asserted"].startswith(f"The CUDA context of rank {number} is gone")


def test_the_streams_of_a_rank_share_no_queue_of_its_gpu(lasting: list[dict[str, Any]]) -> None:
    assert [rank["queues"] for rank in lasting] == [os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32")] * 2


def test_a_pipeline_of_gpus_over_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_accelerator", PretendAccelerator())

    with pytest.raises(StrategyError, match="over nccl, and these ranks have gloo"):
        Channels(MagicMock(spec=DelegatingGroup), torch.device("cpu"))


def test_no_communicator_is_aborted_after_it_was_destroyed(lasting: list[dict[str, Any]]) -> None:
    assert [rank["leaving"] for rank in lasting] == ["", ""]


def test_a_rank_that_forms_a_group_alone_is_released() -> None:
    found = run_ranks(each, 2, [alone_in_new_group], join=False, timeout=60)

    assert found[0]["alone_in_new_group"] == "ClusterError"
