"""After an error, an interrupt or an aborted reduction, the next training is right, or it says why not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import flat, mean_loss, one_process, points, quiet
from ranks import next_generation, run_ranks
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.data_parallel import buckets, ddp
from nbkit.rank.train.control import step_boundary
from nbkit.rank.world import sockets


def interrupt_at(step: int) -> Any:
    """Return a loss that is interrupted once, in the `step`-th step of a training. Trial calls do not count."""
    once = iter([True])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        training = step_boundary.training()
        if training is not None and training.step == step - 1 and next(once, False):
            raise KeyboardInterrupt
        return mean_loss(output, target)

    return loss


def called_back(world: Any) -> list[int]:
    called: list[int] = []
    trainer = quiet(loss=interrupt_at(4), callbacks=[lambda trainer, record: called.append(record["step"])])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(6)
    return [*called, len(trainer.history)]


def test_after_an_error_no_callback_runs_on_a_rank_that_may_be_alone() -> None:
    """A callback that communicates would wait for ranks that are elsewhere, and hide the error."""
    assert run_ranks(called_back, 2) == [[1, 2, 3, 3]] * 2


class Unreduced:
    """A torch.distributed whose all-reduce never brings the sum, as the host sees it when nccl aborts one."""

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return dist.all_reduce(tensor.clone(), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def poisoned(world: Any, on: tuple[int, ...], read_late: bool) -> dict[str, Any]:
    trainer = quiet(loss=interrupt_at(4), data=points(40))
    trainer.fit(2)
    if world.place.rank in on:
        buckets.dist = Unreduced()  # type: ignore[assignment]
    ledger = trainer.job.ledger
    if read_late:
        # On a GPU the host is a step ahead of what it has read.
        ledger.check = lambda pending: pending.reduction.read()
    found: dict[str, Any] = {}
    try:
        trainer.fit(2)
    except KeyboardInterrupt:
        pass
    except TrainingError as error:
        found["error"] = str(error)
        found["step"] = trainer.step
        return found
    buckets.dist = dist
    ledger.__dict__.pop("check", None)
    try:
        trainer.fit(3)
    except TrainingError as error:
        found["error"] = str(error)
    return found | {"weights": flat(trainer.model), "losses": [r["loss"] for r in trainer.history]}


def test_weights_that_took_an_unfinished_reduction_are_never_the_source() -> None:
    losses, _, model = one_process(points(40), steps=6)
    for found in run_ranks(poisoned, 2, (0,), True):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert (found["weights"] - flat(model)).abs().max() < 1e-5


def test_when_every_rank_took_it_no_weights_are_whole_and_it_says_so() -> None:
    for found in run_ranks(poisoned, 2, (0, 1), True):
        assert "no rank has whole weights" in found["error"]


def test_an_unfinished_reduction_that_is_seen_in_time_spares_the_weights() -> None:
    for found in run_ranks(poisoned, 2, (0, 1), False):
        assert (
            "reduction of the gradients of step 3 was interrupted" in found["error"]
            and "not been touched" in found["error"]
        )
        assert found["step"] == 2


def canaries(world: Any) -> Any:
    trainer = quiet(batch_size=9)
    trainer.fit(1)
    replicas = trainer.job.sharded_model.data
    replicas.reset()
    replicas.start()
    canary = replicas.finish()
    return canary is not None and float(canary)


def test_the_canary_of_a_finished_reduction_is_the_same_for_any_number_of_ranks() -> None:
    assert run_ranks(canaries, 1) == [False]
    assert run_ranks(canaries, 3) == [ddp.ALIVE] * 3


def interrupted_at_the_start(world: Any) -> list[Any]:
    class Interrupts:
        def write(self, event: dict[str, Any]) -> None:
            if event["kind"] == "run_started":
                raise KeyboardInterrupt

    trainer = quiet()
    trainer.job.ledger.bus.add(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(2)
    trainer.job.ledger.bus.sinks.pop()
    return [step_boundary.training() is None, len(trainer.fit(2))]


def test_an_interrupt_while_a_training_starts_does_not_stand_in_the_way_of_the_next() -> None:
    assert run_ranks(interrupted_at_the_start, 2) == [[True, 2]] * 2


def apart_in_the_first_step(world: Any) -> list[float]:
    trainer = quiet(data=points(40))
    trainer.fit(1)
    if world.place.rank == 1:
        # Rank 1 was interrupted before it followed rank 0's order of gradients.
        trainer.job.training_step.begin_again()
        trainer.job.integrity.broken_off = True
    trainer.fit(3)
    return [r["loss"] for r in trainer.history]


def test_ranks_interrupted_around_the_end_of_the_first_step_send_the_same_buckets_again() -> None:
    losses, _, _ = one_process(points(40), steps=4)
    for found in run_ranks(apart_in_the_first_step, 2, timeout=30):
        assert found == pytest.approx(losses, rel=1e-5)


def in_the_last_backward(world: Any) -> list[float]:
    """Break off on the first stage in its last backward pass of step 3, long after the last stage is through."""
    trainer = quiet(
        strategy="pp microbatches=4", data=points(40), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    trainer.fit(2)
    if world.place.rank == 0:
        passes: list[int] = []

        def hook(grad: Tensor) -> None:
            passes.append(1)
            if len(passes) == 4:
                time.sleep(0.5)  # the other rank would have updated its weights by now
                for group in delegating_group.live():  # what the watchdog does, so that the other rank waits no longer
                    sockets.shut(group.sockets)
                raise KeyboardInterrupt

        handle = next(trainer.model.parameters()).register_hook(hook)
    with pytest.raises(KeyboardInterrupt if world.place.rank == 0 else RuntimeError):
        trainer.fit(1)
    if world.place.rank == 0:
        handle.remove()
    next_generation(world)
    trainer.fit(3)
    return [record["loss"] for record in trainer.history]


def test_a_stage_that_is_through_waits_with_its_weights_for_one_that_is_not() -> None:
    """Its weights are nowhere else: a step that one stage has made and another has not could not be taken back."""
    losses, _, _ = one_process(points(40), steps=5)
    for found in run_ranks(in_the_last_backward, 2, generations=2):
        assert found == pytest.approx(losses, rel=1e-5)
