"""Muon and AdamW on a GPT: matrices are updated whole by their owners, under every strategy as in one process."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import asked_for
from ranks import run_ranks
from replaced_ranks import Seat, run_replaced
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.bridge.training_requests import TrainingRequestHandler
from nbkit.errors import NbkitError, TrainingError
from nbkit.planner.owners import owners, update_cost
from nbkit.rank.comm import delegating_group
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.rank_sync import _plan, _RankState
from nbkit.rank.train.replace.recover import recover
from nbkit.tensor_layout import Layout

CONFIG = GPTConfig(vocab=32, block=16, layers=4, heads=4, width=16)
SAMPLE = ("zero2", "tp=2 pp=2", "dp=4 zero=3 shard=2", "dp=2 tp=2 zero=1")
CHAIN = (
    "zero2", "dp=2 tp=2 zero=1", "dp=4 zero=3 shard=2", "tp=2 pp=2", "dp=2 cp=2 zero=1", "tp", "dp=2 pp=2 zero=2",
    "dp=2 tp=2 zero=3", "zero1",
)  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    return GPT(CONFIG).double()


def muon_and_adamw(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    inside = [p for name, p in named.items() if p.ndim == 2 and name.startswith("blocks.")]
    rest = [p for p in named.values() if not any(p is each for each in inside)]
    return {"muon": torch.optim.Muon(inside, lr=0.02), "adamw": torch.optim.AdamW(rest, lr=0.01)}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def data(num: int = 32) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    rows = [torch.randint(CONFIG.vocab, (17,), generator=draw) for _ in range(num)]
    return [(row[:-1], row[1:]) for row in rows]


def in_one_process(steps: int, clip: float) -> dict[str, Tensor]:
    return after_steps([steps], clip, data())[steps]


def after_steps(
    steps: Collection[int], clip: float, rows: Sequence[tuple[Tensor, Tensor]]
) -> dict[int, dict[str, Tensor]]:
    """Return the weights after each of these numbers of steps in one process."""
    model, found = net(), {}
    every = muon_and_adamw(model).values()
    for step in range(max(steps)):
        batch = [rows[(8 * step + i) % len(rows)] for i in range(8)]
        x, y = (torch.stack(part) for part in zip(*batch, strict=True))
        model.zero_grad()
        loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        for each in every:
            each.step()
        if step + 1 in steps:
            found[step + 1] = {name: value.clone() for name, value in model.state_dict().items()}
    return found


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[key] - value).abs().max()) for key, value in expected.items())


def chained(world: Any, chain: tuple[str, ...]) -> dict[str, Any]:
    """Make a step under each strategy of the chain."""
    trainer = nbkit.Trainer(
        model=net, loss=loss, optimizer=muon_and_adamw, data=data(), batch_size=8, clip_norm=0.5, strategy="zero3",
        log_dir=None, progress=False, loading=nbkit.Loading(shuffle=False),
    )  # fmt: skip
    trainer.fit(1)
    refused, moments, far = [], [], {}
    for number, strategy in enumerate(chain, 2):
        try:
            trainer.switch(strategy)
        except NbkitError as error:
            refused.append(f"{strategy}: {error.what}")
        trainer.fit(1)
        far[strategy] = distance(trainer.full_state_dict(), in_one_process(number, 0.5))
        inner = trainer.job.optimizer.inner
        moments.append(sum("momentum_buffer" in state and p.numel() for p, state in inner.state.items()))
    return {"far": far, "refused": refused, "moments": moments, "steps": trainer.job.sharded_model.plan.steps}


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("chain", [SAMPLE, pytest.param(CHAIN, marks=pytest.mark.long)])
def test_a_gpt_under_muon_and_adamw_is_that_of_one_process_through_a_chain_of_switches(chain: tuple[str, ...]) -> None:
    found = run_ranks(chained, 4, chain, timeout=600)

    for each in found:
        assert each["refused"] == []
        assert max(each["far"].values()) < 1e-9, each["far"]
    matrices = sum(p.numel() for name, p in net().named_parameters() if p.ndim == 2 and name.startswith("blocks."))
    for strategy, here in zip(chain, zip(*(each["moments"] for each in found), strict=True), strict=True):
        copies = 2 if strategy == "dp=2 cp=2 zero=1" else 1
        assert sum(here) == copies * matrices, strategy
    assert any("tensors are updated whole, each by the rank" in step for step in found[0]["steps"])


LIVE = ("zero1", "zero2", "zero3", "hsdp shard=2", "dp=2 tp=2", "dp=2 pp=2 microbatches=2", "dp=2 cp=2", "ddp")
VICTIM, ROWS = 2, 8 * 200

doomed: int | None = None  # on the rank that is to die: after how many steps


def fatal(output: Tensor, target: Tensor) -> Tensor:
    training = step_boundary.training()
    if training is not None and training.step == doomed:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(output, target)


def lived(seat: Seat, folder: str, dies_under: str) -> tuple[dict[int, dict[str, Tensor]], list[str]]:
    """Train through live switches, a save, a load and a death. Return the weights by step, and what was refused."""
    global doomed
    kept: dict[int, dict[str, Tensor]] = {}
    refused: list[str] = []

    def made(strategy: str) -> nbkit.Trainer:
        return nbkit.Trainer(
            model=net, loss=fatal, optimizer=muon_and_adamw, data=data(ROWS), batch_size=8, clip_norm=0.5,
            strategy=strategy, log_dir=None, progress=False, loading=nbkit.Loading(shuffle=False),
            recovery=nbkit.Recovery(backup_every=1),
        )  # fmt: skip

    if seat.new:
        trainer = recover(None, seat.replaced)
    else:
        trainer, controls = made("ddp"), TrainingRequestHandler()
        for strategy in LIVE:
            told = asked_for(trainer, controls, strategy)
            if not told["ok"]:
                refused.append(f"{strategy}: {told}")
            trainer.fit(1)
            kept[trainer.step] = trainer.full_state_dict()
        trainer.save(folder)
        trainer = made(dies_under)
        trainer.load(folder)
        trainer.fit(1)
        kept[trainer.step] = trainer.full_state_dict()
        doomed = trainer.step + 1 if seat.world.place.rank == VICTIM else None
        with pytest.raises((RuntimeError, NbkitError)):
            trainer.fit(3)
        trainer = recover(trainer, seat.form_again())
    trainer.fit(2)
    kept[trainer.step] = trainer.full_state_dict()
    return kept, refused


@pytest.mark.long
@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize("dies_under", ["zero1", "dp=2 tp=2"])
def test_muon_and_adamw_are_those_of_one_process_through_live_switches_a_load_and_a_death(
    tmp_path: Path, dies_under: str
) -> None:
    found = run_replaced(lived, 4, str(tmp_path / "saved"), dies_under, deaths=1, timeout=300)

    steps = {step for kept, _ in found for step in kept}
    expected = after_steps(steps, 0.5, data(ROWS))
    assert len(found[VICTIM][0]) == 1  # the new rank
    for kept, refused in found:
        assert refused == []
        far = {step: distance(weights, expected[step]) for step, weights in kept.items()}
        assert max(far.values()) < 1e-9, far
    assert len({max(kept) for kept, _ in found}) == 1 and len(found[0][0]) == len(LIVE) + 2


def edited(world: Any) -> float:
    """Return how far two steps are from one process, if the weights are changed between them, unseen by autograd."""
    trainer = nbkit.Trainer(
        model=net, loss=loss, optimizer=muon_and_adamw, data=data(), batch_size=8, clip_norm=0.5, strategy="zero3",
        log_dir=None, progress=False, loading=nbkit.Loading(shuffle=False),
    )  # fmt: skip
    plain, rows = net(), data()
    every = muon_and_adamw(plain).values()
    for step in range(2):
        trainer.fit(1)
        x, y = (torch.stack(part) for part in zip(*rows[8 * step : 8 * step + 8], strict=True))
        plain.zero_grad()
        loss(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for each in every:
            each.step()
        for model in (trainer.model, plain):
            for p in model.parameters():
                p.data.mul_(0.9)
    return distance(trainer.full_state_dict(), plain.state_dict())


@pytest.mark.usefixtures("known_to_be_right")
def test_owners_get_weights_that_a_user_has_changed() -> None:
    assert max(run_ranks(edited, 2, timeout=200)) < 1e-9


def own_losses(world: Any) -> dict[str, float]:
    """Return, by strategy, how far three steps of a loop with its own forward and loss are from one process."""
    rows, found = data(), {}
    example = tuple(torch.stack(part[:2]) for part in zip(*rows, strict=True))
    batches = [tuple(map(torch.stack, zip(*rows[8 * n : 8 * n + 8], strict=True))) for n in range(3)]
    for strategy in ("zero1", "zero3", "tp"):
        hints = nbkit.ModelHints(example=example)
        job = nbkit.prepare(net(), muon_and_adamw, loss=loss, strategy=strategy, log_dir=None, hints=hints)
        for batch in job.batches(batches):
            x, y = job.rows(batch)
            job.backward(loss(job.model(x), y))
            job.clip(0.5)
            job.optimizer.step()
            job.optimizer.zero_grad()
        found[strategy] = distance(job.full_state_dict(), in_one_process(3, 0.5))
    return found


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
def test_a_loop_with_its_own_loss_gives_owners_the_gradients_too() -> None:
    for found in run_ranks(own_losses, 2, timeout=200):
        assert max(found.values()) < 1e-9, found


def test_what_an_owner_alone_remembers_is_not_forgotten_when_its_update_was_broken_off() -> None:
    whole = Layout.whole((4, 4))
    weights, kinds = {"weight/a": whole}, {"weight/a": torch.float32}
    source = _RankState(weights, {}, {}, kinds, {})
    owner = _RankState(
        weights, {"momentum_buffer/a": whole}, {"a": whole}, kinds | {"momentum_buffer/a": torch.float32}, {}
    )
    with pytest.raises(TrainingError, match="was interrupted in an update") as refused:
        _plan([source, owner], [0])
    assert "'a'" in (refused.value.numbers or "") and "for rank 1" in (refused.value.numbers or "")
    assert _plan([source, owner], [0, 1]).total_bytes == 0


class Idle(nn.Module):
    """A model with a matrix that no forward pass uses, and one that only some rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = net()
        self.never = nn.Linear(16, 16).double()
        self.seldom = nn.Linear(CONFIG.vocab, CONFIG.vocab, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        y, some = self.gpt(x), x[:, 0] > 15
        return y + some[:, None, None] * self.seldom(y) if bool(some.any()) else y


def everything(model: nn.Module) -> list[torch.optim.Optimizer]:
    params = list(model.parameters())
    return [torch.optim.Muon([p for p in params if p.ndim == 2]), torch.optim.AdamW([p for p in params if p.ndim < 2])]


def idle_steps(world: Any) -> dict[str, Any]:
    """Return, by strategy, how far two steps are from one process, and the bytes of the exchanges of the second."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    plain, rows = Idle(), data()
    start, every = {name: p.detach().clone() for name, p in plain.state_dict().items()}, everything(plain)
    for step in range(2):
        x, y = (torch.stack(part) for part in zip(*rows[8 * step : 8 * step + 8], strict=True))
        plain.zero_grad()
        loss(plain(x), y).backward()
        for each in every:
            each.step()
    for strategy in ("zero1", "zero2", "zero3"):
        model = Idle()
        model.load_state_dict(start)
        trainer = nbkit.Trainer(
            model=model, loss=loss, optimizer=everything, data=rows, batch_size=8, strategy=strategy, log_dir=None,
            progress=False, loading=nbkit.Loading(shuffle=False), compute=nbkit.Compute(microbatch_size=1),
        )  # fmt: skip
        trainer.fit(1)
        predicted = sum(t.bytes for t in trainer.job.cost_model().of_all_ranks(trainer.job.strategy)
                        if t.op == "all_to_all")  # fmt: skip
        sent: list[int] = []

        def heard(operation: str, group: str, num_bytes: int, sent: list[int] = sent) -> None:
            if operation == "all_to_all":
                sent.append(num_bytes)

        delegating_group.listeners.append(heard)
        trainer.fit(1)
        delegating_group.listeners.remove(heard)
        state = trainer.job.optimizer.inner.state
        kept = sum("momentum_buffer" in one for one in state.values())
        found[strategy] = distance(trainer.full_state_dict(), plain.state_dict()), sum(sent), kept, predicted
    return found


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
def test_a_step_sends_what_is_not_owned_once_in_and_once_out() -> None:
    found = run_ranks(idle_steps, 4, timeout=300)

    matrices = [p for p in Idle().parameters() if p.ndim == 2]
    size = sum(p.nbytes for p in matrices)
    for strategy in ("zero1", "zero2", "zero3"):
        far, sent, kept, predicted = zip(*(each[strategy] for each in found), strict=True)
        assert max(far) < 1e-9, strategy
        assert sum(kept) == len(matrices) - 1, strategy  # what is never used has no state
        assert sum(sent) == pytest.approx(predicted[0], rel=0.01), strategy
        if strategy == "zero3":  # the parts of gradients in, of updates out
            assert 2 * size * 3 / 4 <= sum(sent) <= 1.02 * 2 * size * 3 / 4
        else:  # of what a rank hands over, a quarter is its own
            assert sum(sent) * 3 / 4 == pytest.approx(2 * 3 * size, rel=0.02)


GPT2_SMALL = GPTConfig(vocab=50257, block=1024, layers=12, heads=12, width=768)


@pytest.mark.parametrize(
    ("config", "ranks"), [(CONFIG, 4), *((GPT2_SMALL, ranks) for ranks in (2, 3, 4, 5, 6, 8, 12, 16, 24))]
)
def test_owners_share_the_cost_of_updates(config: GPTConfig, ranks: int) -> None:
    with torch.device("meta"):
        named = dict(GPT(config).named_parameters())
    shapes = {name: tuple(p.shape) for name, p in named.items() if p.ndim == 2 and name.startswith("blocks.")}
    found = owners({name: [(rank,) for rank in range(ranks)] for name in shapes}, shapes, ranks)
    cost = Counter[int]()
    for name, rank in found.items():
        cost[rank] += update_cost(shapes[name])

    assert max(cost.values()) <= 1.1 * sum(cost.values()) / ranks


def test_the_cost_of_an_update_is_that_of_its_shorter_side_and_replicas_share_it() -> None:
    assert update_cost((64, 16)) == update_cost((16, 64)) == 16 * 16 * 64
    assert owners({"a": [(0, 2), (1, 3)], "b": [(0, 2), (1, 3)]}, {"a": (4, 4), "b": (4, 4)}, 4) == {"a": 0, "b": 1}
