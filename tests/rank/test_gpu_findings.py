"""Bugs that showed on GPUs alone, on the pretended one: memory kept by telemetry, standstills, crashes."""

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
from pretend.communicator import Work
from ranks import next_generation, run_ranks
from torch import nn

from nbkit.errors import NbkitError, StrategyError, SwitchError, TrainingError
from nbkit.rank import device
from nbkit.rank.comm import link_probe
from nbkit.rank.comm.delegating_group import DelegatingGroup
from nbkit.rank.parallel import device_mesh
from nbkit.rank.parallel.data_parallel.ddp import ALIVE
from nbkit.rank.parallel.pipeline.p2p import Channels
from nbkit.rank.telemetry import collectives
from nbkit.rank.train import builder
from nbkit.rank.world import failure_alarm
from nbkit.strategy import Strategy


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3))


def _works_between_steps(mode: str) -> int:
    """Return how many handles of collectives are alive at most between two steps."""
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
    """Return the handles alive (without, with) telemetry."""
    collectives.ring = collectives.Ring()
    return _works_between_steps("off"), _works_between_steps("time")


def pipeline(world: Any, gpu: PretendAccelerator) -> tuple[list[float], list[str]]:
    """Return the losses of a pipeline, and from which communicator the last one was split. After two steps the world
    gets a new generation, as after an error in a cell."""
    trainer = quiet(model=blocks, strategy="pp=2")
    trainer.fit(2)
    next_generation(world)
    known = list(Communicator.everyone)
    trainer.fit(2)
    new = [one.parent.partition("/")[2] for one in Communicator.everyone if one.met and one not in known]
    return [record["loss"] for record in trainer.history], new


def letters() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 6), *blocks()[:4], nn.Linear(6, 8))


def tied_letters() -> nn.Module:
    model = letters()
    model[-1].weight = model[0].weight  # type: ignore[union-attr]
    return model


def writer(strategy: str, model: Callable[[], nn.Module] = letters) -> Any:
    texts = torch.arange(9) % 8
    return quiet(
        model=model,
        strategy=strategy,
        loss=lambda logits, ids: nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()),
        data=[(texts[i : i + 4], texts[i + 1 : i + 5]) for i in range(4)] * 8,
    )


def generating(world: Any, gpu: PretendAccelerator) -> list[list[int]]:
    """Generate twice from a pipeline, with a new generation of the world between. Each is the first use of a group."""
    texts, job = torch.arange(9) % 8, writer("pp=2")
    found = [job.generate(texts[:3], 3).tolist()]
    next_generation(world)
    return [*found, job.generate(texts[:3], 3).tolist()]


def tied(world: Any, gpu: PretendAccelerator) -> tuple[list[list[float]], int]:
    """Return the losses of a model whose ends share a weight under ddp and pp, and the communicators that pp adds."""
    losses = []
    for strategy in ("ddp", "pp=2"):
        known = list(Communicator.everyone)
        trainer = writer(strategy, tied_letters)
        trainer.fit(3)
        losses.append([record["loss"] for record in trainer.history])
    return losses, sum(one.met and one not in known for one in Communicator.everyone)


CHAIN = ("zero3", "tp", "pp=2", "zero2", "ddp", "pp=2 schedule=zbv", "zero1", "tp", "zero3", "pp=2")


def ten_switches(world: Any, gpu: PretendAccelerator) -> list[int]:
    """Count communicators beside that of all ranks after a first step, and after one under each in CHAIN."""

    def open_now() -> int:
        return sum(one.met and not one.shut for one in Communicator.everyone) - others

    gc.collect()
    others = 0
    trainer, others = writer("ddp"), open_now() - 1  # its own is made when it connects
    trainer.fit(1)
    counts = [open_now()]
    for number, strategy in enumerate(CHAIN):
        trainer.switch(strategy, beside=bool(number % 2))
        trainer.fit(1)
        counts.append(open_now())
    trainer.undo()
    trainer.fit(1)
    return counts


def failed_switch(world: Any, gpu: PretendAccelerator) -> list[str]:
    """Return the strategy, and what is said, after a switch to a pipeline that failed on rank 1, and after another."""
    trainer, said = writer("ddp"), ""
    trainer.fit(1)
    with pytest.MonkeyPatch.context() as patch:
        if gpu.rank == 1:
            patch.setattr(builder, "parallelize", lambda *_, **__: 1 / 0)
        try:
            trainer.switch("pp=2")
        except SwitchError as error:
            said = str(error)
    trainer.fit(1)
    found = [str(trainer.strategy)]
    trainer.switch("pp=2")
    trainer.fit(1)
    return [*found, str(trainer.strategy), said]


