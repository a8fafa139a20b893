"""Test that all ranks go back to the old strategy if the first step under a new one fails, and lose no step."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
from jobs import Heard, asked_for, heard, mean_loss, points, quiet
from ranks import next_generation, run_ranks
from torch import Tensor, nn

import nbkit
from nbkit.bridge.training_requests import Control, TrainingRequestHandler
from nbkit.errors import SwitchError, TrainingError
from nbkit.rank.data.batch import shard_of
from nbkit.rank.train import builder
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.step_boundary import newest
from nbkit.rank.train.estimate import free_memory
from nbkit.rank.train.job import Job, prepare
from nbkit.rank.train.switch import consensus as joining
from nbkit.rank.train.switch import switch as switching
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.world import failure_alarm, world

pytestmark = pytest.mark.usefixtures("rows_are_known")

STEPS = 12
ZERO3, TP, PP = "dp=2 zero=3", "tp=2", "pp=2 schedule=1f1b microbatches=2"


class Plan:
    """A planned failure: under a strategy, on some ranks, in "forward", "backward" or "optimizer"."""

    def __init__(self, under: str, where: str, ranks: tuple[int, ...], error: type[BaseException] = ValueError) -> None:
        self.under, self.where, self.ranks, self.error = under, where, ranks, error


plans: list[Plan] = []


def passes(where: str) -> None:
    if (owner := newest()) is None:
        return
    job: Job = getattr(owner, "job", owner)
    for plan in plans:
        if plan.where == where and job.rank in plan.ranks and plan.under in ("any", str(job.strategy)):
            raise plan.error(f"planted in {where}")


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        passes("backward")
        return grad


class Fragile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        passes("forward")
        return Passing.apply(x)


class Drawing(nn.Module):
    """A layer that draws numbers and counts calls in a buffer, so that a repeated step would show."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (1 + 0.01 * random.random() + 0.001 * self.calls)


def drawing() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), Drawing(), Fragile(), nn.Linear(16, 3))


def in_stages() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16), Fragile(), nn.Linear(16, 3))


class Adam(torch.optim.AdamW):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)

    def step(self, closure: Any = None) -> None:
        passes("optimizer")
        super().step()


def trainer_of(model: Any = drawing, **changed: Any) -> Trainer:
    plans.clear()
    random.seed(5)
    if model is in_stages:
        changed = {
            "hints": nbkit.ModelHints(stages=["3"]),
            **changed,
        }  # a cut by measured cost would vary
    return quiet(**({"model": model, "optimizer": Adam, "data": points(40), "clip_norm": 1.0} | changed))


def losses_of(owner: Trainer | Job) -> list[float]:
    return [record["loss"] for record in owner.history]


def memory(patch: pytest.MonkeyPatch, room: str) -> None:
    """Set the memory for a switch. room: for "both" sides and a step, for both "sides" only, or for "one"."""
    patch.setattr(switching, "roomy", lambda *_: room == "both")
    patch.setattr(joining, "crowded", lambda *_, **__: room == "one")


