"""Test that a switch works in place if memory does not hold both models, and failures keep the old strategy."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from nbkit.errors import SwitchError, TrainingError
from nbkit.rank.parallel.data_parallel.ddp import Replicas
from nbkit.rank.parallel.reshard import redistribute as moving
from nbkit.rank.parallel.reshard.redistribute import TargetStorage, hollow
from nbkit.rank.parallel.zero3.zero3 import ShardedParameters
from nbkit.rank.telemetry.health import storage_bytes
from nbkit.rank.train import builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.estimate.free_memory import side_bytes
from nbkit.rank.train.job import Job
from nbkit.rank.train.switch import consensus, exchange_cache, in_place, prefetch
from nbkit.rank.train.switch.consensus import gather
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.train.transaction import Ballot
from nbkit.strategy import Strategy
from tests.rank.train.switch.test_switch import losses, trainer

pytestmark = pytest.mark.usefixtures("rows_are_known")

THROUGH = ["zero3", "tp", "ddp"]
ALSO_THROUGH = ["zero3", "tp", "pp microbatches=4", "zero2", "ddp"]
STEPS = 12


def never_switched(world: Any) -> list[float]:
    job = trainer()
    job.fit(STEPS)
    return losses(job)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return run_ranks(never_switched, 1)[0]


def bytes_of(job: Trainer, rank: int) -> int:
    return side_bytes(job.job.builder, job.job.bytes_per_element(), job.strategy, rank)


def full(patch: pytest.MonkeyPatch) -> None:
    """Limit memory to one byte, so that two sharded models never fit. Rounds are small and many."""
    patch.setenv("NBKIT_MEMORY_LIMIT", "1")
    patch.setattr(in_place, "InPlace", partial(moving.InPlace, limit=4096))


def through_all(world: Any, through: list[str]) -> dict[str, Any]:
    job, said = trainer(), []
    job.fit(2)
    with pytest.MonkeyPatch.context() as patch:
        for number, text in enumerate(through):
            patch.setenv("NBKIT_MEMORY_LIMIT", "1" if world.place.rank == 1 else str(1 << 50))
            event = job.switch(text)
            said.append((event.in_place, event.identical, held(job.job), bytes_of(job, world.place.rank)))
            job.fit(2 if number < len(through) - 1 else 1)
        kept = weights_of(job)
        patch.setenv("NBKIT_MEMORY_LIMIT", str(1 << 50))
        beside = job.switch("zero3").in_place
    job.fit(1)
    return {"said": said, "losses": losses(job), "beside": beside, "kept": kept, "now": weights_of(job)}


def cuts_of_rounds(world: Any) -> tuple[bool, list[int]]:
    """Return whether a switch works in place, and the limits with which it cuts rounds of the prepared exchange."""
    job, limits = trainer(), []
    job.fit(1)
    job.job.builder.finder.sync([Strategy.parse("zero3", 2)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "round_bytes", lambda *_, **__: 2 * moving.ROUND_BYTES)
        prefetch.make_ready(job.job, "zero3")

    def cut(*args: Any, limit: int) -> Any:
        limits.append(limit)
        return moving.Exchange(*args, limit=limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_cache, "Exchange", cut)
        patch.setenv("NBKIT_MEMORY_LIMIT", "1")
        event = job.switch("zero3")
    return event.in_place, limits


def test_a_switch_in_place_does_not_cut_the_rounds_of_a_prepared_exchange_again() -> None:
    assert run_ranks(cuts_of_rounds, 2) == [(True, [])] * 2


def weights_of(job: Trainer) -> float:
    return sum(float(tensor.double().abs().sum()) for tensor in job.full_state_dict().values())


def held(job: Job) -> int:
    """Return the bytes of weights, optimizer state and gradient buffers, counted from all live tensors."""
    gc.collect()
    sharded_model, inner = job.sharded_model, job.optimizer.inner
    seen: set[int] = set()
    own = storage_bytes([tensor for tensor, _ in job_state.state(sharded_model, inner).values()], seen)
    before = storage_bytes([thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)], set(seen))
    sharded_model.data.let_go()
    gc.collect()
    after = storage_bytes([thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)], set(seen))
    sharded_model.data.begin_again()
    return own + before - after


@pytest.mark.long
@pytest.mark.parametrize("through", [THROUGH, pytest.param(ALSO_THROUGH, marks=pytest.mark.long)])
def test_in_place_switches_without_memory_on_one_rank_keep_the_losses(
    expected: list[float], through: list[str]
) -> None:
    for rank in run_ranks(through_all, 2, through, timeout=120):
        assert [(place, same) for place, same, *_ in rank["said"]] == [(True, True)] * len(through)
        assert max(abs(a - b) for a, b in zip(rank["losses"], expected, strict=False)) <= 1e-12
        assert len(rank["losses"]) == 2 * len(through) + 2 and rank["beside"] is False
        for number, (_, _, counted, said) in enumerate(rank["said"]):
            # The rest is padding of flat parts, canaries and step counters.
            assert said * 0.98 <= counted <= said * 1.05, through[number]


def built_hollow(world: Any) -> dict[str, tuple[int, int]]:
    """Return the bytes of a hollow model and of an ordinary model, with optimizer state and gradients."""
    job, found = trainer(), {}
    job.fit(1)
    now, inner = job.job, job.job.optimizer.inner
    ranks = Ballot(now.strategy, 2, now.device)
    memory = gather(now.sharded_model, inner, now.builder, now.cost_model, now.strategy, ranks).memory
    for text in THROUGH:
        strategy, sizes = Strategy.parse(text, 2), []
        connections = job.job.builder.connect(strategy, alike=True)
        for how in (hollow(), nullcontext()):
            gc.collect()
            before = alive()
            with how:
                built = now.builder.build(now.builder.plan(strategy), connections, like=inner)
                job_state.allocate(*built, memory.kinds, memory.numbers)
            sizes.append(alive() - before)
            del built
        found[text] = sizes[0], sizes[1]
    return found


def alive() -> int:
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return storage_bytes([tensor for tensor in tensors if not tensor.is_meta], set())


@pytest.mark.long
def test_a_hollow_model_takes_no_memory_under_any_data_axis() -> None:
    for found in run_ranks(built_hollow, 2):
        assert {text: sizes for text, sizes in found.items() if sizes[0] * 50 > sizes[1]} == {}


def fails_at_each_stage(world: Any) -> dict[str, Any]:
    job = trainer(strategy="ddp")
    job.fit(1)
    told = []
    for stage in STAGES:
        with pytest.MonkeyPatch.context() as patch:
            full(patch)
            if world.place.rank == 1:
                STAGES[stage](patch)
            with pytest.raises(SwitchError) as error:
                job.switch("zero3")
            told.append((stage, str(error.value), str(job.strategy), job.job.integrity.half_way))
        job.fit(1)
    with pytest.MonkeyPatch.context() as patch:
        full(patch)
        with pytest.raises(SwitchError, match="keeps dp=2 beside it"):
            job.try_out("zero3", steps=1)
        identical = job.switch("zero3").identical
        # This time the switch starts from flat shards.
        if world.place.rank == 0:
            runs_out(patch)
        with pytest.raises(SwitchError):
            job.switch("tp")
    job.fit(2)
    return {"told": told, "identical": identical, "losses": losses(job), "now": str(job.strategy)}


def planted(*_: Any, **__: Any) -> Any:
    raise MemoryError("planted")


def once(patch: pytest.MonkeyPatch, owner: Any, name: str, *, calls: int = 0) -> None:
    """Let `owner.name` fail once, after `calls` successful calls."""
    real, left = getattr(owner, name), [calls]

    def failing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return planted() if left[0] == -1 else real(*args, **kwargs)

    patch.setattr(owner, name, failing)


def runs_out(patch: pytest.MonkeyPatch) -> None:
    once(patch, TargetStorage, "take", calls=70)


STAGES = {
    "asking": lambda patch: patch.setattr(consensus, "left", planted),
    "building": lambda patch: patch.setattr(builder, "parallelize", planted),
    "planning": lambda patch: patch.setattr(in_place, "InPlace", planted),
    "the first tensor": lambda patch: once(patch, TargetStorage, "take"),
    "the seventieth tensor": runs_out,
    "refresh": lambda patch: once(patch, ShardedParameters, "refresh"),
    "gradients": lambda patch: once(patch, ShardedParameters, "begin_again"),
    "adopt": lambda patch: once(patch, Job, "adopt"),
    "after adopt": lambda patch: once(patch, Job, "_take"),
}


@pytest.mark.long
def test_an_in_place_switch_that_fails_at_any_stage_keeps_the_old_strategy(expected: list[float]) -> None:
    for number, rank in enumerate(run_ranks(fails_at_each_stage, 2, timeout=150)):
        assert [strategy for _, _, strategy, _ in rank["told"]] == ["dp=2"] * len(STAGES)
        assert not any(half for *_, half in rank["told"])
        assert all("planted" in text or number == 0 for _, text, _, _ in rank["told"]), rank["told"]
        assert rank["identical"] and rank["now"] == "dp=2 zero=3"
        assert max(abs(a - b) for a, b in zip(rank["losses"], expected, strict=False)) <= 1e-12


def damaged(world: Any) -> list[str]:
    """Return the errors if one rank holds other values than were sent, so it cannot give the old ones back."""
    job = trainer(strategy="zero3")
    job.fit(2)
    told = []
    with pytest.MonkeyPatch.context() as patch:
        full(patch)
        if world.place.rank == 1:
            patch.setattr(Replicas, "refresh", lambda data: data.weights["tokens.weight"][0].add_(1e-3))
        for act in (lambda: job.switch("ddp"), lambda: job.fit(1)):
            with pytest.raises(TrainingError) as error:
                act()
            told.append(str(error.value))
    return told


@pytest.mark.long
def test_damaged_state_is_not_trained_on() -> None:
    for switched, trained in run_ranks(damaged, 2):
        assert (
            "restored state differs from the state before" in switched
            and "differs from the state under dp=2 zero=3" in switched
        )
        assert "no rank has whole weights" in trained


def torn(world: Any, folder: str) -> dict[str, Any]:
    job = trainer(strategy="ddp")
    job.fit(2)
    job.save(Path(folder) / "saved")
    old = job.model.tokens.weight
    with pytest.MonkeyPatch.context() as patch:
        full(patch)
        once(patch, moving, "carry_out", calls=2)
        with pytest.raises(MemoryError):
            job.switch("zero3")
    with pytest.raises(TrainingError, match="no rank has whole weights"):
        job.fit(1)
    looked = float(old.detach().sum())  # freed tensors can be read without harm
    job.load(Path(folder) / "saved")
    job.fit(2)
    return {"losses": losses(job), "looked": looked}


@pytest.mark.long
def test_an_incomplete_move_is_an_error_and_a_checkpoint_restores_the_job(
    expected: list[float], tmp_path: Path
) -> None:
    for rank in run_ranks(torn, 2, str(tmp_path)):
        assert max(abs(a - b) for a, b in zip(rank["losses"], expected, strict=False)) <= 1e-12
        assert len(rank["losses"]) == 4
