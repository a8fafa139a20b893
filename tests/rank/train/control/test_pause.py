"""Test that in a pause all ranks stay at one boundary, serve requests, and go on or stop together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import quiet
from ranks import run_ranks

from nbkit.errors import Stopped
from nbkit.rank.train.control import step_boundary


def _ask(trainer: Any, rank: int, sign: Path, seen: list[tuple[str, int, bool]], alone: list[bool]) -> None:
    """Post requests from a thread, on each rank at its own time. After the pause they come in this order."""

    def once(ready: Callable[[], bool], number: int, kind: str) -> None:
        while not ready():
            time.sleep(0.005)
        time.sleep(0.1 * rank)
        step_boundary.inbox.post(number, kind)

    once(step_boundary.is_held, 2, "look")
    once(lambda: step_boundary.inbox.acted >= 2, 3, "pause")
    once(lambda: step_boundary.inbox.acted >= 3, 4, "switch")
    at = trainer.step
    # Rank 1 gets the request only after rank 0 has had time to go on alone.
    once(lambda: len(seen) == 2 and (rank == 0 or sign.exists()), 5, "resume")
    if rank == 0:
        time.sleep(0.3)
        alone.append(not step_boundary.is_held())
        sign.touch()
    once(lambda: trainer.step > at + 2, 6, "look")
    once(lambda: step_boundary.inbox.acted >= 6, 7, "pause")
    once(lambda: step_boundary.inbox.acted >= 7, 8, "stop")


def _held_trainer(world: Any, sign: Path) -> dict[str, Any]:
    rank = world.place.rank
    seen: list[tuple[str, int, bool]] = []
    alone: list[bool] = []

    def begin(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 2 + rank:
            step_boundary.inbox.post(1, "pause")
            threading.Thread(target=_ask, args=(trainer, rank, sign, seen, alone), daemon=True).start()

    trainer = quiet(callbacks=[begin])
    step_boundary.handlers["pause"] = lambda _: step_boundary.hold(trainer.job.device)
    step_boundary.handlers["resume"] = lambda _: step_boundary.let_go()
    step_boundary.handlers["look"] = lambda _: seen.append(("look", trainer.step, step_boundary.is_held()))
    step_boundary.handlers["switch"] = lambda _: seen.append(("switch", trainer.step, bool(trainer.switch("zero1"))))

    with pytest.raises(Stopped):
        trainer.fit(100_000)
    after = trainer.fit(2)
    seconds = [record["seconds"] for record in trainer.history]
    assert alone == ([] if rank else [False])
    return {
        "seen": seen,
        "steps": trainer.step,
        "more": len(after),
        "least": min(seconds),
        "held": step_boundary.is_held(),
    }


def test_a_paused_training_serves_requests_and_goes_on_or_stops_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_held_trainer, 2, tmp_path / "sign", timeout=120)

    assert first["seen"] == second["seen"]
    assert first["steps"] == second["steps"]
    (_, at_look, held), (_, at_switch, switched), (_, later, free) = first["seen"]
    assert held
    assert switched
    assert at_look == at_switch  # no step was made in the pause, though the pause was requested twice
    assert later > at_switch
    assert not free
    assert first["more"] == 2
    assert not first["held"]
    assert first["least"] >= 0  # time in a pause is not subtracted from a step
