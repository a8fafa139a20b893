"""Small jobs that the tests of training share, and the same job for one process, without nbkit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.bridge.training_requests import Control, TrainingRequestHandler
from nbkit.errors import Stopped
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.job import Job
from nbkit.rank.train.trainer import Trainer

SEED = 7


def net(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def points(num: int = 32) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(6, generator=draw), torch.randint(3, (), generator=draw)) for _ in range(num)]


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def weighted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum, weight) without class 0, so that rows, ranks and micro-batches have different weights."""
    mask = (target != 0).float()
    return (F.cross_entropy(output, target, reduction="none") * mask).sum(), mask.sum()


def dict_loss(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(output, batch["label"])


class Recording(torch.optim.SGD):
    """SGD that keeps the gradients of every step as one flat tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.seen.append(torch.cat([g.flatten().clone() for g in grads if g is not None]))
        super().step()


class Heard(list[Any]):
    """A sink that keeps the events of these kinds, or all, with their fields as attributes."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds

    def write(self, event: dict[str, Any]) -> None:
        if not self.kinds or event["kind"] in self.kinds:
            self.append(SimpleNamespace(**event))


def heard(owner: Trainer | Job, *kinds: str) -> Heard:
    """Return a sink that gets the events that a training emits from now on."""
    sink = Heard(*kinds)
    job: Job = getattr(owner, "job", owner)
    job.ledger.bus.add(sink)
    return sink


def quiet(**changed: Any) -> Trainer:
    """Return a Trainer of `net` on `points` that prints and writes nothing."""
    asked: dict[str, Any] = {
        "model": net,
        "loss": mean_loss,
        "optimizer": Recording,
        "data": points(),
        "batch_size": 8,
        "seed": SEED,
        "log_dir": None,
        "progress": False,
    }
    return Trainer(**(asked | changed))


def asked_for(
    trainer: Trainer, controls: TrainingRequestHandler, strategy: str, *, after: float = 0.0, meanwhile: Any = None
) -> dict[str, Any]:
    """Ask for a switch from another thread during steps, as a notebook does. Return the verdict."""
    steps = len(trainer.history)

    def ask() -> None:
        time.sleep(after)
        step_boundary.inbox.post(
            step_boundary.inbox.acted + 1, "control", Control(strategy, "switch", {"strategy": strategy})
        )

    def called(trainer: Trainer, record: dict[str, Any]) -> None:
        if record["step"] == steps + 1:
            threading.Thread(target=ask).start()
        if meanwhile is not None:
            meanwhile(record["step"] - steps)
        if controls.result(strategy)["result"] is not None:
            raise Stopped("on every rank at the same step")
        time.sleep(0.01)

    trainer._callbacks = (called,)
    with pytest.raises(Stopped):
        trainer.fit(5000)
    trainer._callbacks = ()
    return dict(controls.result(strategy)["result"])


def order(num: int, epoch: int, seed: int = SEED) -> list[int]:
    """Return the expected order of samples in an epoch."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def one_process(
    data: list[tuple[Tensor, Tensor]],
    *,
    steps: int,
    batch_size: int = 8,
    loss: Callable[[Tensor, Tensor], Any] = mean_loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = Recording,
    drop_last: bool = False,
) -> tuple[list[float], torch.optim.Optimizer, nn.Module]:
    """Train in a loop over whole global batches in plain torch. Return (losses, optimizer, model)."""
    torch.manual_seed(SEED)
    model = net()
    optimizer_ = optimizer(model)
    losses: list[float] = []
    epoch, at, indices = 0, 0, order(len(data), 0)
    while len(losses) < steps:
        chosen = indices[at : at + batch_size]
        at += len(chosen)
        if not chosen or (drop_last and len(chosen) < batch_size):
            epoch, at = epoch + 1, 0
            indices = order(len(data), epoch)
            continue
        x, y = (torch.stack(part) for part in zip(*(data[i] for i in chosen), strict=True))
        value = loss(model(x), y)
        # A batch without weight has no loss and no gradient.
        value = value[0] / value[1].clamp(min=1) if isinstance(value, tuple) else value
        optimizer_.zero_grad()
        value.backward()
        optimizer_.step()
        losses.append(float(value.detach()))
    return losses, optimizer_, model


def assert_same_gradients(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare norms, and the largest difference with the largest gradient, as elementwise ratios fail near zero."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.norm(), theirs.norm(), rtol=1e-5, atol=0)
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
