"""Models and losses that keep something beside parameters and buffers: equal to plain torch, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import stateful
import torch
from jobs import points, quiet
from ranks import run_ranks
from torch import Tensor, nn

STEPS = 5
STRATEGIES = ("ddp", "zero3", "tp", "chain")


def cases() -> dict[str, tuple[type[nn.Module], Any]]:
    return {kind.__name__: (kind, stateful.plain) for kind in stateful.MODELS} | {
        loss.__name__: (stateful.Base, loss) for loss in stateful.LOSSES
    }


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def by_torch(name: str) -> list[float]:
    """Losses of one process, without nbkit."""
    stateful.begin()
    kind, loss = cases()[name]
    torch.manual_seed(7)
    model, data, losses = kind(), points(), []
    optimizer = plain(model)
    for step in range(STEPS):
        chosen = [data[(step * 8 + i) % len(data)] for i in range(8)]
        x, y = (torch.stack(part) for part in zip(*chosen, strict=True))
        value: Tensor = loss(model(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def by_nbkit(name: str, strategy: str) -> list[float] | str:
    """Losses of these ranks; or why there are none. "chain": with live switches, of which some may be refused."""
    stateful.begin()
    kind, loss = cases()[name]
    first = "ddp" if strategy == "chain" else strategy
    try:
        trainer = quiet(model=kind, loss=loss, optimizer=plain, strategy=first, shuffle=False, seed=7)
    except Exception as error:
        return f"{type(error).__name__} {error}"
    for to in (None,) * (STEPS - 1) if strategy != "chain" else ("zero3", "tp", "zero1", "ddp"):
        trainer.fit(1)
        if to is not None:
            try:
                trainer.switch(to)
            except Exception as error:
                if "Error" not in type(error).__name__:
                    raise
    trainer.fit(1)
    return [record["loss"] for record in trainer.history]


def trained(world: Any, names: list[str]) -> dict[tuple[str, str], tuple[Any, Any]]:
    found = {}
    for name in names:
        one = by_torch(name)
        for strategy in STRATEGIES:
            try:
                found[name, strategy] = one, by_nbkit(name, strategy)
            except Exception as error:
                found[name, strategy] = one, f"LATE {type(error).__name__} {error}"
    return found


SAMPLE = ["Hidden", "Calls", "ByGlobal", "Centred", "CountsRows", "FirstRow"]
REST = [name for name in cases() if name not in SAMPLE]


@pytest.mark.parametrize("names", [SAMPLE, *(pytest.param(REST[i::4], marks=pytest.mark.long) for i in range(4))])
def test_what_is_kept_outside_of_a_model_is_right_or_refused(names: list[str]) -> None:
    wrong = {}
    for found in run_ranks(trained, 2, names, timeout=60 + 30 * len(names)):
        for case, (one, losses) in found.items():
            refused = isinstance(losses, str) and not losses.startswith("LATE")
            if not refused and losses != pytest.approx(one, rel=1e-5):
                wrong[case] = one, losses
    assert not wrong
