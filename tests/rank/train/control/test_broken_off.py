"""Test that after an error, an interrupt or an aborted reduction, the next training is right, or says why not."""

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
    """Return a loss that is interrupted once, in step `step` of a training. Trial calls do not count."""
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


def test_no_callback_runs_on_a_single_rank_after_an_error() -> None:
    """Check it, because a callback that communicates would wait for the other ranks, and hide the error."""
    assert run_ranks(called_back, 2) == [[1, 2, 3, 3]] * 2


class Unreduced:
    """A torch.distributed whose all-reduce never gives the sum, as after an abort of nccl."""

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
        # On a GPU, the host is a step ahead of the numbers that it has read.
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


def test_weights_with_an_unfinished_reduction_are_not_used_to_recover() -> None:
    losses, _, model = one_process(points(40), steps=6)
    for found in run_ranks(poisoned, 2, (0,), True):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert (found["weights"] - flat(model)).abs().max() < 1e-5


def test_an_unfinished_reduction_on_every_rank_is_an_error() -> None:
    for found in run_ranks(poisoned, 2, (0, 1), True):
        assert "no rank has whole weights" in found["error"]


def test_an_unfinished_reduction_seen_in_time_does_not_change_weights() -> None:
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


def test_the_canary_of_a_finished_reduction_does_not_depend_on_ranks() -> None:
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


def test_an_interrupt_at_the_start_does_not_prevent_the_next_training() -> None:
    assert run_ranks(interrupted_at_the_start, 2) == [[True, 2]] * 2


def apart_in_the_first_step(world: Any) -> list[float]:
    trainer = quiet(data=points(40))
    trainer.fit(1)
    if world.place.rank == 1:
        # Rank 1 was interrupted before it took rank 0's order of gradients.
        trainer.job.training_step.begin_again()
        trainer.job.integrity.broken_off = True
    trainer.fit(3)
    return [r["loss"] for r in trainer.history]


def test_ranks_interrupted_after_the_first_step_use_the_same_buckets_again() -> None:
    losses, _, _ = one_process(points(40), steps=4)
    for found in run_ranks(apart_in_the_first_step, 2, timeout=30):
        assert found == pytest.approx(losses, rel=1e-5)


def in_the_last_backward(world: Any) -> list[float]:
    """Interrupt the first stage in its last backward pass of step 3, long after the last stage is done."""
    trainer = quiet(
        strategy="pp microbatches=4", data=points(40), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    trainer.fit(2)
    if world.place.rank == 0:
        passes: list[int] = []

        def hook(grad: Tensor) -> None:
            passes.append(1)
            if len(passes) == 4:
                time.sleep(0.5)  # without the wait, the other rank would have updated its weights by now
                for group in delegating_group.live():  # as the watchdog does, so that the other rank stops waiting
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


def test_a_stage_waits_for_the_gradients_of_all_stages_before_its_update() -> None:
    """Check it, because only this stage has its weights: a step made by some stages could not be undone."""
    losses, _, _ = one_process(points(40), steps=5)
    for found in run_ranks(in_the_last_backward, 2, generations=2):
        assert found == pytest.approx(losses, rel=1e-5)
