"""Test on the pretended GPU for bugs that appeared only on GPUs: memory kept by telemetry, hangs, crashes."""

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
    """Return the largest number of live handles of collectives between two steps."""
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
    """Return the number of live handles (without, with) telemetry."""
    collectives.ring = collectives.Ring()
    return _works_between_steps("off"), _works_between_steps("time")


def pipeline(world: Any, gpu: PretendAccelerator) -> tuple[list[float], list[str]]:
    """Return the losses of a pipeline, and the parents of its new communicators. After two steps the world gets a new
    generation, as after an error in a cell."""
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
    """Generate from a pipeline before and after a new generation of the world. Each is the first use of a group."""
    texts, job = torch.arange(9) % 8, writer("pp=2")
    found = [job.generate(texts[:3], 3).tolist()]
    next_generation(world)
    return [*found, job.generate(texts[:3], 3).tolist()]


def tied(world: Any, gpu: PretendAccelerator) -> tuple[list[list[float]], int]:
    """Return (losses under ddp and pp of a model whose ends share a weight, number of communicators that pp adds)."""
    losses = []
    for strategy in ("ddp", "pp=2"):
        known = list(Communicator.everyone)
        trainer = writer(strategy, tied_letters)
        trainer.fit(3)
        losses.append([record["loss"] for record in trainer.history])
    return losses, sum(one.met and one not in known for one in Communicator.everyone)


CHAIN = ("zero3", "tp", "pp=2", "zero2", "ddp", "pp=2 schedule=zbv", "zero1", "tp", "zero3", "pp=2")


def ten_switches(world: Any, gpu: PretendAccelerator) -> list[int]:
    """Count the communicators besides that of all ranks, after a first step and after one step under each in CHAIN."""

    def open_now() -> int:
        return sum(one.met and not one.shut for one in Communicator.everyone) - others

    gc.collect()
    others = 0
    trainer, others = writer("ddp"), open_now() - 1  # the trainer makes its own when it connects
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
    """Return [strategy after a failed switch to a pipeline, strategy after the next switch, error of the first]."""
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
    """Return the actions of a switch to tp before it builds: give back the allocator's reserve, make communicators."""
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
    """Count the open communicators besides that of all ranks after each of three switches, and the forgotten groups
    that are left. The group of zero3 is forgotten before the first switch; only rank 0 has one more."""

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
        # An interrupt may reach one rank before a group is made, and another rank after it.
        if strategy == "zero2":
            device_mesh.forget(torch.device("cpu"))
            trainer.job.builder._connected.clear()
        trainer.switch(strategy)
        trainer.fit(1)
        counts.append(open_now())
    counts.append(sum(key[-1] < device_mesh._forgotten for key in device_mesh._made))
    return counts


def half_done(world: Any, gpu: PretendAccelerator) -> bool:
    """Return True if rank 0 knows that its update used an incomplete sum. Only the last part of the sum was made: NCCL
    sends in parts, each through its own channel."""
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
    """Run `wait` in a thread, break out 0.3 s later, and return how `wait` ended ("" if it did not)."""
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
    """Leave the world while a group is still held, as by the user's mesh."""
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
    """Return by rank the results of the scenes that leave the ranks usable."""
    first = [ten_switches, connecting, forgotten, failed_switch]  # these must run before other scenes make groups
    stuck = [half_done, stuck_in_two, alone_in_a_first_use]
    scenes = [*first, tied, telemetry, pipeline, generating, *stuck, asserted, queues, leaving]
    return run_ranks(each, 2, scenes, join=False, generations=6, timeout=180)


@pytest.mark.long
def test_telemetry_keeps_no_handles_alive(lasting: list[dict[str, Any]]) -> None:
    for rank in lasting:
        silent, told = rank["telemetry"]
        assert told == silent


@pytest.mark.long
def test_a_pipeline_continues_in_a_new_generation_of_the_world(lasting: list[dict[str, Any]]) -> None:
    (losses, new), other = (rank["pipeline"] for rank in lasting)

    assert (losses, new) == other and len(losses) == 4
    assert new == ["all"]


def test_the_ends_of_a_pipeline_sum_a_shared_weight_without_a_new_communicator(
    lasting: list[dict[str, Any]],
) -> None:
    for rank in lasting:
        (ddp, pp), new = rank["tied"]
        assert pp == pytest.approx(ddp, rel=1e-5) and ddp[0] != ddp[2]
        assert new <= 1  # for all messages of the pipeline


