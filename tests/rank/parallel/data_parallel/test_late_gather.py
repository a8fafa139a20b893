"""Test that ZeRO 1 and 2 gather updated weights during the next forward, and no weight is read before it arrives."""

from __future__ import annotations

import copy
import pickle
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import SEED, quiet
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.parallel.data_parallel import zero1_2
from nbkit.rank.parallel.data_parallel.buckets import all_gather
from nbkit.rank.telemetry.phases import clock
from nbkit.rank.train.checkpoint.autosave import place
from nbkit.rank.train.job import prepare
from nbkit.rank.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("known_to_be_right")

STEPS, BATCH = 6, 8


class Hidden:
    """A gather whose result is NaN until somebody has waited for it."""

    def __init__(self, *given: Any) -> None:
        self.came, self.work = all_gather(*given)
        self.matrix = torch.full_like(self.came, torch.nan)

    def wait(self, *timeout: Any) -> bool:
        self.work.wait(*timeout)
        self.matrix.copy_(self.came)
        return True


def hidden(*given: Any) -> tuple[Tensor, Any]:
    work = Hidden(*given)
    return work.matrix, work


class Reader(nn.Module):
    """A model that reads weights in many ways: its own, those of a child that it does not call, tied ones, one that
    only some rows use. held: also those of a list and of an LSTM, which hold tensors outside the modules' own
    dicts."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(4))
        self.listed = [block[2].bias for block in self.blocks] if held else []
        self.recurrent = nn.LSTM(6, 6, batch_first=True) if held else None
        self.uncalled = nn.Linear(6, 6)
        self.seldom = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = x + block(x)
        for bias in self.listed:
            x = x + bias
        x = F.linear(x, self.uncalled.weight, self.uncalled._parameters["bias"])
        if (odd := ids[:, 0] == 3).any():
            x = torch.where(odd[:, None, None], x * dict(self.seldom.named_parameters())["bias"], x)
        return self.head(x if self.recurrent is None else self.recurrent(x)[0])


def model(held: bool = False) -> nn.Module:
    torch.manual_seed(SEED)
    return Reader(held).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def tokens(num: int = BATCH * STEPS) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(11, (6,), generator=draw) for _ in range(num)]
    return [(row[:-1], row[1:]) for row in rows]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def trained(strategy: str, **changed: Any) -> Trainer:
    """Return a trainer whose buckets have a few tensors each."""
    asked: dict[str, Any] = {"model": model, "loss": loss_of, "optimizer": adamw, "data": tokens(), "batch_size": BATCH}
    return quiet(
        **(
            asked
            | {"strategy": strategy, "hints": nbkit.ModelHints(example=torch.zeros(2, 5, dtype=torch.long))}
            | changed
        )
    )


def expected(steps: int = STEPS, held: bool = False) -> tuple[list[float], Tensor]:
    """Return the losses and weights of one process, in the fixed order of the data."""
    whole = model(held)
    optimizer, losses = adamw(whole), []
    order = torch.randperm(len(tokens()), generator=torch.Generator().manual_seed(SEED)).tolist()
    for step in range(steps):
        rows = [tokens()[i] for i in order[step * BATCH : (step + 1) * BATCH]]
        ids, targets = (torch.stack(part) for part in zip(*rows, strict=True))
        loss = loss_of(whole(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in whole.parameters()])


def gap(trainer: Trainer, steps: int = STEPS, held: bool = False) -> float:
    """Return the largest difference of losses and weights from those of one process."""
    losses, weights = expected(steps, held)
    here = trainer.full_state_dict()
    mine = torch.cat([here[name].flatten() for name, _ in model(held).named_parameters()])
    mine_losses = torch.tensor([record["loss"] for record in trainer.history], dtype=torch.float64)
    far = (mine_losses - torch.tensor(losses, dtype=torch.float64)).abs().max()
    return max(float(far), float((mine - weights).abs().max()))


def late(trainer: Any) -> Any:
    return getattr(trainer, "job", trainer).sharded_model.data._late


def read_in_every_way(world: Any, strategy: str, held: bool) -> tuple[float, list[int]]:
    """Return the gap, and for each step the number of buckets that had not arrived when the first block began."""
    zero1_2.all_gather = hidden
    trainer = trained(strategy, model=lambda: model(held))
    seen: list[int] = []
    trainer.model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(late(trainer).missing))  # type: ignore
    trainer.fit(STEPS)
    assert late(trainer).missing == 0 and type(vars(trainer.model)["_parameters"]) is dict
    return gap(trainer, held=held), seen


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "held"), [("zero1", False), ("zero2", False), ("zero2", True)])
def test_forward_waits_only_for_the_weights_that_it_reads(strategy: str, held: bool) -> None:
    for far, seen in run_ranks(read_in_every_way, 2, f"{strategy} bucket=1kb", held):
        assert far < 1e-12
        # Before the first step there is no update. The memory of the second step is counted, which reads all weights
        # before its forward and after its update, so the third step finds them whole too.
        assert seen[:3] == [0, 0, 0] and (min(seen[3:]) > 0) is not held, seen


def boundaries(world: Any, folder: str) -> dict[str, Any]:
    """Return the gap after each action that reads or writes weights between steps: switch, save, load, rewind."""
    zero1_2.all_gather = hidden
    found: dict[str, Any] = {}
    switches = {1: "zero2 bucket=1kb", 2: "zero3", 3: "zero1 bucket=1kb", 4: "ddp", 5: "zero1 bucket=1kb"}
    trainer = trained("zero1 bucket=1kb", switches=switches)
    trainer.fit(STEPS)
    found["switches"] = gap(trainer)
    trainer = trained(
        "zero1 bucket=1kb",
        checkpoints=nbkit.Checkpoints(path=folder, every=1, keep=9),
        eval_data=tokens(6),
        eval_every=2,
    )
    trainer.fit(STEPS)
    found["saved"] = gap(trainer)
    for step in (2, 5):
        other = trained("ddp")
        other.load(place(Path(folder), step))
        other.fit(until=STEPS)
        found[f"loaded after {step}"] = gap(other)
    trainer = trained("zero2 bucket=1kb", checkpoints=nbkit.Checkpoints(snapshot_every=2))
    trainer.fit(5)
    found["rewound to"] = trainer.rewind(2)
    trainer.fit(until=STEPS)
    found["rewound"] = gap(trainer)
    return found


@pytest.mark.long
def test_switch_save_load_and_rewind_between_steps_find_whole_weights(tmp_path: Path) -> None:
    for found in run_ranks(boundaries, 2, str(tmp_path)):
        assert found.pop("rewound to") == 2
        assert max(found.values()) < 1e-12, found


def held_by_the_user(world: Any) -> dict[str, Any]:
    """Hold references to the parameters, as a callback or a user's own loop may."""
    zero1_2.all_gather = hidden
    seen: dict[str, Any] = {"called back": [], "by hand": []}
    trainer: Any = None

    def called(_: Any, record: dict[str, Any]) -> None:
        seen["called back"].append(late(trainer).missing)

    trainer = trained("zero1 bucket=1kb", callbacks=[called])
    trainer.fit(3)
    job = prepare(model, adamw, loss=loss_of, strategy="zero1 bucket=1kb", log_dir=None)
    batches = [tuple(torch.stack(part) for part in zip(*tokens(8)[start : start + 4], strict=True)) for start in (0, 4)]
    for batch in job.batches(batches):
        job.backward(batch)
        job.optimizer.step()
        seen["by hand"].append(late(job).missing)
        job.optimizer.zero_grad()
    trainer._callbacks = ()
    # A copy of the model during a forward has whole weights.
    copied: list[Tensor] = []

    def copy_all(whole: nn.Module, _: Any) -> None:
        missing = late(trainer).missing
        for other in (copy.deepcopy(whole), copy.copy(whole)):
            copied.extend(p.detach().flatten() for p in other.parameters())
        state = pickle.loads(pickle.dumps(vars(whole.head)["_parameters"]))
        copied.append(state["weight"].detach().flatten())
        seen["copied while missing"] = missing

    trainer.model.register_forward_pre_hook(copy_all)
    trainer.fit(2)
    seen["copied"] = bool(torch.cat(copied).isfinite().all())
    return seen


