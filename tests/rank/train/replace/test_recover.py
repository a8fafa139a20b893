"""A rank that is killed within a step is replaced, and the losses are those of a run in which nobody died."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from jobs import quiet
from ranks import run_ranks
from replaced_ranks import Seat, run_replaced
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import NbkitError, TrainingError
from nbkit.rank.comm.delegating_group import Broken, registered
from nbkit.rank.models.gpt import GPT, Block, GPTConfig
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.replace import backup
from nbkit.rank.train.replace.backup import Backups
from nbkit.rank.train.replace.recover import recover
from nbkit.rank.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("rows_are_known")

STEPS, KILLED_IN = 5, 3


class Case(NamedTuple):
    strategy: str
    victim: int
    place: str


# One rank stays to the end, and knows of all. Here rank 0 dies too, and groups are made again.
REPLICATED = [
    Case("hsdp shard=2", 1, "backward"),
    Case("dp=2 pp=2 microbatches=2", 0, "forward"),
]
ALSO_REPLICATED = [
    Case("ddp", 0, "forward"),
    Case("cp=4", 1, "forward"),
]

# More cases are below: a rank that dies while its backup is on its way, and two at once.
HELD_ONCE = [
    Case("dp=2 tp=2", 3, "updated"),  # its own update; on a pretended GPU those of the others: test_gpu_check.py
    Case("zero3", 1, "backward"),
    Case("zero1", 1, "updated"),
    Case("tp=4", 3, "backward"),
    Case("pp=4 microbatches=4", 2, "forward"),
]

HALF_SENT = Case("zero3", 1, "")

doomed: str = ""  # on the rank that is to die: where in step KILLED_IN + 1


def pass_by(place: str) -> None:
    training = step_boundary.training()
    if doomed == place and training is not None and training.step == KILLED_IN:
        os.kill(os.getpid(), signal.SIGKILL)


class Passing(Block):
    def forward(self, x: Tensor) -> Tensor:
        pass_by("forward")
        y = super().forward(x)
        if y.requires_grad and doomed == "backward":
            y.register_hook(lambda grad: pass_by("backward"))
        return y


class Update(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        pass_by("update")
        super().step()
        pass_by("updated")


def model() -> GPT:
    made = GPT(GPTConfig(vocab=24, block=8, layers=4, heads=4, width=16, dropout=0.1))
    for block in made.blocks:
        block.__class__ = Passing
    return made.double()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def rows() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(24, (2, 8), generator=draw)) for _ in range(36)]


def made(strategy: str, **more: Any) -> Trainer:
    return quiet(
        loss=loss,
        data=rows(),
        strategy=strategy,
        clip_norm=1.0,
        lr_schedule=lambda step: 1 / (1 + step),
        **{"model": model, "optimizer": lambda m: Update(m.parameters(), lr=0.01), **more},
    )


def muon_and_update(model: nn.Module) -> list[torch.optim.Optimizer]:
    params = list(model.parameters())
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]
    return [torch.optim.Muon(matrices, lr=0.02), Update(vectors, lr=0.01)]


def undisturbed(world: Any, **more: Any) -> list[float]:
    trainer = made("ddp", **more)
    trainer.fit(STEPS)
    return [record["loss"] for record in trainer.history]


def survived(seat: Seat, cases: list[Case], **more: Any) -> dict[Case, dict[str, Any]]:
    """Return what became of each case. A new rank knows only the cases since it came."""
    global doomed
    found = {}
    for number, case in enumerate(cases):
        if number < seat.deaths - seat.new:
            continue
        before: set[int] | None = None
        if seat.new:
            trainer, seat.new = recover(None, seat.replaced), False
        else:
            doomed = case.place if seat.world.place.rank == case.victim else ""
            trainer = made(case.strategy, **more)
            with pytest.raises((RuntimeError, NbkitError)):
                trainer.fit(STEPS)
            before = memory(trainer)
            trainer = recover(trainer, seat.form_again())
        stood, kept = trainer.step, before is None or before == memory(trainer)
        trainer.fit(until=STEPS)
        groups = sum(not isinstance(group.inner, Broken) for group in registered())
        found[case] = {"stood": stood, "kept": kept, "groups": groups, "losses": [r["loss"] for r in trainer.history]}
    return found


def memory(trainer: Trainer) -> set[int]:
    """Return the addresses of this rank's weights and optimizer state."""
    state = job_state.state(trainer.job.sharded_model, trainer.job.optimizer.inner)
    return {tensor.untyped_storage().data_ptr() for tensor, _ in state.values()}


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return run_ranks(undisturbed, 1)[0]


