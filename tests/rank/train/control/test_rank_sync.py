"""Test that a value that wrongly differs between ranks is named on all of them, before they train differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import mean_loss, points, quiet
from ranks import run_ranks
from torch import Tensor, nn

from nbkit.rank.train import job
from nbkit.rank.train.control import rank_sync


class Scaled(nn.Module):
    """A model with a tensor as an attribute, which each rank draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.noise = nn.Linear(6, 3), torch.randn(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.noise


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def said(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


def differing(world: Any) -> dict[str, str]:
    rank, found = dist.get_rank(), {}

    def by_plateau(trainer: Any, record: dict[str, Any]) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)

    def by_momentum(trainer: Any, record: dict[str, Any]) -> None:
        trainer.optimizer.param_groups[0]["momentum"] = 0.1 * rank

    torch.manual_seed(rank)
    model = Scaled()
    found["attribute"] = said(lambda: quiet(model=model, optimizer=plain))
    trainer = quiet(optimizer=plain)
    trainer.fit(1)
    found["data"] = said(lambda: trainer.evaluate(points(8 + rank)))
    part = [(torch.full((6,), float(rank)), torch.tensor(0)) for _ in range(4)]
    found["part"] = said(lambda: trainer.evaluate(part))
    trainer._callbacks = (by_plateau,)
    found["rates"] = said(lambda: trainer.fit(20))
    found["steps"] = str(trainer.step)
    trainer.optimizer.param_groups[0]["lr"] = 0.1
    job.EVERY = 3  # type: ignore[attr-defined]
    trainer._callbacks = (by_momentum,)
    found["momentum"] = said(lambda: trainer.fit(20))
    found["later steps"] = str(trainer.step)
    trainer._callbacks = ()
    trainer.optimizer.param_groups[0]["momentum"] = 0.0
    trainer.fit(1)  # from the step of rank 0
    trainer.optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
    found["start"] = said(lambda: trainer.fit(1))
    found["switch"] = said(lambda: trainer.switch("zero1"))
    trainer.optimizer.param_groups[0]["lr"] = 0.1
    found["again"] = said(lambda: trainer.fit(1))
    return found


@pytest.mark.usefixtures("known_to_be_right")
def test_values_that_differ_between_ranks_are_named_on_all_ranks() -> None:
    first, second = run_ranks(differing, 2, timeout=100)
    assert first == second
    assert "'noise' differs" in first["attribute"] and "register_buffer" in first["attribute"]
    assert "data to evaluate on: 'samples' differs" not in first["part"] and "'samples'" in first["data"]
    assert "'the first and the last one' differs" in first["part"]
    assert "different learning rates in step 3" in first["rates"] and "0.1, 0.05 on ranks" in first["rates"]
    assert "'momentum of group 0' differs" in first["momentum"] and int(first["later steps"]) < 8
    for when in ("start", "switch"):
        assert "'lr of group 0' differs" in first[when] and "0.1, 0.05" in first[when], (when, first[when])
    assert first["steps"] == "2" and first["again"] == ""


@pytest.mark.usefixtures("known_to_be_right")
def test_attributes_drawn_in_a_callable_equal_those_of_one_process() -> None:
    losses = [run_ranks(drawn, n, timeout=60)[0] for n in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def drawn(world: Any) -> list[float]:
    return [record["loss"] for record in quiet(model=Scaled, optimizer=plain, loss=mean_loss).fit(3)]


def test_settings_by_name_has_the_numbers_of_all_groups() -> None:
    layer = nn.Linear(2, 2)
    adam = torch.optim.AdamW([{"params": [layer.weight], "lr": torch.tensor(0.5)}, {"params": [layer.bias]}], lr=0.25)
    found = rank_sync.settings_by_name(adam)
    assert (found["lr of group 0"], found["lr of group 1"], found["betas of group 1"]) == (0.5, 0.25, (0.9, 0.999))