def test_callbacks_loops_and_copies_always_see_whole_weights() -> None:
    for found in run_ranks(held_by_the_user, 2):
        assert found["called back"] == [0, 0, 0] and found["by hand"] == [0, 0]
        assert found["copied while missing"] > 0 and found["copied"]


def shown(world: Any) -> tuple[list[list[str]], float]:
    """Return the phases of the training thread in each step, in order, and the gap. Rank 1 sends its updates late."""
    steps: list[list[str]] = []
    listener = lambda step: steps.append([state for state, _, _ in step.intervals()])  # noqa: E731
    clock.listeners.append(listener)
    if world.place.rank == 1:
        gather = zero1_2.ShardBucket.gather

        def slowly(bucket: Any) -> Any:
            time.sleep(0.05)
            return gather(bucket)

        zero1_2.ShardBucket.gather = slowly  # type: ignore[method-assign]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        # A loss may read weights itself, for a penalty.
        assert trainer is None or late(trainer).missing == 0
        return loss_of(output, target)

    trainer: Any = None
    trainer = trained("zero1 bucket=1kb", loss=loss)
    clock.begin()
    try:
        trainer.job.ledger.after_step = lambda record: clock.step(trainer.step)
        trainer.fit(STEPS)
    finally:
        clock.end()
        clock.listeners.remove(listener)
    return steps, gap(trainer)


