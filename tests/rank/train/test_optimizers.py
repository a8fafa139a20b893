"""Test that users' optimizers give the weights of plain torch under every strategy, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import points, quiet
from optimizers import OPTIMIZERS
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import NbkitError

STRATEGIES = ("ddp", "zero1", "zero3", "tp", "pp")
CHAIN = ("zero1", "pp", "tp", "ddp", "zero3", "ddp")
STEPS = 8
REST = dict.fromkeys(sorted(OPTIMIZERS), (*STRATEGIES, "chain", "saved"))
SAMPLE: dict[str, tuple[str, ...]] = {
    "two in one": ("chain", "saved"),
    "several": ("chain", "saved"),
    "several by name": ("chain", "saved"),
    "prodigy": ("ddp", "zero1", "pp"),
    "soap": ("zero1", "tp", "saved"),
    "8-bit": ("tp", "pp"),
    "by parameter": ("saved",),
    "by name": ("zero3", "chain"),
    "by id": ("pp",),
    "closure": ("ddp",),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def data() -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in points(32)]


def in_plain_torch(name: str, steps: int) -> dict[str, Tensor]:
    model = net()
    made = OPTIMIZERS[name](model)
    every = list(made.values()) if isinstance(made, dict) else made if isinstance(made, list) else [made]
    for step in range(steps):
        rows = [data()[i % 32] for i in range(8 * step, 8 * step + 8)]
        x, y = (torch.stack(part) for part in zip(*rows, strict=True))
        model.zero_grad()
        loss(model(x), y).backward()
        for optimizer in every:
            optimizer.step()
    return model.state_dict()


def trainer_of(name: str, strategy: str) -> nbkit.Trainer:
    settings: dict[str, Any] = {
        "loading": nbkit.Loading(shuffle=False),
        "log_dir": None,
        "progress": False,
        "strategy": strategy,
    }
    return nbkit.Trainer(model=net, loss=loss, optimizer=OPTIMIZERS[name], data=data(), batch_size=8, **settings)


class WithLoss(nn.Module):
    """A model that contains a loss with its own parameters, as the hint suggests."""

    def __init__(self) -> None:
        super().__init__()
        self.model = net()
        self.centres = nn.Parameter(torch.eye(3, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x) @ self.centres, y, reduction="none")


def a_loss_with_parameters(world: Any) -> tuple[str, float]:
    """Return the error for a loss with parameters in the optimizer, and the difference of the hint's way from torch.

    The factory reads the weights.
    """
    settings: dict[str, Any] = {
        "loading": nbkit.Loading(shuffle=False),
        "log_dir": None,
        "progress": False,
        "batch_size": 8,
    }
    centres, norms = nn.Parameter(torch.eye(3, dtype=torch.float64)), list[float]()
    with pytest.raises(NbkitError) as refused:
        nbkit.Trainer(
            model=net,
            loss=lambda output, y: F.cross_entropy(output @ centres, y),
            optimizer=lambda model: torch.optim.SGD([*model.parameters(), centres], lr=0.1),
            data=data(),
            **settings,
        )

    def by_norm(model: nn.Module) -> torch.optim.Optimizer:
        norms.extend(float(p.detach().norm()) for p in model.parameters())
        return torch.optim.SGD([{"params": [p], "lr": 0.1 * float(p.detach().norm())} for p in model.parameters()])

    rows = [{"x": x, "y": y} for x, y in data()]
    trainer = nbkit.Trainer(
        model=WithLoss,
        loss=lambda output, batch: output.mean(),
        inputs=["x", "y"],
        optimizer=by_norm,
        data=rows,
        strategy="zero3",
        **settings,
    )
    trainer.fit(4)
    model = WithLoss()
    optimizer = by_norm(model)
    for step in range(4):
        optimizer.zero_grad()
        model(*(torch.stack([row[key] for row in rows[8 * step : 8 * step + 8]]) for key in "xy")).mean().backward()
        optimizer.step()
    half = len(norms) // 2
    assert norms[:half] == norms[half:] and min(norms) > 0
    return str(refused.value), distance(trainer.full_state_dict(), model.state_dict())


@pytest.mark.usefixtures("known_to_be_right")
def test_a_loss_with_parameters_gets_a_hint_that_trains_them() -> None:
    for said, far in run_ranks(a_loss_with_parameters, 2):
        assert "such as those of a loss" in said and "1 of 7" in said and far < 1e-12


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[key] - value).abs().max()) for key, value in expected.items())


def trained(world: Any, folder: Path, tried: dict[str, tuple[str, ...]]) -> dict[str, dict[str, float | str]]:
    """Return by optimizer and strategy the difference of its weights from one process, or why it is refused."""
    found: dict[str, dict[str, float | str]] = {}
    for name, strategies in tried.items():
        mine = found[name] = {}
        for strategy in strategies:
            try:
                if strategy in ("chain", "saved"):
                    mine[strategy] = chained(name) if strategy == "chain" else saved(name, folder / name)
                    continue
                trainer = trainer_of(name, strategy)
            except NbkitError as error:
                mine[strategy] = f"refused: {error.what}"
                continue
            trainer.fit(STEPS)
            mine[strategy] = distance(trainer.full_state_dict(), in_plain_torch(name, STEPS))
    return found


def chained(name: str) -> float | str:
    """Make two steps under each strategy in turn. A refused switch does not change the training."""
    trainer, refused = trainer_of(name, "ddp"), ""
    trainer.fit(2)
    for strategy in CHAIN:
        try:
            trainer.switch(strategy)
        except NbkitError as error:
            refused = f"{strategy}: {error.what}"
        trainer.fit(2)
    far = distance(trainer.full_state_dict(), in_plain_torch(name, 2 + 2 * len(CHAIN)))
    return far if far > 1e-9 or not refused else f"refused {refused}"


def saved(name: str, path: Path) -> float:
    """Make three steps, and the rest in a new trainer from a checkpoint, possibly under another strategy."""
    try:
        trainer = trainer_of(name, "zero1")
    except NbkitError:
        trainer = trainer_of(name, "ddp")
    trainer.fit(3)
    trainer.save(path)
    trainer = trainer_of(name, "ddp")
    trainer.load(path)
    trainer.fit(STEPS - 3)
    return distance(trainer.full_state_dict(), in_plain_torch(name, STEPS))


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.usefixtures("rows_are_known")
@pytest.mark.parametrize("tried", [SAMPLE, pytest.param(REST, marks=pytest.mark.long)])
def test_an_optimizer_trains_as_in_one_process_or_is_refused(tried: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    first, second = run_ranks(trained, 2, tmp_path, tried, timeout=600)

    assert first == second
    wrong = {
        (name, strategy): found
        for name, by_strategy in first.items()
        for strategy, found in by_strategy.items()
        if isinstance(found, float) and not found < 1e-9
    }
    assert not wrong
    for name in ("two in one", "several", "several by name", "muon and adamw", "soap", "lion", "chained", "lookahead"):
        if name in first:
            assert all(isinstance(found, float) for found in first[name].values()), first[name]


def _remembering(model: nn.Module) -> torch.optim.Optimizer:
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), dict[Any, Any]()

    def hook(given: Any, args: Any, kwargs: Any) -> None:
        for p in (p for group in given.param_groups for p in group["params"]):
            before[p] = 0.9 * before.get(p, 0) + p.grad
            p.grad.copy_(before[p])

    optimizer.register_step_pre_hook(hook)
    return optimizer


def _patched(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = optimizer.step

    def normed(closure: Any = None) -> Any:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(p.grad.norm())
        return step()

    optimizer.step = normed  # type: ignore[method-assign]
    return optimizer


def _clipped_in_a_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
    return optimizer


class _Lookahead(torch.optim.SGD):
    """SGD with slow weights in a list, which its first step makes."""

    slow: list[Tensor] | None = None
    taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        self.slow = [p.clone() for p in params] if self.slow is None else self.slow
        super().step()
        self.taken += 1
        if self.taken % 3 == 0:
            for slow, p in zip(self.slow, params, strict=False):
                p.copy_(slow.lerp_(p, 0.5))


def _what_hooks_hold(world: Any) -> list[str]:
    said = []
    for optimizer in (_remembering, _patched, _clipped_in_a_hook):
        trainer = quiet(optimizer=optimizer)
        trainer.fit(1)
        try:
            trainer.switch("zero3")
        except Exception as error:
            said.append(str(error))
    trainer = quiet(optimizer=lambda model: _Lookahead(model.parameters(), lr=0.1))
    trainer.fit(1)
    try:
        trainer.switch("pp")
    except Exception as error:
        said.append(str(error))
    return said


@pytest.mark.long
def test_hooks_with_state_and_steps_that_read_the_model_are_refused_by_name() -> None:
    for remembers, *reads, positions in run_ranks(_what_hooks_hold, 2):
        assert "would lose a part of the state that _Lookahead has under dp=2" in positions
        assert "would lose a part of the state that SGD with hooks has under dp=2" in remembers
        assert [line.split(" that it was made for")[0] for line in reads] == [
            "SGD with another step reads parameters of the model",
            "SGD with hooks reads parameters of the model",
        ]