def test_a_pipeline_generates_if_the_first_use_of_a_group_waits_for_all(
    lasting: list[dict[str, Any]],
) -> None:
    first, second = lasting[0]["generating"]

    assert first == second and len(first) == 6
    assert lasting[1]["generating"] == [first, second]


def test_ten_switches_keep_only_communicators_of_the_strategy_and_its_undo(
    lasting: list[dict[str, Any]],
) -> None:
    own = {name: {name[:2]} if name[:2] in ("tp", "pp") else {"dp"} for name in ("ddp", *CHAIN)}
    expected = [len(own[new] | own[old]) for old, new in pairwise(("ddp", "ddp", *CHAIN))]

    for rank in lasting:
        assert rank["ten_switches"] == expected


def test_a_failed_switch_to_a_pipeline_is_undone_and_the_next_one_succeeds(
    lasting: list[dict[str, Any]],
) -> None:
    for rank in lasting:
        first, second, said = rank["failed_switch"]
        assert first == "dp=2" and second.startswith("pp=2") and "division by zero" in said


def test_connecting_makes_communicators_after_torch_gave_memory_back(
    lasting: list[dict[str, Any]],
) -> None:
    for rank in lasting:
        first, *made = rank["connecting"]
        assert first == "reserve given back, 0 made"
        assert len(made) == 1 and made[0].startswith("all of ") and made[0].endswith("/all")  # a split of "all"


def test_forgotten_groups_are_closed_when_unused(lasting: list[dict[str, Any]]) -> None:
    for rank in lasting:
        # The current strategy and that of an undo have a communicator each: first both along dp, then dp and tp.
        assert rank["forgotten"] == [2, 2, 2, 0]


def test_an_update_after_an_incomplete_sum_is_known_to_be_torn(lasting: list[dict[str, Any]]) -> None:
    assert lasting[0]["half_done"] is True


def test_nccl_without_memory_for_a_communicator_counts_as_out_of_memory() -> None:
    said = "NCCL error in: NCCLUtils.cpp:76, unhandled cuda error\nLast error:\n{}"
    for last in ("Failed to CUDA calloc 8388608 bytes", "Cuda failure 2 'out of memory'"):
        assert device.accelerator().out_of_memory(dist.DistBackendError(said.format(last)))
    assert not device.accelerator().out_of_memory(dist.DistBackendError(said.format("Connection closed")))


def test_a_rank_stuck_in_two_communicators_is_released_from_both(lasting: list[dict[str, Any]]) -> None:
    assert lasting[0]["stuck_in_two"] == "returned"


def test_a_rank_alone_in_the_first_use_of_a_group_is_released(lasting: list[dict[str, Any]]) -> None:
    assert lasting[0]["alone_in_a_first_use"] == "ClusterError"


def test_a_lost_device_context_is_reported_with_its_rank(lasting: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(lasting):
        assert rank["asserted"].startswith(f"The CUDA context of rank {number} is gone")


def test_ranks_get_enough_device_queues_for_separate_streams(lasting: list[dict[str, Any]]) -> None:
    assert [rank["queues"] for rank in lasting] == [os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32")] * 2


def test_a_pipeline_of_gpus_over_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_accelerator", PretendAccelerator())

    with pytest.raises(StrategyError, match="needs the backend nccl, but these ranks use gloo"):
        Channels(MagicMock(spec=DelegatingGroup), torch.device("cpu"))


def test_no_communicator_is_aborted_after_its_destruction(lasting: list[dict[str, Any]]) -> None:
    assert [rank["leaving"] for rank in lasting] == ["", ""]


def after_a_message(rank: int) -> list[str]:
    """Return the parents of communicators, after two of three ranks have sent to each other."""
    join(rank, 3)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(torch.ones(1), 1 - rank)
    known = list(Communicator.everyone)
    quiet(strategy="zero3", batch_size=6).fit(1)
    return [one.parent.partition("/")[2] for one in Communicator.everyone if one.met and one not in known]


def test_a_split_works_after_messages_between_some_ranks() -> None:
    assert run_ranks(after_a_message, 3, join=False) == [["all"]] * 3


def test_a_rank_that_forms_a_group_alone_is_released() -> None:
    found = run_ranks(each, 2, [alone_in_new_group], join=False, timeout=60)

    assert found[0]["alone_in_new_group"] == "ClusterError"
