"""Test in-place switches that are interrupted or find no way back: ranks stay equal, incomplete state is not used."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from ranks import run_ranks

from nbkit.bridge.training_requests import Control, TrainingRequestHandler
from nbkit.errors import TrainingError
from nbkit.rank.parallel.data_parallel.ddp import Replicas
from nbkit.rank.parallel.reshard.redistribute import SourceStorage
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.switch import switch as switching
from nbkit.rank.train.switch.in_place import MoveInPlace
from nbkit.rank.train.trainer import Trainer
from tests.rank.train.switch.test_switch import losses, trainer
from tests.rank.train.switch.test_switch_full import STEPS, full, never_switched, once, planted, runs_out, weights_of

pytestmark = pytest.mark.usefixtures("rows_are_known")


@pytest.fixture(scope="module")
def expected() -> list[float]:
    made = run_ranks(never_switched, 1)[0]
    assert len(made) == STEPS
    return list(made)


def interrupted(world: Any) -> dict[str, Any]:
    """Interrupt a switch without memory for gradients, and one during the move of the state."""
    job, found = trainer(strategy="ddp"), {}
    job.fit(2)
    with pytest.MonkeyPatch.context() as patch:
        full(patch)
        with pytest.MonkeyPatch.context() as before:
            before.setattr(switching, "prepare_in_place", strikes(switching.prepare_in_place))
            with pytest.raises(KeyboardInterrupt):
                job.switch("zero3")
        job.fit(2)
        # Rank 0 is interrupted during the switch, and completes it. Rank 1 is not interrupted.
        if world.place.rank == 0:
            patch.setattr(MoveInPlace, "make", strikes(MoveInPlace.make))
            with pytest.raises(KeyboardInterrupt):
                job.switch("zero3")
        else:
            job.switch("zero3")
    found["now"] = str(job.strategy), job.job.previous
    job.fit(2)
    return found | {"losses": losses(job), "weights": weights_of(job)}


def strikes(real: Any) -> Any:
    def striking(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    return striking


@pytest.mark.long
def test_an_interrupted_in_place_switch_leaves_all_ranks_equal(
    expected: list[float],
) -> None:
    ranks = run_ranks(interrupted, 2)
    for rank in ranks:
        assert rank["now"] == ("dp=2 zero=3", "dp=2")
        assert max(abs(a - b) for a, b in zip(rank["losses"], expected, strict=False)) <= 1e-12
        assert len(rank["losses"]) == 6 and rank["weights"] == ranks[0]["weights"]


def asked_for_while_it_trains(world: Any) -> list[Any]:
    told: list[Any] = []
    for last in (no_way_back, no_gradients):
        job, controls = trainer(strategy="ddp"), TrainingRequestHandler()

        def ask(job: Trainer, record: dict[str, Any]) -> None:
            if record["step"] == 1:
                asked = Control("a", "switch", {"strategy": "zero3"})
                step_boundary.inbox.post(step_boundary.inbox.acted + 1, "control", asked)

        job._callbacks = (ask,)
        with pytest.MonkeyPatch.context() as patch:
            full(patch)
            if world.place.rank == 1:
                runs_out(patch)
                last(patch)
            with pytest.raises((TrainingError, MemoryError)) as error:
                job.fit(500)
        told.append((job.step < 500, error.type.__name__, str(error.value), controls.result("a")["result"]["ok"]))
    job._callbacks = ()
    first = job.step
    job.fit(3)
    return [*told, (first, losses(job))]


def no_way_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceStorage, "take", planted)


def no_gradients(patch: pytest.MonkeyPatch) -> None:
    once(patch, Replicas, "begin_again")


@pytest.mark.long
def test_training_ends_after_a_switch_without_a_way_back(expected: list[float]) -> None:
    for in_pieces, unable, (first, made) in run_ranks(asked_for_while_it_trains, 2, timeout=120):
        assert in_pieces[0] and in_pieces[1] == "TrainingError" and "the state is incomplete" in in_pieces[2]
        assert unable[0] and unable[1] == "TrainingError" and "was taken back: MemoryError" in unable[2]
        assert not in_pieces[3] and not unable[3]
        assert len(made) == first + 3
        assert max(abs(a - b) for a, b in zip(made, expected, strict=False)) <= 1e-12
