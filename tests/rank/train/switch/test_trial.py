"""Test that a trial leaves no record, no file and no changed weight, however it ends."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import flat, heard, one_process, points, quiet
from ranks import run_ranks

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.train.switch.compare import try_out


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def tried(world: Any, folder: str) -> dict[str, Any]:
    called: list[int] = []
    trainer = quiet(
        data=points(40),
        optimizer=adam,
        eval_data=points(8),
        eval_every=2,
        checkpoints=nbkit.Checkpoints(every=3, path=Path(folder) / "saved"),
        callbacks=[lambda trainer, record: called.append(record["step"])],
    )
    trainer.fit(2)
    events = heard(trainer)
    before = flat(trainer.model)
    trainer.try_out("zero1", steps=4)
    trainer.try_out("ddp", steps=2)
    found = {
        "weights kept": torch.equal(flat(trainer.model), before),
        "called": list(called),
        "events": [event.kind for event in events],
        "saved": (Path(folder) / "saved").exists(),
    }

    inner = type(trainer.job.optimizer.inner)
    original, calls = inner.step, []

    def step(self: Any, closure: Any = None) -> Any:
        calls.extend([1] * (self is trainer.job.optimizer.inner))  # without calls of an earlier check
        original(self, closure)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "step", step)
        with pytest.raises(KeyboardInterrupt):
            trainer.try_out("zero1", steps=3)
    found["half"] = (
        trainer.job.integrity.half_way,
        len(trainer.job.ledger.pending),
        trainer.step,
        str(trainer.strategy),
    )
    trainer.fit(2)
    return found | {"losses": [record["loss"] for record in trainer.history]}


def test_a_trial_changes_and_reports_nothing_even_when_interrupted(tmp_path: Path) -> None:
    losses, _, _ = one_process(points(40), steps=4, optimizer=adam)
    for found in run_ranks(tried, 2, str(tmp_path)):
        assert found["weights kept"] and not found["saved"]
        assert found["called"] == [1, 2] and found["events"] == []
        assert found["half"] == (False, 0, 2, "dp=2")
        assert found["losses"] == pytest.approx(losses, rel=1e-5)


class Knowing(torch.nn.Linear):
    """A model that refers to itself, so only a collection of cycles frees it."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.itself = (self,)


def failing(world: Any) -> int:
    """Return the number of live tensors of a failed trial."""
    trainer = quiet(model=Knowing, optimizer=adam)
    trainer.fit(1)
    held: list[weakref.ref[torch.Tensor]] = []

    def make_step() -> None:
        held.extend(weakref.ref(tensor) for tensor in trainer.job.sharded_model.data.tensors())
        raise TrainingError("planted")

    gc.collect()
    gc.disable()
    with pytest.raises(TrainingError, match="planted"):
        try_out(trainer.job, "zero1", 2, make_step, again=True)
    assert held
    return sum(tensor() is not None for tensor in held)


def test_the_memory_of_a_failed_trial_is_freed() -> None:
    assert run_ranks(failing, 2) == [0, 0]


def read_once(world: Any) -> list[Any]:
    trainer = quiet(data=iter(points(40)))
    trainer.fit(1)
    with pytest.raises(TrainingError, match="must read the samples of a trial again") as refused:
        trainer.try_out("zero1", steps=1)
    trainer.fit(1)
    return [str(trainer.strategy), trainer.step, "__iter__" in str(refused.value)]


def test_a_trial_with_data_that_cannot_be_read_again_is_refused() -> None:
    assert run_ranks(read_once, 2) == [["dp=2", 2, True]] * 2