def test_a_late_gather_is_recorded_as_a_wait_in_forward() -> None:
    for rank, (steps, far) in enumerate(run_ranks(shown, 2)):
        assert far < 1e-12
        waits = [one for one in steps if any(a == "forward" and b.startswith("wait") for a, b in pairwise(one))]
        # The first step finds whole weights. The memory of the second step is counted, which reads the weights earlier.
        assert rank or len(waits) >= STEPS - 3, steps


class Torn(torch.optim.AdamW):
    """AdamW that is interrupted in its third step, if `here` is set."""

    here, steps = False, 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.here and self.steps == 3:
            raise KeyboardInterrupt
        super().step()


def interrupted(world: Any, torn: bool) -> dict[str, Any]:
    """Interrupt all ranks in the forward of step 4, before all weights arrive. torn: rank 1 in the update before it."""
    zero1_2.all_gather = hidden
    trainer = trained("zero1 bucket=1kb", optimizer=lambda model: Torn(model.parameters(), lr=0.05))
    missing: list[int] = []

    def interrupt(*_: Any) -> None:
        Torn.here = torn and world.place.rank == 1  # not earlier: copies of the optimizer are tried when a run begins
        if trainer.step == 3 and not missing:
            missing.append(late(trainer).missing)
            raise KeyboardInterrupt

    trainer.model.register_forward_pre_hook(interrupt)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(STEPS)
    found: dict[str, Any] = {"seconds": time.monotonic() - began, "missing": missing}
    assert late(trainer).missing == 0 and type(vars(trainer.model)["_parameters"]) is dict
    try:
        trainer.fit(until=STEPS)
        found["gap"] = gap(trainer)
    except TrainingError as error:
        found["error"] = str(error)
    return found


def test_an_interrupt_during_a_late_gather_loses_no_step() -> None:
    for found in run_ranks(interrupted, 2, False):
        assert found["missing"][0] > 0 and found["gap"] < 1e-12


def test_a_rank_interrupted_in_its_update_is_reported_and_no_rank_waits_for_it() -> None:
    first, second = run_ranks(interrupted, 2, True)
    assert first["missing"][0] > 0 and second["missing"] == []
    assert "no rank has whole weights" in first["error"] and first["error"] == second["error"]
