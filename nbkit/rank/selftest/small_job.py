"""Trains a small GPT, which any number of ranks can split, and compares it with the same training in one process."""

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import nbkit
from nbkit.planner.gpt_config import GPTConfig
from nbkit.rank.device import accelerator
from nbkit.rank.models.gpt import GPT
from nbkit.rank.rng.dropout_masks import dropped
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.world.world import World
from nbkit.schedules import type_of
from nbkit.strategy import Strategy

SEED, LR, VOCAB = 7, 1e-3, 64
# Large enough that AdamW in float32 takes no visible step for a gradient that is zero except for rounding.
EPS = 1e-6
EPOCH = 4  # batches


def trainer(strategy: str, **more: Any) -> Trainer:
    """Return a Trainer of the small GPT, made in the way of a user. On the CPU it is in float64. Collective.

    more: further arguments of the Trainer.
    """
    world = World.join_from_env().place.world_size
    config = _config(world, _layers(strategy))
    asked: dict[str, Any] = {
        "model": lambda: GPT(config).to(_dtype()),
        "loss": mean_loss,
        "optimizer": _adamw,
        "data": _rows(config, world),
        "batch_size": 4 * world,
        "strategy": strategy,
        "seed": SEED,
        "log_dir": None,
        "progress": False,
    }
    return Trainer(**(asked | more))


_lasting: dict[int, Trainer] = {}


def under(strategy: str) -> Trainer:
    """Return a Trainer under `strategy`, before its first step. Collective.

    Models of one size share a Trainer, which keeps what it has learned about the model. Its switch takes half the time
    of a new Trainer. All ranks must have started together, because a rank that has replaced another rank lacks it.
    """
    layers = _layers(strategy)
    if layers not in _lasting:
        _lasting[layers] = trainer(strategy, checkpoints=nbkit.Checkpoints(snapshot_every=1_000))
    elif (made := _lasting[layers]).step:
        made.rewind(0)
        made.switch(strategy)
    return _lasting[layers]


def _layers(strategy: str) -> int:
    world = World.join_from_env().place.world_size
    schedule = Strategy.parse(strategy, world).schedule
    return max(world * (type_of(schedule).stages_per_rank if schedule else 1), 2)


def apart(made: Trainer) -> dict[str, float]:
    """Return how far the training of `made` differs so far from the same training in one process. Collective.

    losses: the largest relative difference in a step. weights: the largest difference of an element.
    """
    weights = made.full_state_dict()
    losses, expected = alone(made.step, sum(name.endswith(".up.weight") for name in weights))
    found = [record["loss"] for record in made.history]
    if len(found) != len(losses):
        raise AssertionError(f"{len(found)} steps are in the history, {len(losses)} were made")
    return {
        "losses": max(abs(one / other - 1) for one, other in zip(found, losses, strict=True)),
        "weights": max(float((weights[name] - one).abs().max()) for name, one in expected.items()),
    }


def in_bf16(strategy: str, steps: int) -> float:
    """Return the largest relative difference of a step's loss from one process. Both train in bf16. Collective."""
    layers = _layers(strategy)
    config = _config(World.join_from_env().place.world_size, layers)
    made = trainer(strategy, model=lambda: GPT(config).float(), precision="bf16")
    made.fit(steps)
    losses, _ = alone(steps, layers, bf16=True)
    return max(abs(float(record["loss"]) / one - 1) for record, one in zip(made.history, losses, strict=True))


@cache
def alone(steps: int, layers: int, *, bf16: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Return (losses, weights) after `steps` steps of the same training, in plain torch on this rank only.

    bf16: compute in bf16 by autocast, with float32 weights.
    """
    place = World.join_from_env().place
    config, device = _config(place.world_size, layers), accelerator().device(place.device)
    data, size = _rows(config, place.world_size), 4 * place.world_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = GPT(config).to(torch.float32 if bf16 else _dtype()).to(device)
    optimizer = _adamw(model)
    losses = []
    for step in range(steps):
        epoch, at = divmod(step, EPOCH)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        chosen = [data[i] for i in order[at * size : (at + 1) * size]]
        ids, targets = (torch.stack(part).to(device) for part in zip(*chosen, strict=True))
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = mean_loss(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: one.cpu() for name, one in model.state_dict().items()}


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def masks_differ() -> int:
    """Return the number of dropout mask elements that differ between this rank's device and the CPU."""
    device = accelerator().device(World.join_from_env().place.device)
    wrong = 0
    for sizes in ((7, 33), (3, 17, 65), (2, 3, 9, 130)):
        places = [torch.arange(size, dtype=torch.int32) + 5 for size in sizes]
        here = dropped(SEED, [place.to(device) for place in places], 0.1).cpu()
        wrong += int((here ^ dropped(SEED, places, 0.1)).sum())
    return wrong


class PlannedError(Exception):
    """The error that `Fails` raises."""


class Fails:
    """A callback that raises on one rank after a step, once."""

    def __init__(self, rank: int, *, after: int) -> None:
        self.rank, self.after = rank, after

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Raise PlannedError on the chosen rank after the chosen step, once."""
        if record["step"] == self.after and World.join_from_env().place.rank == self.rank:
            self.after = 0
            raise PlannedError(f"rank {self.rank}, on purpose")


class Dies:
    """A callback that kills the current process of one rank after a step."""

    def __init__(self, rank: int, *, after: int) -> None:
        # The process that replaces it has another id, so the callback does not kill it.
        self.pid = os.getpid() if World.join_from_env().place.rank == rank else 0
        self.after = after

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Kill this process if it is the chosen one and the step is reached."""
        if record["step"] == self.after and os.getpid() == self.pid:
            os.kill(self.pid, signal.SIGKILL)


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)


def _dtype() -> torch.dtype:
    return torch.float64 if World.join_from_env().place.device == "cpu" else torch.float32


def _config(world: int, layers: int) -> GPTConfig:
    heads = world * -(-4 // world)  # a multiple of the ranks, at least four
    return GPTConfig(vocab=VOCAB, block=4 * world, layers=layers, heads=heads, width=8 * heads)


def _rows(config: GPTConfig, world: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, VOCAB, (EPOCH * 4 * world, config.block + 1), generator=draw)
    return [(row[:-1], row[1:]) for row in ids]
