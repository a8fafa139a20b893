"""Looks of a panel and preparations of a switch beside a training: its numbers are those without, to the last bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import quiet
from ranks import run_ranks
from torch import Tensor, nn

from nbkit.bridge.training_requests import Control, Controls
from nbkit.rank.train.control import step_boundary

CALLS = {"forward": 0}


class Lambdas(nn.Module):
    """Calls its blocks by lambdas in a list, which hold the module that they were made from."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.ops: list[Callable[[Tensor], Tensor]] = [lambda x, i=i: x + self.blocks[i](x).tanh() for i in range(3)]
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for op in self.ops:
            x = op(x)
        return self.head(x)


class Patched(nn.Module):
    """A layer whose forward was replaced by a function around the old one, as adapters are put in."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        old, self.low, self.high = self.body.forward, nn.Linear(6, 2), nn.Linear(2, 6)
        self.body.forward = lambda x: old(x) + self.high(self.low(x))  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Counting(nn.Module):
    """Anneals by a count in a global, which every forward in this process would move."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        return self.head((self.body(x) * (1 + 1 / (10 + CALLS["forward"]))).tanh())


class Inner(nn.Module):
    """Holds a function of another part of the same model, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mix = nn.Linear(6, 6), nn.Linear(6, 6)
        self.ways = {"mix": lambda x: self.mix(self.body(x)).tanh()}
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ways["mix"](x) + x)


MODELS = (Lambdas, Patched, Counting, Inner)
ASKED = ("zero3", "tp", "pp", "zero1", "cp")


def trained(world: Any, model: type[nn.Module], seed: int, looked: bool, asked: str) -> tuple[list[float], int]:
    """(losses, looks that were made) of 24 steps, with the panel open and `asked` refused at a boundary, or without."""
    controls, looks, over = Controls(), [0], threading.Event()
    CALLS["forward"] = 0
    trainer = quiet(model=model, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05), seed=seed)
    CALLS["forward"] = 0

    def open_panel() -> None:
        while not over.wait(0.01):
            controls.strategies()
            looks[0] += 1

    def called(trainer: Any, record: dict[str, Any]) -> None:
        if looked and record["step"] == 2:
            step_boundary.inbox.post(1, "control", Control("a", "switch", {"strategy": asked}))
        time.sleep(0.02)

    trainer._callbacks = (called,)
    panel = threading.Thread(target=open_panel)
    if looked:
        panel.start()
    losses = [record["loss"] for record in trainer.fit(24)]
    over.set()
    if looked:
        panel.join()
        if controls._looking is not None:
            controls._looking.join()
    return losses, looks[0]


def each(world: Any, cases: list[tuple[int, int]]) -> list[tuple[bool, int]]:
    """Of each (model, seed): whether the losses were bit-equal, and how many looks there were."""
    found = []
    for number, seed in cases:
        asked = "nonsense=2"  # refused wherever it is asked for
        with_looks, looks = trained(world, MODELS[number], seed, True, asked)
        step_boundary.inbox.acted = 0
        without, _ = trained(world, MODELS[number], seed, False, asked)
        found.append((with_looks == without, looks))
    return found


_CASES = [(number, seed) for seed in range(13) for number in range(len(MODELS))][:50]


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("cases", [_CASES[:4], pytest.param(_CASES[4:], marks=pytest.mark.long)])
def test_losses_are_bit_equal_with_the_panel_open(cases: list[tuple[int, int]]) -> None:
    for found in run_ranks(each, 2, cases, timeout=60 + 10 * len(cases)):
        assert all(looks for _, looks in found)
        assert [equal for equal, _ in found] == [True] * len(cases)
