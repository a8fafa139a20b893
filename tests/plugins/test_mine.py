"""Test that a user's class can replace ddp, zero1 or split linear layers, and that wrong ones get a reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from jobs import SEED, mean_loss, order, points, quiet
from ranks import run_ranks
from torch import nn

import nbkit
from nbkit import techniques
from nbkit.errors import StrategyError, UsageError
from nbkit.rank.telemetry import collectives
from nbkit.rank.train.replace.hand_over import handed_by
from nbkit.rank.train.replace.pickle_by_value import dumps, loads
from nbkit.strategy import Strategy
from nbkit.techniques import judge_schedule
from tests.plugins import solutions


def judged(world: Any) -> dict[str, tuple[bool, str, str]]:
    every, drawn = (*solutions.RIGHT, *solutions.WRONG), torch.get_rng_state()
    found = {own.__name__: nbkit.lesson.judge(own) for own in every}
    assert torch.equal(torch.get_rng_state(), drawn)
    return {name: (one.right, one.numbers, one.cause) for name, one in found.items()}


def test_thirty_wrong_classes_are_detected_with_their_causes() -> None:
    (found,) = run_ranks(judged, 1, timeout=180.0)

    assert {own.__name__: found[own.__name__] for own in solutions.RIGHT if not found[own.__name__][0]} == {}
    assert {own.__name__ for own in solutions.WRONG if found[own.__name__][0]} == set()
    unnamed = {
        own.__name__: found[own.__name__][1:]
        for own, cause in solutions.WRONG.items()
        if cause not in found[own.__name__][2]
    }
    assert unnamed == {}


def test_ten_wrong_schedules_are_detected_with_their_causes() -> None:
    assert judge_schedule(solutions.my_1f1b).right
    found = {build: judge_schedule(build) for build in solutions.WRONG_SCHEDULES}
    assert [build.__name__ for build, one in found.items() if one.right] == []
    unnamed = {
        build.__name__: found[build]
        for build, cause in solutions.WRONG_SCHEDULES.items()
        if cause not in found[build].cause
    }
    assert unnamed == {}


def trained(world: Any) -> dict[str, Any]:
    collectives.set_mode("count")
    for own in solutions.RIGHT:
        techniques.use(own)
    techniques.use(solutions.MyDDP)  # "mine" means the last one
    trainer = quiet(strategy="mine", model=mlp)
    counted = {}
    for strategy in ("mine", "zero1 mine=zero1", "zero3", "tp mine=tp", "ddp"):
        if trainer.step:
            trainer.switch(strategy)
        begin = collectives.ring.end
        trainer.fit(2)
        calls, _ = collectives.ring.between(begin, collectives.ring.end)
        counted[strategy] = Counter((call.op, call.bytes) for call in calls)
    losses = [record["loss"] for record in trainer.history]
    used = [record["strategy"] for record in trainer.history][::2]
    joined = [key.name for key in loads(dumps(handed_by(trainer, trainer.job.strategy))).keys]
    techniques.use(solutions.SumForMean)
    with pytest.raises(StrategyError) as refused:
        trainer.switch("mine")
    return {"losses": losses, "used": used, "refused": str(refused.value), "counted": counted, "joined": joined}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 3))


def alone() -> list[float]:
    torch.manual_seed(SEED)
    model, data, losses = mlp(), points(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        indices = order(len(data), step // 4)[step % 4 * 8 : step % 4 * 8 + 8]
        x, y = torch.stack([data[i][0] for i in indices]), torch.stack([data[i][1] for i in indices])
        optimizer.zero_grad()
        loss = mean_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_own_classes_train_like_one_process_and_can_be_switched() -> None:
    expected = alone()

    for found in run_ranks(trained, 2, timeout=180.0):
        assert found["losses"] == pytest.approx(expected, rel=1e-4)
        assert found["used"] == ["dp=2 mine=ddp", "dp=2 zero=1 mine=zero1", "dp=2 zero=3", "tp=2 mine=tp", "dp=2"]
        assert "a sum where the mean is wanted" in found["refused"] and "is off by" in found["refused"]
        assert found["joined"] == ["mine"]  # a new rank gets the classes
        weights = 16 * 8 * 4  # bytes of each of two matrices
        assert found["counted"]["mine"]["all_reduce", weights] == 2 * 2
        assert [op for op, _ in found["counted"]["zero1 mine=zero1"].elements()].count("reduce_scatter") == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mine", "The strategy 'mine' needs your own class"),
        ("zero2 mine=ddp", "mine=ddp replaces ddp only if all ranks use ddp"),
        ("tp=2 mine=tp", "mine=tp replaces tp only if all ranks use tp"),
        ("ddp mine=ddp compress=int8", "Your own class decides what is sent, so these keys have no effect"),
        ("ddp mine=fsdp", "'mine=fsdp' is not a kind of class"),
    ],
)
def test_a_strategy_that_does_not_fit_an_own_class_is_refused(text: str, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        Strategy.parse(text, 4)


def test_a_class_without_the_methods_of_a_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="zero1: part, reduce, gather"):
        techniques.use(type("Nothing", (), {"part": len}))
    with pytest.raises(UsageError, match="must run on a rank"):
        nbkit.lesson.judge(solutions.MyDDP)
