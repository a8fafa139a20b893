"""All ranks leave a training after the same step, or each says which one has left it alone."""

from __future__ import annotations

from typing import Any

import torch
from jobs import mean_loss, net, points, quiet
from ranks import run_ranks
from torch.utils.data import DataLoader

from nbkit.errors import TrainingError
from nbkit.rank.train.job import Job, prepare


def loop(job: Job, loader: Any, *, leaves: int = 100, agreed: bool = False) -> str:
    """What a loop raises, of which this rank wants to leave after so many steps."""
    try:
        for number, batch in enumerate(job.batches(loader), 1):
            job.backward(batch)
            job.optimizer.step()
            job.optimizer.zero_grad()
            wants = number == leaves
            if job.stop_if(wants) if agreed else wants:
                break
    except TrainingError as error:
        return f"{error.what} {error.numbers}"
    return f"left after step {job.step}"


def left_alone(world: Any, how: str) -> str:
    rank, model = world.place.rank, net()
    job = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_loss, log_dir=None)
    data = points(32 + 16 * rank if how == "unequal" else 64)
    leaves = 3 if how != "unequal" and rank == 0 else 100
    return loop(job, DataLoader(data, batch_size=8), leaves=leaves, agreed=how == "agreed")


def test_a_rank_whose_loader_ends_first_is_named_on_all_ranks() -> None:
    first, second = run_ranks(left_alone, 2, "unequal")
    assert first == second
    assert "rank 0 left after step 4 at line" in first and "rank 1 makes step 5 at line" in first


def test_a_rank_that_breaks_its_loop_is_named_where_the_others_go_on() -> None:
    first, second = run_ranks(left_alone, 2, "break")
    assert first == "left after step 3"
    assert "rank 0 left after step 3 at line" in second and "rank 1 makes step 4 at line" in second


def test_a_loop_that_one_rank_wants_to_leave_is_left_by_all() -> None:
    assert run_ranks(left_alone, 2, "agreed") == ["left after step 3"] * 2


def ends_of_fit(world: Any) -> list[Any]:
    rank, refused = world.place.rank, list[str]()
    trainer = quiet(callbacks=[lambda trainer, record: trainer.stop_if(rank == 1 and record["step"] == 6)])
    made = [len(trainer.fit(3))]
    for asked in ({"steps": 3 + 2 * rank}, {"until": 3 + 2 * rank}):  # the second one has nothing left to do on rank 0
        try:
            trainer.fit(**asked)
        except TrainingError as error:
            refused.append(error.numbers)
    made += [len(trainer.fit(100)), len(trainer.fit(2))]
    return [refused, made, trainer.step]


def test_a_fit_of_other_steps_is_refused_and_one_that_a_callback_ends_ends_on_all() -> None:
    first, second = run_ranks(ends_of_fit, 2)
    assert first == second
    refused, made, step = first
    assert refused[0] == "fit ends after step 6 on one rank, and after step 8 on another"
    assert refused[1] == "fit ends after step 3 on one rank, and after step 5 on another"
    assert (made, step) == ([3, 3, 2], 8)
