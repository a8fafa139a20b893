"""Test that the proof that a switch kept the state runs during the first step under the new strategy."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from jobs import asked_for, one_process, points, quiet
from ranks import run_ranks

from nbkit.bridge.training_requests import Control, TrainingRequestHandler
from nbkit.rank.device import Accelerator
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.telemetry import session
from nbkit.rank.telemetry.phases import clock
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.step.history import Clock
from nbkit.rank.train.switch import switch as switching
from nbkit.rank.train.switch.switch import PendingSwitch
from nbkit.rank.train.trainer import Trainer
from nbkit.records.events import Switched
from nbkit.strategy import Strategy

THROUGH = ("zero3", "tp=2", "pp=2 microbatches=2", "zero1", "ddp")


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def hashed_in(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each thread that hashes from now on."""
    found: list[str] = []
    sums, digest = switching.sums, switching.digest

    def noted(fn: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            found.append(threading.current_thread().name)
            return fn(*args, **kwargs)

        return noting

    patch.setattr(switching, "sums", noted(sums))
    patch.setattr(switching, "digest", noted(digest))
    return found


def with_room(train: Callable[..., Any]) -> Callable[..., Any]:
    """Run `train` with room for the proof during a step, whatever else this machine does."""

    @functools.wraps(train)
    def trained(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(switching, "roomy", lambda *_: True)
            return train(*args)

    return trained


def losses_of(trainer: Trainer) -> list[float]:
    return [record["loss"] for record in trainer.history]


@with_room
def beside(world: Any) -> dict[str, Any]:
    trainer, controls = quiet(optimizer=adam, data=points(40)), TrainingRequestHandler()
    trainer.fit(1)
    said, free = [], []
    with pytest.MonkeyPatch.context() as patch:
        threads = hashed_in(patch)
        for strategy in THROUGH:
            sharded_model = weakref.ref(trainer.job.sharded_model)
            gc.disable()
            said.append(asked_for(trainer, controls, strategy))
            free.append(sharded_model() is None)
            gc.enable()
        asked = list(threads)
        called = trainer.switch("zero2")
        at_once = threads[len(asked) :]
    return {
        "said": said,
        "free": free,
        "asked": asked,
        "called": (called.identical, at_once),
        "switches": [(each.new, each.identical) for each in trainer.job.switches],
        "losses": losses_of(trainer),
    }


@pytest.mark.long
def test_a_switch_requested_during_training_does_not_wait_for_its_proof() -> None:
    for found in run_ranks(beside, 2, timeout=200):
        losses, _, _ = one_process(points(40), steps=len(found["losses"]), optimizer=adam)
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert [each["result"]["identical"] for each in found["said"]] == [True] * len(THROUGH)
        assert [each["step"] for each in found["said"]] == [each["result"]["step"] for each in found["said"]]
        assert found["free"] == [True] * len(THROUGH)
        assert found["asked"] == ["nbkit-proof"] * 2 * len(THROUGH)
        # A user's loop may change the weights between two steps, so a call in it compares the state first.
        assert found["called"] == (True, ["MainThread"] * 2)
        assert [identical for _, identical in found["switches"]] == [True] * (len(THROUGH) + 1)


@with_room
def spoilt(world: Any) -> dict[str, Any]:
    trainer, controls = quiet(optimizer=adam, data=points(40)), TrainingRequestHandler()
    trainer.fit(2)
    for strategy in ("tp=2", "ddp"):
        trainer.switch(strategy)
    carried = Exchange.run

    def spoiling(self: Exchange, old: Any, new: Any, **kwargs: Any) -> None:
        carried(self, old, new, **kwargs)
        with torch.no_grad():
            next(iter(new.values()))[0].view(-1)[0] += 1e-3

    with pytest.MonkeyPatch.context() as patch:
        if world.place.rank == 1:
            patch.setattr(Exchange, "run", spoiling)
        other = asked_for(trainer, controls, "tp=2")
    with pytest.MonkeyPatch.context() as patch:
        if world.place.rank == 1:
            patch.setattr(switching, "sums", full)
        untold = asked_for(trainer, controls, "zero3")
    gc.collect()
    well = asked_for(trainer, controls, "zero1")
    return {"other": other, "untold": untold, "well": well, "losses": losses_of(trainer), "now": str(trainer.strategy)}


def full(*_: Any, **__: Any) -> None:
    raise MemoryError("planted")


@pytest.mark.long
def test_a_state_that_differs_keeps_the_old_strategy_and_the_losses() -> None:
    for found in run_ranks(spoilt, 2, timeout=200):
        other, untold, well = found["other"], found["untold"], found["well"]
        assert (other["ok"], other["error"], other["strategy"]) == (False, "SwitchError", "dp=2")
        assert (
            "digests of weights and optimizer state differ" in other["numbers"]
            and "training continues under dp=2" in other["hint"]
        )
        assert untold["ok"] and untold["result"]["identical"]  # the switch is repeated, and compared at once
        assert well["ok"] and well["result"]["identical"] and found["now"] == "dp=2 zero=1"
        losses, _, _ = one_process(points(40), steps=len(found["losses"]), optimizer=adam)
        assert found["losses"] == pytest.approx(losses, rel=1e-5)


@with_room
def ends(world: Any) -> dict[str, Any]:
    """Switch at the last boundary of a run, and interrupt the first step after another switch."""
    acts: dict[int, Callable[[], None]] = {}  # number of finished steps -> action before the next step

    def rate(finished: int) -> float:
        acts.pop(finished, lambda: None)()
        return 1.0

    trainer, controls = quiet(optimizer=adam, data=points(40), lr_schedule=rate), TrainingRequestHandler()
    trainer.fit(2)
    found: dict[str, Any] = {}

    def ask(id: str, strategy: str) -> None:
        step_boundary.preparers["control"] = lambda control: step_boundary.Preparation()
        step_boundary.inbox.post(
            step_boundary.inbox.acted + 1, "control", Control(id, "switch", {"strategy": strategy})
        )

    # The request comes before the forward of a step. The step's reduction agrees on it, and the next boundary acts.
    acts[3] = lambda: ask("last", "zero1")
    trainer.fit(2)
    found["last"] = controls.result("last")["result"]
    found["at its end"] = (
        str(trainer.strategy),
        trainer.job.switcher.pending.done(),
        trainer.job.switches[-1].identical,
    )

    acts[5] = lambda: ask("broken", "zero3")
    backward = trainer.job.training_step.__class__.backward
    with pytest.MonkeyPatch.context() as patch:

        def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.job.switcher.pending is not None and trainer.job.switcher.pending.previous is not None:
                raise KeyboardInterrupt
            return backward(self, *args, **kwargs)

        patch.setattr(type(trainer.job.training_step), "backward", broken)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(5)
    found["broken"] = controls.result("broken")["result"]
    found["after it"] = (str(trainer.strategy), trainer.job.switcher.pending)
    trainer.fit(2)
    found["losses"] = losses_of(trainer)
    return found


def test_a_run_proves_a_switch_before_its_end_but_not_after_an_interrupt() -> None:
    for found in run_ranks(ends, 2, timeout=200):
        assert found["last"]["ok"] and found["last"]["result"]["identical"] is True
        assert found["at its end"] == ("dp=2 zero=1", True, True)
        assert found["broken"]["ok"] and found["broken"]["result"]["identical"] is None
        assert found["after it"] == ("dp=2 zero=3", None)
        losses, _, _ = one_process(points(40), steps=len(found["losses"]), optimizer=adam)
        assert found["losses"] == pytest.approx(losses, rel=1e-5)


class Counting(torch.nn.Module):
    """A model that changes a buffer in each forward pass, and a weight if `clamping` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        if Counting.clamping:
            with torch.no_grad():
                self.line.weight.clamp_(-0.1, 0.1)
        Counting.ran.set()
        return self.line(x)

    clamping, ran = False, threading.Event()


def before_a_forward(fn: Any) -> Any:
    def beginning(*args: Any, **kwargs: Any) -> Any:
        Counting.ran.clear()
        return fn(*args, **kwargs)

    return beginning


def after_a_forward(fn: Any) -> Any:
    def waiting(*args: Any, **kwargs: Any) -> Any:
        assert Counting.ran.wait(60)
        return fn(*args, **kwargs)

    return waiting


@with_room
def changing(world: Any) -> list[Any]:
    found = []
    for clamping in (False, True):
        Counting.clamping = clamping
        trainer, controls = quiet(model=Counting, optimizer=adam, data=points(40)), TrainingRequestHandler()
        trainer.fit(1)
        with pytest.MonkeyPatch.context() as patch:
            threads = hashed_in(patch)
            patch.setattr(switching, "sums", after_a_forward(switching.sums))
            patch.setattr(switching, "Comparison", before_a_forward(switching.Comparison))
            result = asked_for(trainer, controls, "zero1")
        found.append((result["ok"] and result["result"]["identical"], threads))
    return found


def test_changes_in_a_forward_pass_are_not_mistaken_for_a_wrong_switch() -> None:
    apart, first = ["nbkit-proof"] * 2, ["MainThread"] * 2
    # Weights that change in forward look like a wrong switch, so it is repeated, and compared before anything runs.
    assert run_ranks(changing, 2, timeout=200) == [[(True, apart), (True, apart + first)]] * 2


def narrow(world: Any) -> list[str]:
    trainer, controls = quiet(optimizer=adam, data=points(40)), TrainingRequestHandler()
    trainer.fit(1)
    with pytest.MonkeyPatch.context() as patch:
        threads = hashed_in(patch)
        if world.place.rank == 1:
            patch.setattr(switching, "roomy", lambda *_: False)
        assert asked_for(trainer, controls, "zero3")["result"]["identical"]
    return threads


def test_all_ranks_compare_first_if_one_has_no_memory_for_both_and_a_step() -> None:
    assert run_ranks(narrow, 2, timeout=200) == [["MainThread"] * 2] * 2


@with_room
def one_after_another(world: Any) -> dict[str, Any]:
    """Switch several times between the same two steps. Each is to be proven during the next step."""
    acts: dict[int, Callable[[], None]] = {}  # step -> action after it
    calls = [lambda _, record: acts.get(record["step"], lambda: None)()]
    trainer = quiet(optimizer=adam, data=points(40), callbacks=calls)
    found: dict[str, Any] = {}

    def well() -> None:
        found["told"] = [trainer.switch(each, beside=True).identical for each in ("zero1", "tp=2")]
        found["before"] = trainer.job.previous
        found["undone"] = trainer.undo(beside=True).new

    def ill() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if world.place.rank == 1:
                patch.setattr(switching, "sums", full)
            trainer.switch("ddp", beside=True)
            trainer.try_out("zero2", 2)
            found["tried"] = str(trainer.strategy), trainer.job.switcher.pending.previous

    acts.update({2: well, 4: ill})
    trainer.fit(6)
    found["switches"] = [(each.new, each.identical) for each in trainer.job.switches]
    return {**found, "losses": losses_of(trainer)}


def test_a_pending_switch_is_proven_before_another_one_begins() -> None:
    for found in run_ranks(one_after_another, 2, timeout=200):
        assert found["told"] == [None, None]
        assert (found["before"], found["undone"]) == ("dp=2 zero=1", "dp=2 zero=1")
        assert found["tried"] == ("dp=2", None)
        assert found["switches"] == [(strategy, True) for strategy in ("dp=2 zero=1", "tp=2", "dp=2 zero=1", "dp=2")]
        losses, _, _ = one_process(points(40), steps=len(found["losses"]), optimizer=adam)
        assert found["losses"] == pytest.approx(losses, rel=1e-5)


@with_room
def listened(world: Any, folder: str) -> tuple[bool, dict[int, bool]]:
    """Return (whether the proof ran during a step, {steps after a switch: whether ends of collectives are known})."""
    heard: dict[int, bool] = {}

    def rate(finished: int) -> float:
        heard[finished] = clock.listening
        return 1.0

    trainer, controls = (
        quiet(optimizer=adam, data=points(40), log_dir=folder, lr_schedule=rate),
        TrainingRequestHandler(),
    )
    trainer.job.recorder._session._detail_every = session.LISTEN_EVERY = 1 << 30
    trainer.fit(4)
    heard.clear()
    with pytest.MonkeyPatch.context() as patch:
        threads = hashed_in(patch)
        at = asked_for(trainer, controls, "zero1")["result"]["step"]
    return threads == ["nbkit-proof"] * 2, {step - at: told for step, told in heard.items() if abs(step - at) < 2}


def test_the_first_step_after_a_switch_is_recorded_in_detail(tmp_path: Path) -> None:
    for beside, heard in run_ranks(listened, 2, str(tmp_path), timeout=200):
        assert beside
        assert not heard[-1] and heard[0]


class Behind:
    """A GPU's stream with unfinished work."""

    def __init__(self) -> None:
        self.left = 0.2

    def synchronize(self) -> None:
        time.sleep(self.left)
        self.left = 0.0


def test_unfinished_gpu_work_of_a_step_does_not_count_as_time_of_the_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, job = Behind(), MagicMock(device=torch.device("cuda", 0))
    monkeypatch.setattr(Accelerator, "wait_for_stream", lambda self, device: stream.synchronize())

    def identical() -> bool:
        stream.synchronize()  # like a read of a number
        return True

    job.ledger.clock = of_steps = Clock()
    comparison = MagicMock(identical=identical)
    event = Switched(3, old="dp=2", new="tp=2")
    switcher = switching.Switcher(job)
    switcher.pending = PendingSwitch(event, Strategy.parse("ddp", 2), 0, previous=MagicMock(), comparison=comparison)
    assert switcher.compare()

    assert switcher.pending.event.identical and switcher.pending.event.proof_s < 0.1
    assert of_steps.lap() >= 0.2
