"""Test that parameters frozen and unfrozen between two steps train as in plain torch, under every strategy."""

from __future__ import annotations

import pytest
import torch
from jobs import points, quiet
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit

FIRST = ("0.", "1.", "2.")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def whole() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Block(), Block(), Block(), nn.Linear(6, 3))


def half() -> nn.Module:
    return train_first(whole(), False)


def train_first(model: nn.Module, trained: bool) -> nn.Module:
    """Unfreeze or freeze the first half, which is the whole first stage of a pipeline."""
    for name, p in model.named_parameters():
        if name.startswith(FIRST):
            p.requires_grad_(trained)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def by_torch(thawed: bool) -> list[float]:
    torch.manual_seed(7)
    model, data, losses = (half if thawed else whole)(), points(), []
    optimizer = adam(model)
    for step in range(6):
        if step in (2, 4):
            train_first(model, thawed is (step == 2))
        x, y = (torch.stack(part) for part in zip(*(data[(step * 8 + i) % 32] for i in range(8)), strict=True))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def by_nbkit(world: object, cases: list[tuple[bool, str]]) -> list[list[float]]:
    found = []
    for thawed, strategy in cases:
        trainer = quiet(
            model=half if thawed else whole, optimizer=adam, strategy=strategy, loading=nbkit.Loading(shuffle=False)
        )
        for change in (thawed, not thawed, None):
            trainer.fit(2)
            if change is not None:
                train_first(trainer.model, change)
        found.append([record["loss"] for record in trainer.history])
    return found


SAMPLE = [(True, "pp"), (False, "pp=2 schedule=zb"), (True, "zero3")]
REST = [
    (thawed, strategy)
    for thawed in (True, False)
    for strategy in ("pp", "pp=2 schedule=zb", "zero1", "zero2", "zero3", "tp")
    if (thawed, strategy) not in SAMPLE
]


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(REST, marks=pytest.mark.long)])
def test_parameters_that_are_unfrozen_and_frozen_train_as_in_one_process(cases: list[tuple[bool, str]]) -> None:
    for found in run_ranks(by_nbkit, 2, cases, timeout=60 + 20 * len(cases)):
        for (thawed, strategy), losses in zip(cases, found, strict=True):
            assert losses == pytest.approx(by_torch(thawed), rel=1e-5), (thawed, strategy)
