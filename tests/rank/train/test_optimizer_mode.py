"""Test that `eval()` and `train()` of a schedule-free optimizer change the weights of all ranks as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import mean_loss, points
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.train.step.optimizer_factory import OptimizerSpec
from nbkit.strategy import Strategy

DATA = [(x.double(), y) for x, y in points(32)]


class ScheduleFree(Optimizer):
    """SGD with the interface of the package schedulefree: it refuses a step before `train()` and after `eval()`.

    whole: divide each gradient by its norm, so one rank must update the whole tensor.
    """

    def __init__(self, params: Any, lr: float = 0.05, *, whole: bool = False) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "whole": whole, "train_mode": False})

    @torch.no_grad()
    def _turn(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 0.1 if train else 1 - 1 / 0.9)
                group["train_mode"] = train

    def train(self) -> None:
        self._turn(True)

    def eval(self) -> None:
        self._turn(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("the optimizer is not in train mode")
        for group in self.param_groups:
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                way = p.grad / p.grad.norm() if group["whole"] else p.grad
                p.lerp_(z, 1 / group["k"]).sub_(group["lr"] * (1 - 0.9 / group["k"]) * way)
                z.sub_(group["lr"] * way)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def alone(model: nn.Module) -> Optimizer:
    optimizer = ScheduleFree(model.parameters())
    optimizer.train()
    return optimizer


def whole(model: nn.Module) -> list[Optimizer]:
    params = list(model.parameters())
    free = ScheduleFree([p for p in params if p.ndim > 1], whole=True)
    free.train()
    return [free, SGD([p for p in params if p.ndim == 1], lr=0.1)]


def by_hand(make: Any) -> list[dict[str, Tensor]]:
    """Return the weights of plain torch after 3 steps in `eval()`, and after `train()` and 2 more steps."""
    model, found = net(), []
    made = make(model)
    every = made if isinstance(made, list) else [made]
    for step in range(5):
        x, y = (torch.stack(part) for part in zip(*DATA[8 * step % 32 : 8 * step % 32 + 8], strict=True))
        model.zero_grad()
        mean_loss(model(x), y).backward()
        for each in every:
            each.step()
        if step == 2:
            every[0].eval()
            found.append({name: p.detach().clone() for name, p in model.state_dict().items()})
            every[0].train()
    return [*found, model.state_dict()]


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[key] - value).abs().max()) for key, value in expected.items())


def turned(world: Any, strategies: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for make in (alone, whole):
        shown, last = by_hand(make)
        for strategy in strategies:
            first, second = strategy.split(" > ")
            trainer = nbkit.Trainer(
                model=net, loss=mean_loss, optimizer=make, data=DATA, batch_size=8, strategy=first, log_dir=None,
                progress=False, loading=nbkit.Loading(shuffle=False),
            )  # fmt: skip
            trainer.fit(3)
            trainer.optimizer.eval()
            far = [distance(trainer.full_state_dict(), shown)]
            evaluated = trainer.evaluate(DATA)
            trainer.switch(second)
            far.append(distance(trainer.full_state_dict(), shown))
            trainer.optimizer.train()
            trainer.fit(2)
            far.append(distance(trainer.full_state_dict(), last))
            model = net()
            model.load_state_dict(shown)
            x, y = (torch.stack(part) for part in zip(*DATA, strict=True))
            far.append(abs(evaluated - mean_loss(model(x), y).item()))
            found[f"{make.__name__} {strategy}"] = max(far)
    return found


CHAINS = ("zero1 > zero3", "zero3 > tp")


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize(
    "strategies", [CHAINS[:1], pytest.param((*CHAINS[1:], "pp > zero2", "tp > ddp"), marks=pytest.mark.long)]
)
def test_the_modes_of_a_schedule_free_optimizer_act_as_in_one_process(strategies: tuple[str, ...]) -> None:
    for found in run_ranks(turned, 2, strategies, timeout=300):
        assert max(found.values()) < 1e-9, found


def own_objects(world: Any) -> tuple[float, str]:
    """Change the mode of the optimizers that were given to `prepare`, in a user's own loop."""
    shown, last = by_hand(whole)
    model = net()
    given = whole(model)
    rows = [tuple(map(torch.stack, zip(*DATA[8 * n % 32 : 8 * n % 32 + 8], strict=True))) for n in range(5)]
    job = nbkit.prepare(model, given, loss=mean_loss, strategy="zero1", log_dir=None)
    far, said = [], ""
    for step, batch in enumerate(job.batches(rows)):
        job.backward(batch)
        if step == 1:
            try:
                given[0].eval()  # type: ignore[attr-defined]
            except TrainingError as error:
                said = str(error)
        job.optimizer.step()
        job.optimizer.zero_grad()
        if step == 2:
            given[0].eval()  # type: ignore[attr-defined]
            far.append(distance(job.full_state_dict(), shown))
            given[0].train()  # type: ignore[attr-defined]
    return max(*far, distance(job.full_state_dict(), last)), said


@pytest.mark.usefixtures("known_to_be_right")
def test_the_given_optimizer_can_change_its_mode_but_not_within_a_step() -> None:
    for far, said in run_ranks(own_objects, 2, timeout=300):
        assert far < 1e-9
        assert "optimizer.eval() changes the weights" in said and "within step 2" in said


def test_copies_are_tried_in_train_mode() -> None:
    """Check that an optimizer that refuses steps before `train()` is found elementwise, and not changed."""
    model = net()
    optimizer = ScheduleFree(model.parameters())
    spec = OptimizerSpec(optimizer, module=model)
    spec.check(Strategy.parse("zero3", 2))
    assert not optimizer.param_groups[0]["train_mode"]
