"""Test that a plan of switches acts like switches by hand, and its errors are reported before any step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import quiet
from ranks import run_ranks
from torch import Tensor, nn

from nbkit.errors import NbkitError, StrategyError, TrainingError
from nbkit.rank.train.control.switch_plan import SwitchPlan
from nbkit.rank.train.resize.plan_resize import planned


def refusal(*, told: bool = False, **settings: Any) -> str:
    try:
        quiet(**settings)
    except NbkitError as error:
        return str(error) if told else type(error).__name__
    return ""


class Lookahead(torch.optim.SGD):
    """SGD with slow weights in a list, which its first step makes."""

    slow: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        self.slow = [p.clone() for p in params] if self.slow is None else self.slow
        super().step()
        for slow, p in zip(self.slow, params, strict=False):
            p.copy_(slow.lerp_(p, 0.5))


class Recurring(nn.Module):
    """A model whose rows depend on each other, so a pipeline's micro-batches would change it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x - x.mean(0)


def planned_in_vain(world: Any) -> list[str]:
    def lookahead(model: nn.Module) -> Lookahead:
        return Lookahead(model.parameters(), lr=0.1)

    said = [
        refusal(told=True, optimizer=lookahead, switches={2: "ddp", 5: "pp"}),
        refusal(told=True, model=Recurring, strategy="tp", switches={5: "pp microbatches=2"}),
    ]
    quiet(optimizer=lookahead, switches={5: "ddp"})  # the same strategy, so no switch
    wanted = planned(quiet(switches={5: "zero3"}), 1, "", ())
    return [*said, str(wanted.strategy)]


@pytest.mark.long
def test_a_plan_that_optimizer_or_model_forbids_is_refused_before_any_step() -> None:
    for optimizer, model, resized in run_ranks(planned_in_vain, 2):
        assert optimizer.startswith("A switch to pp=2") and "all that Lookahead remembers under dp=2" in optimizer
        assert "pp=2" in model and "row" in model
        assert resized == "dp=1"


def planned_and_by_hand(world: Any, folder: Path) -> dict[str, Any]:
    by_hand = quiet(strategy="ddp")
    by_hand.fit(2)
    by_hand.switch("zero3")
    by_hand.fit(1)
    by_hand.switch("tp")
    by_hand.fit(2)
    by_hand.save(folder / "saved")

    planned = quiet(strategy="zero1", switches=folder / "plan.json")
    planned.fit(5)
    # After a resume in the middle, the plan's strategy of the earlier steps is used.
    again = quiet(switches={2: "zero3", 7: "ddp"})
    again.load(folder / "saved")
    again.fit(3)
    return {
        "by hand": [(record["loss"], record["strategy"]) for record in by_hand.history],
        "planned": [(record["loss"], record["strategy"]) for record in planned.history],
        "again": [record["strategy"] for record in again.history][5:],
        "refused": [refusal(switches={3: "tp=3"}), refusal(switches={3: "dp=1 pp=2 microbatches=7"})],
    }


def test_a_plan_gives_the_same_training_as_switches_by_hand(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"0": "ddp", "2": "zero3", "3": "tp"}))

    found = run_ranks(planned_and_by_hand, 2, tmp_path)[0]

    assert found["planned"] == found["by hand"]
    assert [strategy.split()[-1] for _, strategy in found["planned"]] == ["dp=2", "dp=2", "zero=3", "tp=2", "tp=2"]
    assert [strategy.split()[-1] for strategy in found["again"]] == ["zero=3", "zero=3", "dp=2"]
    assert found["refused"] == [StrategyError.__name__, TrainingError.__name__]


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"soon": "ddp"}', '{"-1": "ddp"}', '{"3": 4}'])
def test_a_file_without_a_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)

    with pytest.raises(TrainingError, match="plan of switches cannot be read"):
        SwitchPlan(tmp_path / "plan.json")


def test_an_interrupted_switch_is_due_again_on_every_rank() -> None:
    """Ask twice for step 5: lack of memory on one rank interrupts a switch, and all ranks begin it again."""
    plan = SwitchPlan({3: "tp", 5: "zero3", 9: "ddp"})

    assert [plan.due(2), plan.due(5), plan.due(5)] == [None, "zero3", "zero3"]
    plan.done(5)
    assert [plan.due(5), plan.due(8), plan.due(9)] == [None, None, "ddp"]