def connecting(world: Any, gpu: PretendAccelerator) -> list[str]:
    """Return what a switch to tp does before it builds: give back the allocator's reserve, and make communicators."""
    trainer, done = writer("ddp"), list[str]()
    trainer.fit(1)
    known = list(Communicator.everyone)

    def trim() -> None:
        new = [one for one in Communicator.everyone if one.met and one not in known]
        done.append(f"reserve given back, {len(new)} made")

    gpu.trim = trim  # type: ignore[method-assign]
    try:
        trainer.job.builder.connect(Strategy.parse("tp", 2), alike=True)
    finally:
        del gpu.trim
    new = [one for one in Communicator.everyone if one.met and one not in known]
    return [*done, *(f"{one.key} of {one.parent}".partition("/")[2] for one in new)]


def forgotten(world: Any, gpu: PretendAccelerator) -> list[int]:
    """Count the open communicators beside that of all ranks after three switches. Before the first, from zero3, its
    group was forgotten. The last number counts the forgotten groups that are left; one was on rank 0 alone."""

    def open_now() -> int:
        return sum(one.met and not one.shut for one in Communicator.everyone) - others

    gc.collect()
    trainer, others, counts = writer("ddp"), 0, list[int]()
    trainer.switch("zero3")
    trainer.fit(1)
    others = open_now() - 1
    if gpu.rank == 0:
        device_mesh._made[device_mesh.key_of("left", (0,))] = dist.new_group([0], use_local_synchronization=True)
    for strategy in ("zero2", "tp", "zero3"):
        # An interrupt may reach one rank before a group is made, and another one after it.
        if strategy == "zero2":
            device_mesh.forget(torch.device("cpu"))
            trainer.job.builder._connected.clear()
        trainer.switch(strategy)
        trainer.fit(1)
        counts.append(open_now())
    counts.append(sum(key[-1] < device_mesh._forgotten for key in device_mesh._made))
    return counts