def reads_of_free_memory(world: object) -> int:
    """Return how often a rank reads its free memory before it reports its room for a switch."""
    trainer, reads = trainer_of(), []
    trainer.fit(1)

    def gather(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for reader in (joining, free_memory):
                patch.setattr(reader, "left", lambda *_, **__: reads.append(1))
            return joining.gather(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switching, "gather", gather)
        trainer.switch(ZERO3)
    return len(reads)


def test_a_switch_reads_free_memory_once() -> None:
    assert run_ranks(reads_of_free_memory, 2) == [1, 1]


def heard_by(owner: Trainer | Job) -> Heard:
    return heard(owner, "switch", "failure")


def fails_while_it_trains(
    room: str, strategy: str, plan: Plan, model: Any = drawing, *, on: bool = True
) -> dict[str, Any]:
    """Request a switch like a click, and let it fail. on: then request it again, and another one that works."""
    trainer, controls = trainer_of(model), TrainingRequestHandler()
    events = heard_by(trainer)
    trainer.fit(2)
    plans.append(plan)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        memory(patch, room)
        said = asked_for(trainer, controls, strategy)
        after = str(trainer.strategy), len(trainer.job.switches), trainer.job.previous
        told, noted = list(events), [record for record in trainer.history if "taken_back" in record]
        trainer.fit(until=max(STEPS, trainer.step + 1))  # steps go on while the switch is prepared
        losses = losses_of(trainer)
        again, well = said, {"ok": True, "strategy": "dp=2 zero=2"}
        if on:
            again = asked_for(trainer, controls, strategy + "   ")
            plans.clear()
            well = asked_for(trainer, controls, "zero2")
    return {
        "said": said,
        "after": after,
        "told": told,
        "noted": [(record["step"], record["strategy"], record["taken_back"]) for record in noted],
        "warned": [text for each in warned if "taken back" in (text := str(each.message))],
        "losses": losses,
        "asked": 1 + on,
        "again": again["what"],
        "well": (well["ok"], well["strategy"], trainer.job.previous if on else "dp=2"),
    }


FAILING = [
    ("zero3", Plan(ZERO3, "forward", (0, 1))),
    ("zero3", Plan(ZERO3, "forward", (1,))),
    ("zero3", Plan(ZERO3, "backward", (0,))),
    ("zero1", Plan("dp=2 zero=1", "backward", (1,), torch.OutOfMemoryError)),
    ("tp", Plan(TP, "forward", (1,))),
]


def never_switched(found: list[dict[str, Any]], model: Any = drawing) -> list[float]:
    never = trainer_of(model)
    never.fit(max(len(one["losses"]) for one in found))
    return losses_of(never)


def while_it_trains(world: Any, room: str) -> dict[str, Any]:
    # The optimizer changes the weights, so only a kept copy of the old sharded model is still whole.
    kept = [FAILING[0], FAILING[4], ("zero1", Plan("dp=2 zero=1", "optimizer", (1,), torch.OutOfMemoryError))]
    failing = {"both": kept, "sides": FAILING[1:3], "one": FAILING[2:4]}[room]
    found = [
        (strategy, plan, fails_while_it_trains(room, strategy, plan, on=number == 0))
        for number, (strategy, plan) in enumerate(failing)
    ]
    return {"never": never_switched([one for *_, one in found]), "found": found}


@pytest.mark.parametrize("room", [*(pytest.param(room, marks=pytest.mark.long) for room in ("both", "sides")), "one"])
def test_a_failed_first_step_takes_all_ranks_back_with_equal_losses(
    room: str,
) -> None:
    for number, rank in enumerate(run_ranks(while_it_trains, 2, room, timeout=170)):
        for strategy, plan, found in rank["found"]:
            said, step = found["said"], found["said"]["step"]
            what = f"{plan.error.__name__}: planted in {plan.where}"
            # If two ranks fail, the first may wake the other before that fails by itself.
            told = [failure.rank for failure in found["told"] if failure.kind == "failure"]
            assert told in ([None], [0], [1]) if plan.ranks == (0, 1) else told == list(plan.ranks)
            whose = what if told == [None] else f"rank {told[0]}: {what}"
            words = f"dp=2 → {plan.under} was taken back after step {step}: the first step under it failed, "
            words += "and training continues under dp=2."
            assert (said["ok"], said["error"], said["strategy"]) == (False, "SwitchError", "dp=2")
            assert (said["what"], said["numbers"]) == (words, whose)
            assert found["after"] == ("dp=2", 0, None)
            assert found["losses"] == rank["never"][: len(found["losses"])], (strategy, plan.where, plan.ranks)
            assert found["noted"] == [(step + 1, "dp=2", f"{plan.under}: {whose}")]
            failure = found["told"][-1]
            assert failure.kind == "failure" and (failure.step, failure.error) == (step, "SwitchError")
            assert failure.what == f"{words} {whose}"
            # If memory held both models, no event of the switch was sent.
            switched = [(each.old, each.new) for each in found["told"] if each.kind == "switch"]
            assert switched == ([] if room == "both" else [("dp=2", plan.under), (plan.under, "dp=2")])
            assert len(found["warned"]) == (found["asked"] if number == 0 else 0)
            assert "was taken back" in found["again"] and found["well"] == (True, "dp=2 zero=2", "dp=2")


def within_a_stage(world: Any) -> dict[str, Any]:
    found = []
    for where, room in (("forward", "both"), ("backward", "one")):
        # The rank with the layer fails; the other waits for its message.
        plan = Plan(PP, where, (0, 1))
        found.append(fails_while_it_trains(room, "pp microbatches=2", plan, in_stages, on=room == "both"))
    return {"never": never_switched(found, in_stages), "found": found}


@pytest.mark.long
def test_a_failed_stage_takes_its_pipeline_back() -> None:
    for rank in run_ranks(within_a_stage, 2, timeout=170):
        for found in rank["found"]:
            assert found["losses"] == rank["never"][: len(found["losses"])]
            assert found["said"]["numbers"].startswith("rank 1: ValueError: planted in ")
            assert found["well"] == (True, "dp=2 zero=2", "dp=2")


def four(world: Any) -> dict[str, Any]:
    found = []
    for room in ("both", "one"):
        trainer, controls = trainer_of(in_stages, strategy="zero1 tp=2"), TrainingRequestHandler()
        trainer.fit(2)
        plans.append(Plan("dp=2 tp=2 zero=3", "backward", (3,)))
        with pytest.MonkeyPatch.context() as patch:
            memory(patch, room)
            said = asked_for(trainer, controls, "zero3 tp=2")
            plans.append(Plan(f"dp=2 {PP}".replace("microbatches=2", "microbatches=4"), "forward", (0, 1, 2, 3)))
            staged = asked_for(trainer, controls, "dp=2 pp=2")
        trainer.fit(2)
        found.append((said["numbers"], staged["numbers"], losses_of(trainer)))
    never = trainer_of(in_stages, strategy="zero1 tp=2")
    never.fit(max(len(losses) for _, _, losses in found))
    return {"never": losses_of(never), "found": found, "strategy": str(trainer.strategy)}


@pytest.mark.long  # the tests above cover the same on two ranks
def test_one_failed_rank_of_four_takes_all_back() -> None:
    for rank in run_ranks(four, 4, timeout=170):
        for said, staged, losses in rank["found"]:
            assert said == "rank 3: ValueError: planted in backward"
            assert "ValueError: planted in forward" in staged  # rank 2, 3, or both: the first to fail wakes the other
            assert losses == rank["never"][: len(losses)]
        assert rank["strategy"] == "dp=2 tp=2 zero=1"


def called(world: Any) -> dict[str, Any]:
    never = trainer_of()
    never.fit(STEPS)
    trainer = trainer_of()
    events = heard_by(trainer)
    trainer.fit(3)
    plans.extend([Plan(ZERO3, "backward", (1,)), Plan(TP, "forward", (0,))])
    at_once = trainer.switch("zero3")
    trainer.fit(2)
    first = str(trainer.strategy), len(trainer.job.switches), [(e.kind, e.step) for e in events]
    # No step was made under either of them, so training goes back to the strategy before both.
    trainer.switch("zero3")
    trainer.switch("tp")
    trainer.fit(2)
    second = str(trainer.strategy), len(trainer.job.switches)
    # After a switch and an undo by hand, there is nothing to go back to.
    trainer.switch("tp")
    trainer.undo()
    nothing = trainer.job.switcher.pending
    plans.clear()
    trainer.switch("zero3")
    trainer.fit(1)
    plans.append(Plan(TP, "forward", (0,)))
    trainer.switch("tp")
    trainer.fit(1)
    third = str(trainer.strategy), [each.new for each in trainer.job.switches], trainer.job.previous
    trainer.undo()
    trainer.fit(STEPS - trainer.step)
    return {
        "never": losses_of(never),
        "losses": losses_of(trainer),
        "identical": at_once.identical,
        "told": (first, second, nothing, third),
        "noted": [(record["step"], record["taken_back"]) for record in trainer.history if "taken_back" in record],
    }


@pytest.mark.long
def test_a_switch_between_two_fits_is_taken_back_by_the_second_fit() -> None:
    for found in run_ranks(called, 2, timeout=120):
        assert found["losses"] == pytest.approx(found["never"], rel=1e-5)
        assert found["losses"][:7] == found["never"][:7]  # under the same strategy, to the last bit
        first, second, nothing, third = found["told"]
        assert found["identical"] and first == ("dp=2", 0, [("switch", 3), ("switch", 3), ("failure", 3)])
        assert second == ("dp=2", 0) and nothing is None
        assert third == (ZERO3, [TP, "dp=2", ZERO3], "dp=2")
        assert [step for step, _ in found["noted"]] == [4, 6, 9]
        assert found["noted"][1][1] == f"{TP}: rank 0: ValueError: planted in forward"


def by_hand(world: Any, strategy: str | None, as_shards: bool) -> dict[str, Any]:
    """Run a user's own loop. strategy: switch to it before the fourth step; its first backward fails on rank 1."""
    plans.clear()
    random.seed(5)
    job = prepare(drawing, Adam, loss=mean_loss, log_dir=None, seed=7)
    loader = torch.utils.data.DataLoader(points(64), batch_size=8, shuffle=True)
    steps: list[Any] = []
    for number, batch in enumerate(job.batches(loader)):
        if strategy is not None and number == 3:
            plans.append(Plan("any", "backward", (1,)))
            plans[-1].under = str(job.switch(strategy).new)
        given = batch
        if as_shards:
            axes = job.sharded_model.axes
            given = shard_of(batch, ranks=axes.size("dp"), rank=axes.index("dp"))
        try:
            job.backward(given)
        except TrainingError as error:
            steps.append(error.what)
            job.backward(batch)
        job.clip(1.0)
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.log(number=number)
    return {"steps": steps, "losses": losses_of(job), "now": str(job.strategy), "records": job.history}


def in_loops(world: Any) -> dict[str, Any]:
    return {
        "never": by_hand(world, None, False),
        "zero3": by_hand(world, "zero3", False),
        "cut alike": by_hand(world, "zero3", True),
        "cut otherwise": by_hand(world, "tp", True),
    }


def test_a_users_own_loop_repeats_the_batch_inside_backward() -> None:
    for found in run_ranks(in_loops, 2, timeout=120):
        never = found.pop("never")["losses"]
        for name, loop in found.items():
            assert loop["losses"] == never and loop["now"] == "dp=2", name
            assert [record["number"] for record in loop["records"]] == list(range(8))
            assert [record["step"] for record in loop["records"] if "taken_back" in record] == [4]
        assert found["zero3"]["steps"] == found["cut alike"]["steps"] == []
        (what,) = found["cut otherwise"]["steps"]
        assert what == "The rows of this batch were cut for tp=2, and the switch to it was taken back."


def asked_in_a_loop(world: Any) -> dict[str, Any]:
    plans.clear()
    random.seed(5)
    job, controls = prepare(drawing, Adam, loss=mean_loss, log_dir=None, seed=7), TrainingRequestHandler()
    step_boundary.preparers["control"] = lambda control: step_boundary.Preparation()
    plans.append(Plan(ZERO3, "backward", (1,)))
    loader = torch.utils.data.DataLoader(points(64), batch_size=8, shuffle=True)
    for number, batch in enumerate(job.batches(loader)):
        if number == 2:
            step_boundary.inbox.post(
                1 + step_boundary.inbox.acted, "control", Control("a", "switch", {"strategy": "zero3"})
            )
        job.backward(batch)
        job.clip(1.0)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return {"losses": losses_of(job), "said": controls.result("a")["result"], "never": by_hand(world, None, False)}


def test_a_requested_switch_in_an_own_loop_is_answered_after_its_first_backward() -> None:
    for found in run_ranks(asked_in_a_loop, 2, timeout=120):
        assert found["losses"] == found["never"]["losses"]
        assert not found["said"]["ok"] and found["said"]["numbers"] == "rank 1: ValueError: planted in backward"


def ones_own(world: Any) -> list[Any]:
    """Return the results of failures under the old strategy too, an interrupt, a failed update, a failed way back."""
    found: list[Any] = []
    never = trainer_of(in_stages)
    never.fit(STEPS)

    def switched(room: str = "sides") -> Trainer:
        trainer = trainer_of(in_stages)
        trainer.fit(2)
        with pytest.MonkeyPatch.context() as patch:
            memory(patch, room)
            trainer.switch("zero3")
        return trainer

    trainer = switched()
    plans.append(Plan("any", "forward", (0, 1)))
    with pytest.raises(ValueError, match="planted in forward") as error, warnings.catch_warnings(record=True):
        trainer.fit(3)
    found.append((error.value.__cause__, error.value.__context__, str(trainer.strategy), trainer.step))
    plans.clear()
    trainer.fit(STEPS - 2)
    found.append(losses_of(trainer) == losses_of(never))

    trainer = switched()
    plans.append(Plan(ZERO3, "forward", (0, 1), KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(3)
    found.append((str(trainer.strategy), trainer.step, trainer.job.switcher.pending))
    plans.clear()
    trainer.fit(STEPS - 2)
    found.append(losses_of(trainer) == pytest.approx(losses_of(never), rel=1e-5))

    trainer = switched()
    plans.append(Plan(ZERO3, "optimizer", (0, 1)))
    with pytest.raises(ValueError, match="planted in optimizer") as error:
        trainer.fit(3)
    found.append(("the optimizer had begun" in str(error.value.__notes__), str(trainer.strategy)))

    trainer = switched()
    plans.append(Plan(ZERO3, "backward", (1,)))
    with pytest.MonkeyPatch.context() as patch:
        if world.place.rank == 0:
            patch.setattr(builder.Builder, "build", broken)
        with pytest.raises((ValueError, RuntimeError)) as error:
            trainer.fit(3)
    found.append((type(error.value).__name__, type(error.value.__cause__).__name__, error.value.__notes__))
    found.append((str(trainer.strategy), trainer.job.switcher.pending, world.dirty))
    plans.clear()
    trainer.fit(STEPS - 2)
    found.append(losses_of(trainer) == pytest.approx(losses_of(never), rel=1e-5))
    return found


def broken(*_: Any, **__: Any) -> Any:
    raise MemoryError("no room to go back")


@pytest.mark.long
def test_errors_not_caused_by_the_strategy_are_raised_as_usual() -> None:
    for rank, found in enumerate(run_ranks(ones_own, 2, timeout=120)):
        bug, as_ever, interrupt, after_it, optimizer, lost, left, goes_on = found
        assert bug == (None, None, "dp=2", 2) and as_ever
        assert interrupt == (ZERO3, 2, None) and after_it
        assert optimizer == (True, ZERO3)
        assert lost[:2] == (("RuntimeError", "ValueError")[rank], "SwitchError")
        assert "nbkit could not go back to dp=2" in lost[2][0] and "no room to go back" in lost[2][0]
        assert left == (ZERO3, None, "") and goes_on


def broken_from_outside(world: Any) -> list[Any]:
    """Break the ranks out, as after Stop or the death of a rank. No rank waits for the others."""
    trainer = trainer_of()
    trainer.fit(2)
    trainer.switch("zero3")
    threading.Timer(1.0, failure_alarm.break_out, ("the cell was stopped while it waited",)).start()
    plans.append(Plan(ZERO3, "forward", (world.place.rank,), (Waiting, ValueError)[world.place.rank]))
    with pytest.raises((ValueError, KeyboardInterrupt)):
        trainer.fit(2)
    dirty = world.dirty
    next_generation(world)
    plans.clear()
    trainer.fit(2)
    return [dirty, str(trainer.strategy), trainer.step, losses_of(trainer)]


class Waiting(KeyboardInterrupt):
    """An interrupt like that of Stop: first the collectives end, then the code is interrupted."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        deadline = time.monotonic() + 30
        while not world.current().dirty and time.monotonic() < deadline:  # type: ignore[union-attr]
            time.sleep(0.01)


def test_a_rank_that_is_broken_out_waits_for_no_other() -> None:
    rank0, rank1 = run_ranks(broken_from_outside, 2, timeout=60, generations=2)
    assert rank0[0] == rank1[0] == "the cell was stopped while it waited"
    assert rank0[1:3] == rank1[1:3] == [ZERO3, 4] and rank0[3] == rank1[3]


def once(world: Any) -> dict[str, Any]:
    """Train on data that cannot be read again."""
    never = trainer_of(data=iter(points(200)))
    never.fit(STEPS)
    trainer = trainer_of(data=iter(points(200)))
    trainer.fit(2)
    for strategy, where in (("zero3", "forward"), ("tp", "backward")):
        plans.append(Plan(str(trainer.switch(strategy).new), where, (1,)))
        trainer.fit(1)
    trainer.fit(STEPS - 4)
    return {"never": losses_of(never), "losses": losses_of(trainer), "now": str(trainer.strategy)}


def test_data_that_cannot_be_read_twice_loses_no_batch() -> None:
    for found in run_ranks(once, 2, timeout=120):
        assert found["losses"] == found["never"] and found["now"] == "dp=2"


def tried(world: Any) -> dict[str, Any]:
    never = trainer_of()
    never.fit(STEPS)
    trainer, controls = trainer_of(), TrainingRequestHandler()
    trainer.fit(2)
    plans.append(Plan(ZERO3, "backward", (1,)))
    with pytest.raises(SwitchError) as refused:
        trainer.try_out("zero3", steps=3)
    trainer.switch("zero1")
    with pytest.raises(SwitchError):
        trainer.try_out("zero3", steps=3)
    there = trainer.job.switcher.pending is not None and str(trainer.job.switcher.pending.old), str(trainer.strategy)
    plans.append(Plan("dp=2 zero=1", "forward", (0,)))
    trainer.fit(2)
    asks(trainer, trainer.step + 1, Control("try", "try", {"strategy": "zero3", "steps": 3}))
    trainer.fit(STEPS - trainer.step)
    return {
        "never": losses_of(never),
        "losses": losses_of(trainer),
        "refused": (refused.value.what, refused.value.numbers),
        "there": there,
        "said": controls.result("try")["result"],
        "dirty": trainer.job.integrity.broken_off,
    }


@pytest.mark.long
def test_a_trial_whose_first_step_fails_on_one_rank_is_refused_and_training_goes_on() -> None:
    for found in run_ranks(tried, 2, timeout=120):
        assert found["losses"] == found["never"] and not found["dirty"]
        words = f"{ZERO3} was not measured: its first step failed, and training continues under dp=2."
        assert found["refused"] == (words, "rank 1: ValueError: planted in backward")
        assert found["there"] == ("dp=2", "dp=2 zero=1")
        assert not found["said"]["ok"] and found["said"]["what"] == words


def kept(world: Any) -> list[int]:
    """Return the number of tensors of the failed sharded model that are alive when training goes on."""
    found = []
    for room in ("both", "sides", "one"):
        trainer, controls = trainer_of(), TrainingRequestHandler()
        trainer.fit(2)
        held: list[weakref.ref[Tensor]] = []
        failing = switching.FirstStep._take_back

        def going(self: Any, *args: Any, held: Any = held, trainer: Any = trainer, failing: Any = failing) -> None:
            held.extend(weakref.ref(tensor) for tensor in trainer.job.sharded_model.data.tensors())
            failing(self, *args)

        plans.append(Plan(ZERO3, "backward", (0, 1)))
        gc.collect()
        gc.disable()
        with pytest.MonkeyPatch.context() as patch:
            memory(patch, room)
            patch.setattr(switching.FirstStep, "_take_back", going)
            asked_for(trainer, controls, "zero3")
        gc.enable()
        assert held
        found.append(sum(tensor() is not None for tensor in held))
    return found


@pytest.mark.long
def test_the_memory_of_a_failed_sharded_model_is_freed() -> None:
    assert run_ranks(kept, 2, timeout=120) == [[0, 0, 0]] * 2


def paused(world: Any) -> dict[str, Any]:
    """Switch in a pause, where the answer cannot wait for a step. Return the answers and the losses."""
    never = trainer_of()
    never.fit(STEPS)
    trainer, controls = trainer_of(), TrainingRequestHandler()
    trainer.fit(2)
    plans.append(Plan(ZERO3, "forward", (1,)))
    pause, switch = Control("pause", "pause", {}), Control("switch", "switch", {"strategy": "zero3"})
    asks(trainer, 4, pause, switch, Control("resume", "resume", {}))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(STEPS - trainer.step)
    said = {id: controls.result(id)["result"]["ok"] for id in ("pause", "switch", "resume")}
    return {
        "never": losses_of(never),
        "losses": losses_of(trainer),
        "said": said,
        "warned": [text for each in warned if "taken back" in (text := str(each.message))],
        "now": str(trainer.strategy),
    }


def asks(trainer: Trainer, step: int, *controls: Control) -> None:
    """Post requests on all ranks after `step`."""

    def ask(trainer: Trainer, record: dict[str, Any]) -> None:
        if record["step"] == step:
            for number, control in enumerate(controls, step_boundary.inbox.acted + 1):
                step_boundary.inbox.post(number, "control", control)

    trainer._callbacks = (ask,)


@pytest.mark.long
def test_a_switch_in_a_pause_is_answered_at_once_and_taken_back_when_training_goes_on() -> None:
    for rank, found in enumerate(run_ranks(paused, 2, timeout=120)):
        assert found["losses"] == found["never"] and found["now"] == "dp=2"
        assert found["said"] == {"pause": True, "switch": True, "resume": True}
        assert [f"{ZERO3} was taken back after step" in each for each in found["warned"]] == [True] * (rank == 0)
