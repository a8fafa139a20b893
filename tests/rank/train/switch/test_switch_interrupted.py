"""Test that after an interrupt, a switch or a read of the weights first makes the ranks equal, or says why not."""

from __future__ import annotations

import gc
import os
import signal
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import flat, mean_loss, net, one_process, points, quiet
from ranks import next_generation, run_ranks

from nbkit.errors import SwitchError, TrainingError
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.telemetry.health import storage_bytes
from nbkit.rank.train import builder
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.job import prepare
from nbkit.rank.train.switch import switch as switching

AFTER = ("switch", "save", "evaluate", "full_state_dict", "try_out")


class Torn(torch.optim.AdamW):
    """AdamW that spoils a weight in its third step and is then interrupted, on the rank where `spoils` is set."""

    spoils = False
    armed = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        # Copies of the optimizer are tried before the training.
        if Torn.armed and self.steps == 3 and Torn.spoils and step_boundary.training() is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise KeyboardInterrupt
        super().step()


def torn(world: Any, folder: str) -> list[Any]:
    found: list[Any] = []
    for entry in AFTER:
        Torn.spoils, Torn.armed = world.place.rank == 0, True

        def schedule(step: int) -> float:
            if Torn.armed and step == 3:
                raise KeyboardInterrupt
            return 1.0

        trainer = quiet(optimizer=Torn, lr_schedule=schedule, data=points(40))
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(6)
        Torn.armed = False
        path, arguments = str(Path(folder) / "saved"), {"switch": "zero1", "try_out": "zero1", "evaluate": points(8)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = path if entry == "save" else arguments.get(entry)
            result = getattr(trainer, entry)(*([] if given is None else [given]))
        if entry == "save":
            trainer = quiet(optimizer=Torn, data=points(40))
            trainer.load(path)
        elif entry == "full_state_dict":
            found.append(torch.cat([tensor.flatten() for tensor in result.values()]))
            continue
        elif entry == "evaluate":
            found.append(result)
            continue
        found.append((trainer.step, flat(trainer.model)))
    return found


def test_ranks_of_a_torn_step_become_equal_before_any_read_or_move(tmp_path: Path) -> None:
    _, _, model = one_process(points(40), steps=3, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    x, y = (torch.stack(part) for part in zip(*points(8), strict=True))
    for switched, saved, evaluated, whole, tried in run_ranks(torn, 2, str(tmp_path), timeout=90):
        assert evaluated == pytest.approx(float(mean_loss(model(x), y).detach()), rel=1e-4)
        torch.testing.assert_close(whole, flat(model), rtol=1e-4, atol=1e-6)
        for step, weights in (switched, saved, tried):
            assert step == 3
            torch.testing.assert_close(weights, flat(model), rtol=1e-4, atol=1e-6)


def interrupted(world: Any) -> dict[str, Any]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = quiet(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), data=points(40))
    trainer.fit(2)
    job, adopt = trainer.job, trainer.job.adopt

    def adopting(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        adopt(*args)

    old = [weakref.ref(job.sharded_model), *(weakref.ref(p) for p in job.sharded_model.held.values())]
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        if world.place.rank == 1:
            patch.setattr(job, "adopt", adopting)
            with pytest.raises(KeyboardInterrupt):
                trainer.switch("zero1")
            gc.collect()  # the interrupt skipped this
        else:
            trainer.switch("zero1")
    found: dict[str, Any] = {
        "let go": all(each() is None for each in old),
        "now": (str(job.strategy), len(job.switches)),
    }
    gc.enable()
    trainer.fit(2)
    found["losses"] = [record["loss"] for record in trainer.history]

    digests = switching.digest

    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        if world.place.rank == 1:
            patch.setattr(switching, "digest", lambda *args, **named: _second(calls, digests(*args, **named)))
            with pytest.raises(KeyboardInterrupt):
                trainer.switch("ddp")
        else:
            trainer.switch("ddp")
    for act in (lambda: trainer.fit(1), lambda: trainer.switch("zero2"), trainer.full_state_dict):
        with pytest.raises(TrainingError, match="different strategies"):
            act()
    return found


def _second(calls: list[int], said: str) -> str:
    calls.append(1)
    if len(calls) == 2:
        raise KeyboardInterrupt
    return said


def test_an_interrupt_waits_for_a_switch_and_ranks_that_differ_are_an_error() -> None:
    losses, _, _ = one_process(points(40), steps=4, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    for found in run_ranks(interrupted, 2):
        assert found["now"] == ("dp=2 zero=1", 1) and found["let go"]
        assert found["losses"] == pytest.approx(losses, rel=1e-5)


def by_hand(world: Any) -> list[Any]:
    job = prepare(net, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), loss=mean_loss, log_dir=None)
    x, y = (torch.stack(part) for part in zip(*points(8), strict=True))
    job.optimizer.zero_grad()
    job.backward((x, y))
    with pytest.raises(TrainingError, match="between backward") as refused:
        job.switch("zero1")
    job.optimizer.step()
    # The gradients still exist, which is allowed after the update.
    job.switch("zero1")
    return [job.step, str(job.strategy), "optimizer.step()" in str(refused.value)]


def test_a_switch_that_would_drop_the_update_is_refused() -> None:
    assert run_ranks(by_hand, 2) == [[1, "dp=2 zero=1", True]] * 2


def while_groups_are_made(world: Any) -> dict[str, Any]:
    """Interrupt a switch when only rank 0 has the groups of the strategy."""
    trainer = quiet(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), data=points(40))
    trainer.fit(2)
    with pytest.MonkeyPatch.context() as patch:
        if world.place.rank == 0:
            patch.setattr(builder, "meet_groups", interrupt)
        else:
            make = torch.distributed.new_group
            patch.setattr(torch.distributed, "new_group", lambda *args, **named: interrupt(make(*args, **named)))
        with pytest.raises(KeyboardInterrupt):
            trainer.switch("tp=2")
    next_generation(world)
    trainer.fit(1)
    same = trainer.switch("tp=2").identical, trainer.switch("ddp").identical
    trainer.fit(1)
    return {"same": same, "losses": [record["loss"] for record in trainer.history]}


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_groups_that_exist_only_on_some_ranks_after_an_interrupt_are_remade() -> None:
    losses, _, _ = one_process(points(40), steps=4, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    for found in run_ranks(while_groups_are_made, 2, generations=2):
        assert found["same"] == (True, True)
        assert found["losses"] == pytest.approx(losses, rel=1e-5)


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 3))