def half_done(world: Any, gpu: PretendAccelerator) -> bool:
    """Return True if rank 0 knows that its update used a sum that was broken off. Only the last part of the sum was
    made: NCCL sends in parts, each through a channel of its own."""
    whole = Work.wait

    def wait(work: Work, *timeout: Any) -> bool:
        whole(work, *timeout)
        if work._where.aborted.is_set():
            for output in work._outputs:
                output.data.zero_()
                output.data.view(-1)[-1:] = ALIVE
        return True

    def leaves(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 2 and gpu.rank == 1:
            raise RuntimeError("on purpose")

    trainer = quiet(model=blocks, strategy="ddp", callbacks=[leaves])
    timer = threading.Timer(3.0, failure_alarm.break_out, ["a test"])
    if gpu.rank == 0:
        timer.start()
    Work.wait = wait  # type: ignore[method-assign]
    try:
        trainer.fit(8)
    except (RuntimeError, NbkitError):
        pass
    finally:
        Work.wait = whole  # type: ignore[method-assign]
    timer.cancel()
    found = trainer.job.integrity.half_way
    Communicator.give_up()
    next_generation(world)
    return found


def _released(wait: Callable[[], Any]) -> str:
    """Run `wait` in a thread, break the rank out 0.3 s later, and return how `wait` ended: "" if it did not."""
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
    failure_alarm.break_out("a test")
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
    """Leave the world while somebody holds a group, as a mesh of the user's does."""
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
    """Return by rank the results of the scenes after which the ranks go on."""
    first = [ten_switches, connecting, forgotten, failed_switch]  # no other scene has made groups yet
    stuck = [half_done, stuck_in_two, alone_in_a_first_use]
    scenes = [*first, tied, telemetry, pipeline, generating, *stuck, asserted, queues, leaving]
    return run_ranks(each, 2, scenes, join=False, generations=6, timeout=180)


@pytest.mark.long
def test_telemetry_keeps_nothing_alive_that_would_not_live_without_it(lasting: list[dict[str, Any]]) -> None:
    for rank in lasting:
        silent, told = rank["telemetry"]
        assert told == silent


@pytest.mark.long
def test_a_pipeline_goes_on_in_a_world_that_was_formed_again(lasting: list[dict[str, Any]]) -> None:
    (losses, new), other = (rank["pipeline"] for rank in lasting)

    assert (losses, new) == other and len(losses) == 4
    assert new == ["all"]


def test_the_ends_of_a_pipeline_sum_a_weight_that_they_share_without_a_communicator_of_their_own(
    lasting: list[dict[str, Any]],
) -> None:
    for rank in lasting:
        (ddp, pp), new = rank["tied"]
        assert pp == pytest.approx(ddp, rel=1e-5) and ddp[0] != ddp[2]
        assert new <= 1  # for all messages of the pipeline


def test_a_pipeline_generates_where_the_first_use_of_a_group_waits_for_all_members(
    lasting: list[dict[str, Any]],
) -> None:
    first, second = lasting[0]["generating"]

    assert first == second and len(first) == 6
    assert lasting[1]["generating"] == [first, second]


def test_of_ten_switches_only_the_communicators_are_left_that_the_strategy_or_an_undo_uses(
    lasting: list[dict[str, Any]],
) -> None:
    own = {name: {name[:2]} if name[:2] in ("tp", "pp") else {"dp"} for name in ("ddp", *CHAIN)}
    expected = [len(own[new] | own[old]) for old, new in pairwise(("ddp", "ddp", *CHAIN))]

    for rank in lasting:
        assert rank["ten_switches"] == expected


def test_a_switch_to_a_pipeline_that_fails_is_taken_back_and_the_next_one_succeeds(
    lasting: list[dict[str, Any]],
) -> None:
    for rank in lasting:
        first, second, said = rank["failed_switch"]
        assert first == "dp=2" and second.startswith("pp=2") and "division by zero" in said


def test_communicators_are_made_when_a_strategy_connects_from_memory_that_torch_has_given_back(
    lasting: list[dict[str, Any]],
) -> None:
    for rank in lasting:
        first, *made = rank["connecting"]
        assert first == "reserve given back, 0 made"
        assert len(made) == 1 and made[0].startswith("all of ") and made[0].endswith("/all")  # split from that of all


def test_groups_that_were_forgotten_are_closed_when_nobody_uses_them(lasting: list[dict[str, Any]]) -> None:
    for rank in lasting:
        # The strategy in force and the one of an undo have a communicator each: first both along dp, then dp and tp.
        assert rank["forgotten"] == [2, 2, 2, 0]


def test_an_update_behind_a_sum_that_was_made_in_part_is_known_to_be_torn(lasting: list[dict[str, Any]]) -> None:
    assert lasting[0]["half_done"] is True


def test_nccl_without_memory_for_a_communicator_is_out_of_memory() -> None:
    said = "NCCL error in: NCCLUtils.cpp:76, unhandled cuda error\nLast error:\n{}"
    for last in ("Failed to CUDA calloc 8388608 bytes", "Cuda failure 2 'out of memory'"):
        assert device.accelerator().out_of_memory(dist.DistBackendError(said.format(last)))
    assert not device.accelerator().out_of_memory(dist.DistBackendError(said.format("Connection closed")))


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

    with pytest.raises(StrategyError, match="needs the backend nccl, but these ranks use gloo"):
        Channels(MagicMock(spec=DelegatingGroup), torch.device("cpu"))


def test_no_communicator_is_aborted_after_it_was_destroyed(lasting: list[dict[str, Any]]) -> None:
    assert [rank["leaving"] for rank in lasting] == ["", ""]


def after_a_message(rank: int) -> list[str]:
    """Return what communicators were split from, where two of three ranks have sent to each other before."""
    join(rank, 3)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(torch.ones(1), 1 - rank)
    known = list(Communicator.everyone)
    quiet(strategy="zero3", batch_size=6).fit(1)
    return [one.parent.partition("/")[2] for one in Communicator.everyone if one.met and one not in known]


def test_all_ranks_come_to_a_split_whatever_some_of_them_did_before() -> None:
    assert run_ranks(after_a_message, 3, join=False) == [["all"]] * 3


def test_a_rank_that_forms_a_group_alone_is_released() -> None:
    found = run_ranks(each, 2, [alone_in_new_group], join=False, timeout=60)

    assert found[0]["alone_in_new_group"] == "ClusterError"
