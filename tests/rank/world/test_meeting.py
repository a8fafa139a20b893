"""All ranks do the same and leave a training after the same step, or each says which rank does something else."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import mean_loss, net, points, quiet
from ranks import next_generation, run_ranks
from torch.utils.data import DataLoader

from nbkit.errors import TrainingError
from nbkit.rank.train.job import Job, prepare
from nbkit.rank.world import meeting


def loop(job: Job, loader: Any, *, leaves: int = 100, agreed: bool = False) -> str:
    """Run a loop that this rank wants to leave after so many steps. Return its error, or where it left."""
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


def told(act: Callable[[], Any]) -> str:
    try:
        act()
    except (TrainingError, RuntimeError) as error:
        return str(error)
    return "done"


def apart(world: Any, folder: Path) -> list[Any]:
    """Return what each rank is told at different places, and at the end whether they work together again."""
    rank, found = world.place.rank, list[Any]()
    trainer = quiet()
    trainer.fit(2)
    acts = {
        "evaluate": lambda: trainer.evaluate(points(8)),
        "full_state_dict": trainer.full_state_dict,
        "switch": lambda: trainer.switch("zero1"),
        "save": lambda: trainer.save(folder),
        "fit": lambda: trainer.fit(1),
    }
    names = list(acts)
    for first, second in pairwise(names):
        found.append((first, second, told(acts[second if rank else first])))
    return [*found, len(trainer.fit(2))]


def test_ranks_that_come_for_different_things_are_told_both_and_can_go_on(tmp_path: Path) -> None:
    first, second = run_ranks(apart, 2, tmp_path / "saved")
    assert first == second
    *pairs, made = first
    assert len(pairs) == 4 and made == 2
    for one, other, said in pairs:
        assert "made different calls" in said, said
        assert f"rank 0: {one} at line" in said and f"rank 1: {other} at line" in said, said


OWN = ("own", "receives", "sends")


def alone(world: Any, how: str) -> list[str]:
    """Return what each rank is told where rank 0 alone comes to a place of all."""
    rank = world.place.rank

    def callback(trainer: Any, record: Any) -> None:
        if how == "callback" and rank == 0 and record["step"] == 3:
            trainer.evaluate(points(8))

    trainer = quiet(callbacks=[callback])
    meeting.begin_cell("1", (0, 1))

    def cell() -> None:
        if how == "callback":
            trainer.fit(6)
        elif rank == 0:
            trainer.fit(5)
        elif how == "barrier":
            dist.barrier()

    def left_waiting() -> None:
        # Rank 1 waits in an operation of the user's own, because rank 0 has left the loop.
        for batch in trainer.job.batches([trainer.loop.collate(points(8))] * 4):
            trainer.job.backward(batch)
            trainer.job.optimizer.step()
            trainer.job.optimizer.zero_grad()
            if rank == 0:
                break
            waits = {
                "own": lambda: dist.all_reduce(torch.ones(1)),
                "receives": lambda: dist.recv(torch.ones(1), 0),
                "sends": lambda: dist.send(torch.ones(1 << 24), 0),  # so large that it is not over at once
            }
            waits[how]()

    said = [told(left_waiting if how in OWN else cell)]
    meeting.end_cell(finished=said == ["done"])
    next_generation(world)
    return [*said, f"{len(trainer.fit(1))} step"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "texts"),
    {
        "callback": ["rank 0: evaluate at line", "rank 1 makes step 4"],
        "barrier": ["rank 0: fit at line", "rank 1 waits in barrier at line"],
        "cell": ["rank 0: fit at line", "rank 1 has ended this cell"],
        "own": ["rank 1 waits in all_reduce at line", "rank 0 has ended this cell"],
        "receives": ["rank 1 waits in recv at line", "rank 0 has ended this cell"],
        "sends": ["rank 1 waits in send at line", "rank 0 has ended this cell"],
    }.items(),
)
def test_a_rank_that_waits_alone_is_told_and_so_is_the_one_that_waits_for_it(how: str, texts: list[str]) -> None:
    ranks = run_ranks(alone, 2, how, generations=2)
    for rank, (said, again) in enumerate(ranks):
        if (how == "cell" and rank == 1) or (how in OWN and rank == 0):
            assert said == "done"
        else:
            assert all(text in said for text in texts), said
        assert again == "1 step"


def interrupted(world: Any) -> list[str]:
    """Interrupt rank 0 before rank 1 has come."""
    found = []
    trainer = quiet()
    if world.place.rank == 0:
        threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            trainer.evaluate(points(8))
        world._store.set("interrupted", "")
    else:
        world._store.wait(["interrupted"])
    found.append(told(lambda: trainer.fit(1)))
    return [*found, told(lambda: trainer.evaluate(points(8)))]


def test_a_rank_that_is_interrupted_where_it_waits_meets_the_others_afterwards() -> None:
    assert run_ranks(interrupted, 2) == [["done", "done"]] * 2


def unwatched(world: Any) -> str:
    """Meet where rank 2 does not look by itself: the end of its connections is the first that it hears."""
    if world.place.rank == 2:
        meeting._LOOK_SECONDS = 100.0
    meeting.begin_cell("1", (0, 1, 2))
    return told(dist.barrier if world.place.rank else lambda: meeting.meet("save"))


def test_a_rank_whose_connections_end_before_it_is_told_says_why_they_do() -> None:
    first, *others = run_ranks(unwatched, 3)
    assert "rank 0: save at line" in first and "waits in barrier" in first and others == [first] * 2


def late(world: Any) -> list[str]:
    """Delay rank 1 in loading an earlier step. Then rank 0 is interrupted where rank 2 waits, and comes later."""
    rank, store, step = world.place.rank, world._store, [10]
    meeting._LOOK_SECONDS, meeting._SURE_SECONDS = 0.1, 0.4
    pair = dist.new_group([0, 1])
    meeting.begin_run(1, lambda: step[0])
    meeting.meet("load")
    time.sleep(rank % 2 * 1.0)
    step[0] = 2
    found = [told(lambda: meeting.meet("evaluate"))]

    def interrupt() -> None:
        meeting._store(world, store.clone()).wait([f"at/{meeting._here.number}"])
        signal.raise_signal(signal.SIGINT)

    if rank == 0:
        threading.Timer(0.2, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            meeting.meet("save")
        store.set("interrupted", "")
        time.sleep(1.5)
    elif rank == 2:
        store.wait([f"{world.key}/meet/at/{meeting._here.number + 1}"])
    else:
        store.wait(["interrupted"])
    if rank < 2:
        found.append(told(lambda: dist.barrier(pair)))
    return [*found, told(lambda: meeting.meet("save"))]


def test_a_rank_that_can_still_come_is_waited_for() -> None:
    assert run_ranks(late, 3) == [["done"] * 3, ["done"] * 3, ["done"] * 2]


def limited(world: Any) -> str:
    """Let rank 1 wait for rank 0 as long as it has said. Then it comes."""
    meeting._LOOK_SECONDS, meeting._SURE_SECONDS = 0.1, 0.2
    meeting.begin_cell("1", (0, 1))
    if world.place.rank:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=1.0))
    return told(lambda: meeting.meet("save"))


def test_a_wait_with_a_limit_of_its_own_is_not_broken_off() -> None:
    assert run_ranks(limited, 2) == ["done"] * 2
