"""Test that a step that runs out of memory is repeated in another way, with the losses of a run with enough memory."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from jobs import heard, quiet
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

import nbkit
from nbkit.bridge.training_requests import Control, TrainingRequestHandler
from nbkit.errors import TrainingError
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.step_boundary import DETACHED
from nbkit.rank.train.out_of_memory import rescue, tensor_limit
from nbkit.rank.train.replace import backup, resume_fit
from nbkit.rank.train.replace.recover import recover
from nbkit.rank.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("rows_are_known")

STEPS, ROWS = 3, 16
CONFIG = GPTConfig(vocab=32, block=16, layers=2, heads=2, width=16, dropout=0.1)


def model() -> GPT:
    return GPT(CONFIG).double()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def rows() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(CONFIG.vocab, (2, CONFIG.block), generator=draw)) for _ in range(3 * ROWS)]


def made(strategy: str, **more: Any) -> Trainer:
    return quiet(
        model=model,
        loss=loss,
        **{"optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)} | more,
        data=rows(),
        batch_size=ROWS,
        strategy=strategy,
        clip_norm=1.0,
    )


def limited(num_bytes: int | None) -> None:
    os.environ.pop(tensor_limit.VARIABLE, None)
    if num_bytes is not None:
        os.environ[tensor_limit.VARIABLE] = str(num_bytes)


def losses(trainer: Trainer) -> list[float]:
    return [record["loss"] for record in trainer.history]


def undisturbed(world: Any) -> list[float]:
    trainer = made("ddp")
    trainer.fit(STEPS)
    return losses(trainer)


def squeezed(trainer: Trainer, share: float, *, here: bool) -> None:
    """Limit memory to `share` of the peak after the second step, the first with optimizer state."""
    limited(None)
    assert tensor_limit.in_force() is None  # the limit of an earlier training is gone
    limited(1 << 40)

    def tighten(_: Trainer, record: dict[str, Any]) -> None:
        limit = tensor_limit.in_force()
        if here and limit is not None and record["step"] == 2:
            limited(int(share * limit.peak))

    trainer._callbacks = (tighten,)


def rescued(world: Any, strategies: list[str], share: float) -> dict[str, Any]:
    """Train under each strategy with too little memory on the last rank."""
    found = {}
    for strategy in strategies:
        trainer = made(strategy, recovery=nbkit.Recovery(on_oom="fit"))
        events = heard(trainer, "out_of_memory")
        squeezed(trainer, share, here=world.place.rank == world.place.world_size - 1)
        trainer.fit(STEPS)
        found[strategy] = {
            "losses": losses(trainer),
            "changes": [event.changes for event in events if event.changes],
            "rank": {event.rank for event in events},
            "held": [0 < event.peak <= event.room for event in events if event.changes],
        }
    return found


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return run_ranks(undisturbed, 1)[0]


def answered(number: int, strategy: str = "") -> dict[str, Any]:
    """Answer in another thread, like a notebook, once the training is paused. Return the results."""
    told: dict[str, Any] = {}

    def ask() -> None:
        while not step_boundary.is_held():
            time.sleep(0.005)
        told["waits"] = step_boundary.progress()["waits"]
        at = step_boundary.inbox.acted
        if strategy:
            step_boundary.inbox.post(at + 1, "control", Control("a", "switch", {"strategy": strategy}))
            step_boundary.inbox.post(at + 2, "control", Control("b", "resume", {}))
        else:
            step_boundary.inbox.post(at + 1, "control", Control("a", "fit", {"number": 99}))
            step_boundary.inbox.post(at + 2, "control", Control("b", "fit", {"number": number}))

    threading.Thread(target=ask, daemon=True).start()
    return told


def asked(world: Any) -> list[dict[str, Any]]:
    """Pause in a detached cell until a row or a strategy is named. In other cells the run ends, and goes on by hand."""
    controls, found = TrainingRequestHandler(), []
    here = world.place.rank == 0
    for number, strategy in ((2, ""), (0, "zero3")):
        trainer = made("ddp", recovery=nbkit.Recovery(on_oom="ask"))
        events = heard(trainer, "out_of_memory")
        squeezed(trainer, 0.95, here=here)
        told, outer = answered(number, strategy), DETACHED.set(True)
        trainer.fit(STEPS)
        DETACHED.reset(outer)
        results = [controls.results[id]["error"] for id in "ab"]
        changes = [event.changes for event in events]
        found.append({**told, "results": results, "changes": changes, "losses": losses(trainer)})
    trainer = made("ddp", recovery=nbkit.Recovery(on_oom="ask"))
    squeezed(trainer, 0.95, here=here)
    with pytest.raises(TrainingError) as caught:
        trainer.fit(STEPS)
    taken = rescue.answer(trainer.job)
    trainer.fit(until=STEPS)
    found.append({"text": str(caught.value), "changes": [taken["changes"]], "losses": losses(trainer)})
    return found


def test_the_user_is_asked_and_the_training_waits_for_the_answer(expected: list[float]) -> None:
    for row, strategy, ended in run_ranks(asked, 2, timeout=200):
        assert row["changes"] == ["", "recompute='selective'"] and row["results"] == ["UsageError", ""]
        assert strategy["changes"] == ["", "dp=2 zero=3"] and strategy["results"] == ["", ""]
        assert row["waits"] == strategy["waits"] == "out of memory: %train fit"
        assert "%train fit 2" in ended["text"] and "recompute=True" in ended["text"]
        for one in (row, strategy, ended):
            assert one["losses"] == pytest.approx(expected, rel=1e-12), one


@pytest.mark.parametrize("strategies", [["pp"], pytest.param(["ddp", "zero1", "zero3", "tp"], marks=pytest.mark.long)])
def test_a_step_without_memory_is_repeated_in_a_way_that_fits(strategies: list[str], expected: list[float]) -> None:
    for found in run_ranks(rescued, 2, strategies, 0.8, timeout=170):
        for strategy in strategies:
            one = found[strategy]
            assert one["losses"] == pytest.approx(expected, rel=1e-12), (strategy, one)
            assert len(one["changes"]) == 1 and one["rank"] == {1} and one["held"] == [True], (strategy, one)


class Failing(torch.optim.AdamW):
    """AdamW that runs out of memory once, in the second update, after it has changed all weights."""

    fails = False

    def step(self, closure: Any = None) -> None:
        super().step()
        training = step_boundary.training()
        if Failing.fails and training is not None and training.step == 1:
            Failing.fails = False
            raise torch.OutOfMemoryError("in the update")


def slow_to_receive(seconds: float) -> None:
    """Delay the receive of a backup, so that this rank sends its own long before."""
    receive = dist.recv

    def later(*args: Any, **more: Any) -> Any:
        if more.get("tag") == backup._HEAD:
            time.sleep(seconds)
        return receive(*args, **more)

    dist.recv = later


def failing(world: Any, strategies: list[str]) -> dict[str, Any]:
    """Run out of memory in one rank's optimizer. The state comes from ranks that made the step, or from old backups."""
    resume_fit.host = cast(Any, SimpleNamespace(enter=lambda *_: False, recover=recover))
    if world.place.rank == 1:
        slow_to_receive(0.1)  # otherwise rank 0 may free its backup before it is sent
    found = {}
    for strategy in strategies:
        Failing.fails = world.place.rank == 1
        trainer = made(
            strategy,
            optimizer=lambda m: Failing(m.parameters(), lr=0.01),
            recovery=nbkit.Recovery(on_oom="fit", backup_every=1),
        )
        trainer.fit(STEPS)
        found[strategy] = losses(trainer), [record["step"] for record in trainer.history]
    return found


@pytest.mark.long
def test_a_torn_update_is_repaired_from_another_rank_or_a_backup(expected: list[float]) -> None:
    for found in run_ranks(failing, 2, ["ddp", "zero1"], timeout=100):
        for strategy, (curve, steps) in found.items():
            assert curve == pytest.approx(expected, rel=1e-12), strategy
            assert steps == list(range(1, STEPS + 1)), strategy


def refused(world: Any) -> tuple[str, bool, list[float]]:
    """Run out of memory without recovery. The error is raised, and the Trainer goes on with more memory."""
    trainer = made("ddp")
    squeezed(trainer, 0.8, here=True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(STEPS)
    limited(None)
    trainer._callbacks = ()
    trainer.fit(until=STEPS)
    return type(caught.value).__name__, trainer.arithmetic.accum == 1, losses(trainer)


def test_on_out_of_memory_raise_raises_the_error(expected: list[float]) -> None:
    for name, uncut, found in run_ranks(refused, 1, timeout=100):
        assert name == "OutOfMemoryError" and uncut and found == pytest.approx(expected, rel=1e-12)
