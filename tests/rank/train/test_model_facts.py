"""Test that the facts about a model that a strategy needs are found only when the strategy is requested."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from jobs import asked_for, one_process, points, quiet
from ranks import run_ranks
from torch import Tensor, nn

from nbkit.bridge.training_requests import TrainingRequestHandler
from nbkit.rank.parallel import fact_finder
from nbkit.rank.parallel.fact_finder import find_facts
from nbkit.rank.train import builder as building
from nbkit.rank.train.estimate import strategy_table
from nbkit.strategy import Strategy

CUT = {"dp=2 zero=3", "tp=2", "pp=2 schedule=1f1b microbatches=4", "cp=2"}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.up(x).relu()))


def blocks() -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(4)))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + 0.01 * torch.randn_like(x))


def rows() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(8, generator=draw), torch.randn(8, generator=draw)) for _ in range(16)]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def looked_for(patch: pytest.MonkeyPatch) -> list[tuple[set[str], str]]:
    """Return a list that receives (facts, name of the thread) of every analysis of a model from now on."""
    found: list[tuple[set[str], str]] = []

    def finding(module: nn.Module, runs: Any, facts: Any, wanted: Any) -> dict[str, Any]:
        found.append((set(wanted), threading.current_thread().name))
        return find_facts(module, runs, facts, wanted)

    # Analyse in this process, which has the list.
    patch.setattr(building, "aside", lambda work, **_: work())
    patch.setattr(fact_finder, "find_facts", finding)
    return found


def on_demand(world: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        looks = looked_for(patch)
        trainer = quiet(model=blocks, loss=squares, optimizer=adam, data=rows())
        trainer.fit(2)
        at_start = list(looks)
        trainer.switch("zero3")
        trainer.fit(2)
        told = asked_for(trainer, TrainingRequestHandler(), "pp")
        trainer.switch("ddp")
        facts = trainer.job.builder.facts
        asked = [wanted for wanted, _ in looks]
        by_plan = quiet(model=blocks, loss=squares, optimizer=adam, data=rows(), switches={2: "zero3"})
    return {
        "start": at_start,
        "asked": asked,
        "threads": [name for _, name in looks[: len(asked)]],
        "told": (told["ok"], told["result"]["identical"]),
        "known": (facts.looked, facts.chain, facts.costs, facts.gathers, str(facts.proof)),
        "planned": by_plan.job.builder.facts.looked,
    }


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
def test_ddp_finds_no_facts_at_its_start_and_rank_0_finds_them_for_a_switch() -> None:
    first, second = run_ranks(on_demand, 2, timeout=150)
    assert first["start"] == second["start"] == second["asked"] == []
    assert first["asked"] == [{"gathers", "chain"}, {"costs"}]
    assert first["threads"] == ["MainThread", "nbkit-ahead"]  # a thread serves requests during a training
    assert first["told"] == second["told"] == (True, True)
    assert first["known"] == second["known"] and first["known"][1] is not None
    assert first["planned"] == second["planned"] == {"gathers", "chain"}


def in_a_panel(world: Any) -> list[dict[str, tuple[bool, bool]]]:
    def seen(trainer: Any) -> dict[str, tuple[bool, bool]]:
        return {row["strategy"]: (row["ok"], row["untried"]) for row in strategy_table.table(trainer.job)["options"]}

    trainer = quiet(optimizer=adam, data=points(40))
    trainer.fit(1)
    found = [seen(trainer)]
    strategy_table.look_at_all(trainer.job)
    found.append(seen(trainer))
    trainer.job.builder.step_proofs[Strategy.parse("tp=2", 2)] = refused()
    found.append(seen(trainer))
    noisy = quiet(model=Noisy, loss=squares, optimizer=adam, data=rows())
    strategy_table.look_at_all(noisy.job)
    return [*found, seen(noisy)]


def refused() -> Any:
    from nbkit.errors import StrategyError
    from nbkit.rank.parallel.whole_step import StepProof

    return StepProof(StrategyError("planted"))


@pytest.mark.usefixtures("known_to_be_right")
def test_a_row_of_the_panel_fits_only_after_a_run_of_the_model() -> None:
    before, after, planted, noisy = run_ranks(in_a_panel, 2, timeout=100)[0]
    assert {name for name, (_, untried) in before.items() if untried} == CUT
    assert {name for name, (ok, _) in before.items() if ok} == {"dp=2", "dp=2 zero=1", "dp=2 zero=2"}
    assert not any(untried for _, untried in after.values()) and after["tp=2"][0] and after["dp=2 zero=3"][0]
    assert planted["tp=2"] == (False, False)  # its whole step differed
    assert not any(untried for _, untried in noisy.values())  # its draws happen in another process


def beside_draws(world: Any) -> list[bool]:
    trainer = quiet(model=blocks, loss=squares, optimizer=adam, data=rows())
    torch.manual_seed(3)
    looking = threading.Thread(target=strategy_table.look_at_all, args=(trainer.job,))
    looking.start()
    drawn = []
    while looking.is_alive() or not drawn:
        drawn.append(torch.rand(1).item())
    torch.manual_seed(3)
    return [drawn == [torch.rand(1).item() for _ in drawn], trainer.job.builder.facts.chain is not None]


@pytest.mark.usefixtures("known_to_be_right")
def test_an_analysis_during_training_takes_no_random_numbers_from_it() -> None:
    first, second = run_ranks(beside_draws, 2, timeout=100)
    assert first == [True, True] and second == [True, False]


def through(world: Any) -> list[float]:
    trainer = quiet(optimizer=adam, data=points(40))
    for strategy in ("tp", "pp", "zero3", "ddp"):
        trainer.fit(2)
        trainer.switch(strategy)
    trainer.fit(2)
    return [record["loss"] for record in trainer.history]


def test_strategies_with_facts_found_after_the_start_train_as_one_process() -> None:
    losses, _, _ = one_process(points(40), steps=10, optimizer=adam)
    for found in run_ranks(through, 2, timeout=100):
        assert found == pytest.approx(losses, rel=1e-5)
