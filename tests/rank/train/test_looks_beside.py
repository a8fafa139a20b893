"""Test that an open panel and preparations of a switch do not change one bit of a training."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from jobs import quiet
from ranks import run_ranks
from torch import nn

from nbkit.bridge.training_requests import Control, TrainingRequestHandler
from nbkit.rank.train.control import step_boundary
from verify.models import stateful

MODELS = (stateful.Lambdas, stateful.Patched, stateful.OfAnother, stateful.ByGlobal, stateful.CountingLambda)
ASKED = ("pp=2 schedule=zbv microbatches=2", "nonsense=2")  # only a run of the model shows that the first is impossible


def trained(world: Any, model: type[nn.Module], seed: int, looked: bool, asked: str) -> tuple[list[float], int]:
    """Return (losses, panel reads) of 24 steps. looked: with the panel open, and a refused switch to `asked`."""
    controls, looks, over = TrainingRequestHandler(), [0], threading.Event()
    stateful.begin()
    trainer = quiet(model=model, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05), seed=seed)

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
    """Return for each (model, seed) whether the losses were bit-equal, and the number of panel reads."""
    found = []
    for number, seed in cases:
        asked = ASKED[seed % 2]
        with_looks, looks = trained(world, MODELS[number], seed, True, asked)
        step_boundary.inbox.acted = 0
        without, _ = trained(world, MODELS[number], seed, False, asked)
        found.append((with_looks == without, looks))
    return found


_CASES = [[(number, seed) for number in range(len(MODELS))] for seed in range(10)]


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("cases", [_CASES[0], *(pytest.param(some, marks=pytest.mark.long) for some in _CASES[1:])])
def test_losses_are_bit_equal_with_the_panel_open(cases: list[tuple[int, int]]) -> None:
    for found in run_ranks(each, 2, cases, timeout=170):
        assert all(looks for _, looks in found)
        assert [equal for equal, _ in found] == [True] * len(cases)
