"""Test several optimizers in a list or dict: they are scheduled, clipped and saved as one, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import mean_loss, points
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.train.step.optimizer_factory import OptimizerSpec
from nbkit.strategy import Strategy


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    params = list(model.parameters())
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]
    return [SGD(matrices, lr=0.1, momentum=0.9), AdamW(vectors, lr=0.02)]


def warmup(step: int) -> float:
    return min(1.0, (step + 1) / 4)


def rows(step: int) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(part) for part in zip(*points(32)[8 * step % 32 : 8 * step % 32 + 8], strict=True))
    return x.double(), y


def by_hand(steps: int, clip: float, *, schedule: Callable[[int], float] = warmup) -> dict[str, Tensor]:
    """Train in plain torch: both optimizers, one norm of all gradients, one schedule."""
    model = net()
    every = pair(model)
    base = [group["lr"] for each in every for group in each.param_groups]
    for step in range(steps):
        for group, lr in zip((group for each in every for group in each.param_groups), base, strict=True):
            group["lr"] = lr * schedule(step)
        x, y = rows(step)
        model.zero_grad()
        mean_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        for each in every:
            each.step()
    return model.state_dict()


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[key] - value).abs().max()) for key, value in expected.items())


def tried(world: Any) -> dict[str, Any]:
    data = [(x.double(), y) for x, y in points(32)]
    quiet: dict[str, Any] = {"log_dir": None, "progress": False, "loading": nbkit.Loading(shuffle=False)}
    trainer = nbkit.Trainer(
        model=net, loss=mean_loss, optimizer=pair, data=data, batch_size=8, strategy="zero1", clip_norm=0.2,
        lr_schedule=warmup, **quiet,
    )  # fmt: skip
    trainer.fit(3)
    kept = trainer.optimizer.state_dict()
    trainer.optimizer.load_state_dict(kept)
    assert trainer.optimizer.optimizers[1].state is trainer.optimizer.state
    trainer.fit(1)
    trainer.switch("zero3")
    trainer.fit(3)
    found: dict[str, Any] = {
        "trainer": distance(trainer.full_state_dict(), by_hand(7, 0.2)),
        "groups": [sorted(group)[0] for group in trainer.optimizer.param_groups],
        "state": {name: sorted(keys) for name, keys in trainer.job.bytes_per_element().items()},
    }
    half = nbkit.Trainer(
        model=lambda: net().float(), loss=mean_loss, optimizer=pair, data=points(32), batch_size=8, precision="fp16",
        strategy="zero2", **quiet,
    )  # fmt: skip
    half.fit(3)
    found["skipped"] = [record["skipped"] for record in half.history]
    return found | {"own loop": own_loop()}


def own_loop() -> float:
    """Return the difference of a user's own loop, in which a torch scheduler changes one of the two optimizers."""
    model = net()
    every = pair(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(every[0], warmup)
    job = nbkit.prepare(model, every, loss=mean_loss, strategy="zero1", log_dir=None)
    for step, batch in enumerate(job.batches([rows(step) for step in range(4)])):
        job.backward(batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
        scheduler.step()
        if step == 1:
            job.switch("ddp")
    assert every[0].param_groups is job.optimizer.optimizers[0].param_groups
    plain = net()
    alone = pair(plain)
    scheduler = torch.optim.lr_scheduler.LambdaLR(alone[0], warmup)
    for step in range(4):
        plain.zero_grad()
        x, y = rows(step)
        mean_loss(plain(x), y).backward()
        for each in alone:
            each.step()
        scheduler.step()
    return distance(job.full_state_dict(), plain.state_dict())


@pytest.mark.usefixtures("known_to_be_right")
def test_two_optimizers_are_scheduled_clipped_scaled_and_loaded_as_one() -> None:
    first, second = run_ranks(tried, 2, timeout=120)

    assert first == second
    assert first["trainer"] < 1e-12 and first["own loop"] < 1e-12
    assert first["groups"] == ["dampening", "amsgrad"]
    assert first["state"]["0.weight"] == ["momentum_buffer", "weight"]
    assert first["state"]["0.bias"] == ["exp_avg", "exp_avg_sq", "weight"]
    assert first["skipped"] == [0.0, 0.0, 0.0]


def test_parameters_in_none_or_in_two_optimizers_are_refused_by_name() -> None:
    model = net()
    matrices, vectors = pair(model)
    with pytest.raises(TrainingError, match="in two of the optimizers") as twice:
        OptimizerSpec([matrices, vectors, SGD(model[0].parameters(), lr=0.1)], module=model)  # type: ignore[operator]
    with pytest.raises(TrainingError, match="in none of the optimizers") as none:
        OptimizerSpec(lambda model: {"matrices": pair(model)[0]}, module=model)
    model[0].bias.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    OptimizerSpec(lambda model: (pair(model)[0],), module=model).check(Strategy.parse("zero3", 2))
    with pytest.raises(TrainingError, match="optimizer= did not return a torch optimizer"):
        OptimizerSpec(lambda model: [], module=model)
    with pytest.raises(TrainingError, match="optimizer= did not return a torch optimizer"):
        OptimizerSpec(lambda model: [matrices, "AdamW"], module=model)  # type: ignore[list-item,return-value]

    assert twice.value.numbers == "'0.weight', '0.bias', the first in 0 (SGD) and 2 (SGD)"
    assert none.value.numbers == "2 of 4: '0.bias', '2.bias'"


def test_the_name_of_several_optimizers_has_each_name() -> None:
    spec = OptimizerSpec(pair, module=net())
    assert spec.name == "SGD + AdamW" and spec.is_adaptive()
    assert spec.kinds(net())["2.weight"].keys() == {"weight", "momentum_buffer"}