def fails_and_goes_on(world: Any) -> dict[str, list[int]]:
    trainer = quiet(
        model=wide, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), data=points(40), strategy="zero3"
    )
    trainer.fit(2)
    gc.collect()
    found = {"before": [held()]}
    for owner, name, fails in (
        (Exchange, "make_room", full),
        (job_state, "allocate", full),
        (switching, "digest", other),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if world.place.rank == 1 or fails is other:
                patch.setattr(owner, name, fails)
            gc.disable()
            # A user reads the remaining state while the error object is still alive.
            with pytest.raises(SwitchError) as failed:
                trainer.switch("ddp")
            found[name] = [held(), len(str(failed.value))]
            gc.enable()
    trainer.fit(1)
    return found


def full(*_: Any, **__: Any) -> None:
    raise MemoryError("planted")


def other(held: Any, *_: Any, **named: Any) -> str:
    return str(id(held))


def held() -> int:
    return storage_bytes([each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)], set())


def test_a_failed_switch_frees_its_memory() -> None:
    for found in run_ranks(fails_and_goes_on, 2):
        (before,) = found.pop("before")
        assert len(found) == 3
        for stage, (after, _) in found.items():
            # A rank holds 8 kB of the smallest tensor that a switch moves, the first bias. The numbers of a step take
            # 3 kB.
            assert after <= before + 5000, stage


def leaves_them_all(world: Any) -> list[str]:
    trainer = quiet(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), data=points(40), strategy="ddp")
    trainer.fit(1)
    collected = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: collected.append(str(trainer.strategy)))
        gc.disable()
        for strategy in ("pp microbatches=2", "zero1", "zero2", "zero3", "pp microbatches=4", "tp", "ddp"):
            trainer.switch(strategy)
            trainer.fit(1)
        gc.enable()
    return collected


def test_the_old_sharded_model_is_freed_without_a_garbage_collection() -> None:
    # A garbage collection would stop the training for longer than the rest of a switch.
    assert run_ranks(leaves_them_all, 2) == [[], []]
