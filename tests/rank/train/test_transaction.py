"""A change of a running job stays on all ranks, or on none."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from jobs import flat, net, quiet
from ranks import run_ranks
from torch import nn

from nbkit.errors import NotFinite, SwitchError, TrainingError
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.train.transaction import Guard, KeptBuffers, KeptState, Transaction
from nbkit.rank.world.failure_alarm import AlarmHeard

pytestmark = pytest.mark.usefixtures("known_to_be_right")


def counting() -> nn.Module:
    model = net()
    model.register_buffer("calls", torch.zeros(()))
    return model


def stands(trainer: Trainer) -> tuple[Any, ...]:
    job = trainer.job
    weights = job.sharded_model.data.weights
    whole = flat(trainer.model).tolist() if not job.strategy.zero else sorted(weights)
    buffers = [buffer.tolist() for buffer in trainer.model.buffers()]
    return (
        str(trainer.strategy),
        trainer.step,
        len(job.switches),
        whole,
        buffers,
        job.feed.position(),
        random.getstate(),
    )


class Fails(KeptState):
    """It cannot bring rank 1 back."""

    def restore(self, job: Any, error: BaseException | None = None) -> None:
        super().restore(job, error)
        if job.rank == 1:
            raise MemoryError("planted")


def changed(world: Any) -> dict[str, Any]:
    trainer = quiet(model=counting)
    trainer.fit(2)
    job, found = trainer.job, {}

    before = stands(trainer)
    with Transaction(job, KeptState(job, job.state)):
        job.switcher._switch(job.parsed("zero3"), keep=True)
        random.random()
        trainer._update()
        found["inside"] = str(trainer.strategy), trainer.step
    found["left"] = stands(trainer) == before

    with pytest.raises(KeyboardInterrupt), Transaction(job, KeptState(job, job.state)):
        job.switcher._switch(job.parsed("zero1"), keep=True)
        raise KeyboardInterrupt
    found["interrupted"] = stands(trainer) == before

    # Rank 0 waits in a collective for rank 1, which fails.
    for kept in (lambda: KeptState(job, job.state), lambda: KeptBuffers(job)):
        with Transaction(job, kept()) as change:
            job.switcher._switch(job.parsed("zero3"), keep=True)
            change.guard(f"one fails {len(found)}")
            trainer.model.calls += 1
            job.feed.go_to(job.feed.position() | {"offset": 0})
            random.random()
            try:
                if world.place.rank == 1:
                    raise ValueError("planted")
                dist.all_reduce(torch.ones(()))
                change.agree()
            except Exception as error:
                found.setdefault("concerns", []).append(change.concerns(error))
                found.setdefault("failures", []).append(change.roll_back(error).words)
        found.setdefault("rolled back", []).append(stands(trainer) == before and not job.integrity.broken_off)

    with Transaction(job, Fails(job, job.state)) as change:
        change.guard("no way back")
        with pytest.raises(SwitchError) as refused:
            change.roll_back(ValueError("on both"))
        found["no way back"] = str(refused.value)
    with Transaction(job, KeptState(job, job.state)) as change:
        change.guard("nothing is kept")
        change.savepoint = None
        with pytest.raises(TrainingError, match="no earlier state to go back to"):
            change.roll_back(ValueError("on both"))

    with Transaction(job, KeptState(job, job.state)) as change:
        job.switcher._switch(job.parsed("zero3"), keep=True)
        change.commit()
    found["stays"] = str(trainer.strategy)
    trainer.fit(2)
    found["losses"] = [record["loss"] for record in trainer.history]
    return found


def never(world: Any) -> list[float]:
    trainer = quiet(model=counting)
    trainer.fit(4)
    return [record["loss"] for record in trainer.history]


def test_what_is_left_without_a_commit_or_fails_on_one_rank_comes_back_on_all() -> None:
    expected = run_ranks(never, 2)[0]
    for found in run_ranks(changed, 2, timeout=100):
        assert found["inside"] == ("dp=2 zero=3", 3)
        assert found["left"] and found["interrupted"]
        assert found["concerns"] == [True, True] and found["rolled back"] == [True, True]
        assert found["failures"] == ["rank 1: ValueError: planted"] * 2
        assert "going back to dp=2" in found["no way back"] and "rank 1: MemoryError: planted" in found["no way back"]
        assert found["stays"] == "dp=2 zero=3"
        assert found["losses"] == pytest.approx(expected, rel=1e-5)


def gone() -> bool:
    raise dist.DistNetworkError("the store")


def test_all_ranks_are_concerned_by_a_failure_of_the_step_that_they_can_hear_of() -> None:
    own, woken = ValueError("planted"), AlarmHeard("another rank has failed")
    not_finite = NotFinite("The loss is not finite.", step=1, rank=0)

    def concerned(error: BaseException, *, dirty: str = "", rung: Any = lambda: True, ended: bool = False) -> bool:
        guard = Guard.__new__(Guard)
        guard.alarm, guard._ended = cast(Any, SimpleNamespace(world=SimpleNamespace(dirty=dirty), rung=rung)), ended
        return guard.concerns(error)

    assert concerned(own) and concerned(woken)
    assert concerned(own, rung=lambda: False) and not concerned(woken, rung=lambda: False)
    # The rank that keeps the store has died.
    assert not concerned(woken, rung=gone)
    for error in (own, woken):
        assert not concerned(error, dirty="rank 1 has died") and not concerned(error, ended=True)
    assert not concerned(not_finite) and not concerned(KeyboardInterrupt())
