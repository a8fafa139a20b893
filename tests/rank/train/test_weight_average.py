"""Test that an average of the weights equals torch's AveragedModel through switches and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import muon_and_adamw
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nbkit
from nbkit.errors import NbkitError, TrainingError
from tests.rank.train.test_optimizers import data, distance, loss, net

DECAY = 0.8
SAMPLE, REST = ("zero1",), ("zero1", "tp", "zero3", "pp", "zero2")
ROWS = 32


def in_one_process(steps: int) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Return the average of plain torch, its loss on all rows, and the weights."""
    model, rows = net(), data()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    every = muon_and_adamw(model)
    for step in range(steps):
        x, y = (torch.stack(part) for part in zip(*(rows[(8 * step + i) % ROWS] for i in range(8)), strict=True))
        model.zero_grad()
        loss(model(x), y).backward()
        for each in every:
            each.step()
        average.update_parameters(model)
    with torch.no_grad():
        x, y = (torch.stack(part) for part in zip(*rows, strict=True))
        evaluated = float(loss(average(x), y))
    return average.module.state_dict(), evaluated, model.state_dict()


def trainer_of(strategy: str, **settings: Any) -> nbkit.Trainer:
    return nbkit.Trainer(
        model=net, loss=loss, optimizer=muon_and_adamw, data=data(), eval_data=data(), batch_size=8, log_dir=None,
        strategy=strategy, progress=False, loading=nbkit.Loading(shuffle=False), **settings,
    )  # fmt: skip


def chained(world: Any, folder: Path, chain: tuple[str, ...]) -> dict[str, Any]:
    """Make a step under each strategy of the chain, save, and continue in a new Trainer under another strategy."""
    average, far = nbkit.WeightAverage(decay=DECAY), {}
    trainer = trainer_of("ddp", callbacks=[average])

    def compare(name: str, steps: int) -> None:
        expected, evaluated, weights = in_one_process(steps)
        with average.shown(trainer):
            off = abs(trainer.evaluate() - evaluated)
            far[name] = max(off, distance(trainer.full_state_dict(), expected))
        far[f"weights after {name}"] = distance(trainer.full_state_dict(), weights)

    with pytest.raises(TrainingError, match="no average") as early, average.shown(trainer):
        pass
    trainer.fit(1)
    for number, strategy in enumerate(chain, 2):
        trainer.switch(strategy)
        trainer.fit(1)
        compare(strategy, number)
    trainer.switch("zero3")
    compare("a switch without a step", len(chain) + 1)
    trainer.save(folder / "with")
    refused = []
    for act in (lambda: trainer.fit(1), lambda: trainer.switch("ddp"), lambda: trainer.save(folder / "other")):
        with pytest.raises(NbkitError, match="put aside") as shown, average.shown(trainer):
            act()
        refused.append(str(shown.value))
    plain = trainer_of("ddp")
    plain.load(folder / "with")
    far["loaded without"] = distance(plain.full_state_dict(), in_one_process(len(chain) + 1)[2])
    trainer = trainer_of("zero2", callbacks=[average])
    trainer.load(folder / "with")
    trainer.fit(1)
    compare("loaded", len(chain) + 2)
    return {"far": far, "early": str(early.value), "refused": refused}


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("chain", [SAMPLE, pytest.param(REST, marks=pytest.mark.long)])
def test_an_average_equals_one_process_through_switches_and_a_checkpoint(
    chain: tuple[str, ...], tmp_path: Path
) -> None:
    for found in run_ranks(chained, 2, tmp_path, chain, timeout=600):
        assert max(found["far"].values()) < 1e-9, found["far"]
        assert "after 0 steps" in found["early"] and len(found["refused"]) == 3


def test_the_averaged_steps_are_those_of_torch() -> None:
    torch.manual_seed(0)
    for settings, function in (
        (nbkit.WeightAverage(decay=0.9), get_ema_multi_avg_fn(0.9)),
        (nbkit.WeightAverage(start=3, every=2), None),
    ):
        model = nn.Linear(4, 3)
        averaged = AveragedModel(model, multi_avg_fn=function)
        optimizer: Any = settings.of(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))(model)
        for step in range(1, 10):
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            if step >= settings.start and (step - settings.start) % settings.every == 0:
                averaged.update_parameters(model)
        found = optimizer.average.of(model.parameters())
        for p, expected in zip(model.parameters(), averaged.module.parameters(), strict=True):
            torch.testing.assert_close(found[p], expected.detach())


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"decay": 1.0}, {"decay": -0.1}, {"start": 0}, {"every": 1.5}):
        with pytest.raises(TrainingError, match="between 0 and 1"):
            nbkit.WeightAverage(**wrong)