@pytest.mark.long
@pytest.mark.parametrize("cases", [REPLICATED, ALSO_REPLICATED])
def test_a_rank_that_others_replicate_is_replaced_in_mid_step(cases: list[Case], expected: list[float]) -> None:
    found = run_replaced(survived, 4, cases, deaths=len(cases), timeout=120)

    check(found, cases, expected)
    # Flat parts are copied. Everything else of the ranks that are left stays where it is.
    assert [by_case[case]["kept"] for by_case in found for case in by_case if "hsdp" not in case.strategy] != []
    assert all(told["kept"] for by_case in found for case, told in by_case.items() if "hsdp" not in case.strategy)


def protected(seat: Seat, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    return survived(seat, cases, recovery=nbkit.Recovery(backup_every=1))


@pytest.mark.long
def test_a_rank_that_alone_holds_its_part_is_replaced_from_its_backup(expected: list[float]) -> None:
    found = run_replaced(protected, 4, HELD_ONCE, deaths=len(HELD_ONCE), timeout=170)

    check(found, HELD_ONCE, expected)


WITH_OWNERS = [Case("zero1", 1, "backward"), Case("dp=2 tp=2", 3, "forward"), Case("zero3", 2, "updated")]


def owning(seat: Seat) -> dict[Case, dict[str, Any]]:
    return survived(seat, WITH_OWNERS, recovery=nbkit.Recovery(backup_every=1), optimizer=muon_and_update)


def undisturbed_muon(world: Any) -> list[float]:
    return undisturbed(world, optimizer=muon_and_update)


@pytest.mark.long
def test_the_owner_of_whole_tensors_is_replaced_from_its_backup() -> None:
    found = run_replaced(owning, 4, deaths=len(WITH_OWNERS), timeout=170)

    check(found, WITH_OWNERS, run_ranks(undisturbed_muon, 1)[0])


SPREAD = [Case("ep=2", 1, "backward"), Case("ep=4 experts=0:0-3+1:1-2", 2, "forward"), Case("zero3 ep=2", 0, "updated")]


class Routed(nn.Module):
    """A mixture in which each token goes to one of four experts."""

    def __init__(self, up: nn.Linear) -> None:
        super().__init__()
        self.router = nn.Linear(up.in_features, 4)
        self.experts = nn.ModuleList(nn.Linear(up.in_features, up.out_features) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, choice = self.router(tokens).softmax(-1).max(-1)
        made = tokens.new_zeros(len(tokens), self.experts[0].out_features)
        for number, expert in enumerate(self.experts):
            mine = (choice == number).nonzero().flatten()
            if len(mine):
                made = made.index_add(0, mine, expert(tokens[mine]) * weights[mine, None])
        return made.unflatten(0, x.shape[:2])


def mixture() -> GPT:
    made = model()
    for block in made.blocks:
        block.up = Routed(block.up)
    return made.double()


def spreading(seat: Seat) -> dict[Case, dict[str, Any]]:
    return survived(seat, SPREAD, recovery=nbkit.Recovery(backup_every=1), model=mixture)


def undisturbed_mixture(world: Any) -> list[float]:
    return undisturbed(world, model=mixture)


@pytest.mark.long
def test_a_rank_that_holds_experts_is_replaced_in_mid_exchange() -> None:
    """The others wait for it in a dispatch, forward or backward, and go on with the experts that it held."""
    found = run_replaced(spreading, 4, deaths=len(SPREAD), timeout=170)

    check(found, SPREAD, run_ranks(undisturbed_mixture, 1)[0])


def half_sent(seat: Seat) -> dict[Case, dict[str, Any]]:
    """Withhold the backup share of the rank that dies, so that it never arrives."""
    send = dist.isend

    def withheld(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        training = step_boundary.training()
        if kwargs.get("tag") == backup._STATE and training is not None and training.step == KILLED_IN:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return None
        return send(tensor, *args, **kwargs)

    if seat.world.place.rank == HALF_SENT.victim and not seat.new:
        dist.isend = withheld
    return protected(seat, [HALF_SENT])


def test_no_rank_leaves_a_step_before_all_have_the_backup_that_it_began_with(expected: list[float]) -> None:
    """The ranks that live have been through forward and backward, and all go back to the backup before."""
    for told in run_replaced(half_sent, 2, deaths=1, timeout=60):
        assert told[HALF_SENT]["stood"] == KILLED_IN - 1
        assert told[HALF_SENT]["losses"] == pytest.approx(expected, rel=1e-10)


def passes(world: Any) -> list[str]:
    """Return the order of this rank's backward passes of blocks and its waits for a backup that is under way."""
    log, wait = list[str](), Backups.wait

    class Told(Passing):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: log.append("backward"))
            return y

    def waited(backups: Backups) -> None:
        if backups.under_way:
            log.append("wait")
        wait(backups)

    Backups.wait = waited  # type: ignore[method-assign]
    trainer = made("zero3", recovery=nbkit.Recovery(backup_every=1))
    for module in trainer.model.modules():
        if isinstance(module, Passing):
            module.__class__ = Told
    trainer.fit(3)
    return log


@pytest.mark.long
def test_a_backup_travels_beside_the_backward_pass_too() -> None:
    for log in run_ranks(passes, 2):
        assert log == [*["backward"] * 4, "wait"] * 3


def of_one_pipeline(world: Any) -> list[float]:
    trainer = made("pp=2 microbatches=2", recovery=nbkit.Recovery(backup_every=2))
    trainer.fit(STEPS)
    return [record["loss"] for record in trainer.history]


@pytest.mark.long
def test_the_numbers_of_a_step_in_one_pipeline_are_summed_while_a_backup_travels_too(expected: list[float]) -> None:
    for losses in run_ranks(of_one_pipeline, 2):
        assert losses == pytest.approx(expected, rel=1e-12)


def crowded(world: Any) -> tuple[list[str], list[bool]]:
    os.environ["NBKIT_MEMORY_LIMIT"] = "1"
    trainer, said, on = made("zero3"), [], []
    for every in (None, 3, None):
        trainer.job.backups.begin(every, said.append)
        trainer.job.back_up()
        on.append(trainer.job.backups.on)
    return said, on


def ended_apart(world: Any) -> list[float]:
    """Let one rank's `fit` end with an error behind its last step, and not the other's. Both train on."""

    def fail(*, keep: int = 0, act: bool = False) -> None:
        if act and not keep:
            raise ValueError("planted")
        settle(keep=keep, act=act)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return receive(*args, **kwargs)

    trainer, receive = made("zero1", recovery=nbkit.Recovery(backup_every=1)), dist.recv
    settle = trainer.job.ledger.settle
    with pytest.MonkeyPatch.context() as patch:
        if world.place.rank == 0:
            patch.setattr(dist, "recv", late)  # the other one has ended before all of its backup is here
        else:
            patch.setattr(trainer.job.ledger, "settle", fail)
        with pytest.raises(ValueError, match="planted") if world.place.rank == 1 else nullcontext():
            trainer.fit(2)
    trainer.fit(until=STEPS)
    return [record["loss"] for record in trainer.history]


@pytest.mark.long
def test_backups_go_on_where_fit_has_ended_on_one_rank_by_an_error(expected: list[float]) -> None:
    for losses in run_ranks(ended_apart, 2, timeout=60):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_backups_that_would_fill_a_host_are_not_made_unasked() -> None:
    for said, on in run_ranks(crowded, 2):
        assert on == [False, True, False]
        assert len(said) == 2 and all(text.startswith("no backups: they would take") for text in said)


def lost(seat: Seat) -> dict[str, Any]:
    """Let two ranks die at once, each the other's buddy: without a checkpoint, and with one of step 2."""
    global doomed
    said: dict[str, Any] = {}
    for number, saved in enumerate((False, True)):
        if number < seat.deaths - seat.new:
            continue
        new, seat.new = seat.new, False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if new:
                    trainer = recover(None, seat.replaced)
                else:
                    doomed = ""
                    trainer = made("zero3", recovery=nbkit.Recovery(backup_every=1))
                    if saved:
                        trainer.fit(2)
                        trainer.save("saved")
                    doomed = "backward" if seat.world.place.rank in (0, 2) else ""
                    with pytest.raises((RuntimeError, NbkitError)):
                        trainer.fit(until=STEPS)
                    trainer = recover(trainer, seat.form_again())
            except TrainingError as error:
                said["error"] = str(error)
                continue
        said["stood"] = trainer.step
        trainer.fit(until=STEPS)
        said["losses"] = [record["loss"] for record in trainer.history]
        said["warned"] = [str(w.message) for w in caught if "checkpoint" in str(w.message)]
    return said


@pytest.mark.long
def test_where_both_who_held_a_part_die_the_last_checkpoint_is_read_and_without_one_it_says_so(
    expected: list[float],
) -> None:
    found = run_replaced(lost, 4, deaths=2, together=2, timeout=120)

    for rank in (1, 3):
        assert (
            "No rank and no backup has the state" in found[rank]["error"] and "exp_avg/blocks.0" in found[rank]["error"]
        )
    for one in found:
        assert one["stood"] == 2 and one["losses"] == pytest.approx(expected, rel=1e-10)
    assert "of step 2" in found[0]["warned"][0]


def check(found: list[dict[Case, dict[str, Any]]], cases: list[Case], expected: list[float]) -> None:
    for case in cases:
        known = [of_rank[case] for of_rank in found if case in of_rank]
        for one in known:
            assert one["losses"] == pytest.approx(expected, rel=1e-10), case
        # A new rank has the groups of its strategy. Other ranks must not keep more, which each death would form again.
        assert len({one["groups"] for one in known}) == 1, [one["groups"] for one in known]
        # If a rank dies while its newest backup is on its way, all go back to the one before. If it dies after its own
        # update, others may have made theirs.
        stood = {one["stood"] for one in known}
        assert len(stood) == 1 and abs(stood.pop() - KILLED_IN) <= 1, case
