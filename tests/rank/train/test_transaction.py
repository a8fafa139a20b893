"""A change of a running job stays on all ranks, or on none."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import flat, quiet
from ranks import run_ranks

from nbkit.rank.train.trainer import Trainer
from nbkit.rank.train.transaction import KeptBuffers, KeptState, Transaction

pytestmark = pytest.mark.usefixtures("known_to_be_right")


def stands(trainer: Trainer) -> tuple[Any, ...]:
    job = trainer.job
    weights = job.sharded_model.data.weights
    whole = flat(trainer.model).tolist() if not job.strategy.zero else sorted(weights)
    return str(trainer.strategy), trainer.step, len(job.switches), whole, random.getstate()


def changed(world: Any) -> dict[str, Any]:
    trainer = quiet()
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
            change.guard(f"one fails {len(found)}")
            try:
                if world.place.rank == 1:
                    raise ValueError("planted")
                dist.all_reduce(torch.ones(()))
                change.agree()
            except Exception as error:
                found.setdefault("concerns", []).append(change.concerns(error))
                found.setdefault("failures", []).append(change.roll_back(error).words)
        found.setdefault("rolled back", []).append(stands(trainer) == before and not job.integrity.broken_off)

    with Transaction(job, KeptState(job, job.state)) as change:
        job.switcher._switch(job.parsed("zero3"), keep=True)
        change.commit()
    found["stays"] = str(trainer.strategy)
    trainer.fit(2)
    found["losses"] = [record["loss"] for record in trainer.history]
    return found


def never(world: Any) -> list[float]:
    trainer = quiet()
    trainer.fit(4)
    return [record["loss"] for record in trainer.history]


def test_what_is_left_without_a_commit_or_fails_on_one_rank_comes_back_on_all() -> None:
    expected = run_ranks(never, 2)[0]
    for found in run_ranks(changed, 2, timeout=100):
        assert found["inside"] == ("dp=2 zero=3", 3)
        assert found["left"] and found["interrupted"]
        assert found["concerns"] == [True, True] and found["rolled back"] == [True, True]
        assert found["failures"] == ["rank 1: ValueError: planted"] * 2
        assert found["stays"] == "dp=2 zero=3"
        assert found["losses"] == pytest.approx(expected, rel=1e-5)
