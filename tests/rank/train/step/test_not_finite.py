"""Test that a loss that is not finite stops the training, names rank and cause, and leaves weights unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import flat, mean_loss, order, points, quiet, weighted_loss
from ranks import run_ranks
from torch import nn

from nbkit.errors import NotFinite
from nbkit.mesh import Mesh
from nbkit.rank.train.argument_checks import check_finite
from nbkit.rank.train.step.step_stats import Pending, StepNumbers, StepReduction

# In step 3, the rank with this sample computes NaN. 8 rows over 4 ranks are 2 each.
BAD = order(32, 0)[2 * 8 + 5]


def paused(world: Any, weighted: bool) -> dict[str, Any]:
    data = points()
    data[BAD] = (torch.full((6,), float("nan")), data[BAD][1])
    trainer = quiet(data=data, loss=weighted_loss if weighted else mean_loss)
    weights: list[torch.Tensor] = []
    with pytest.raises(NotFinite) as raised:
        for _ in range(4):
            weights.append(flat(trainer.model))
            trainer.fit(1)
    untouched = torch.equal(weights[-1], flat(trainer.model))
    after = trainer.fit(1)
    return {
        "message": str(raised.value),
        "step": raised.value.step,
        "rank": raised.value.rank,
        "untouched": untouched,
        "steps": [r["step"] for r in trainer.history],
        "loss after": after[0]["loss"],
    }


@pytest.mark.parametrize("weighted", [False, True])
def test_nan_is_reported_with_step_rank_and_samples_and_training_can_go_on(weighted: bool) -> None:
    found = run_ranks(paused, 4, weighted)

    assert all(one == found[0] for one in found)
    assert (found[0]["step"], found[0]["rank"], found[0]["untouched"]) == (3, 2, True)
    neighbours = f"rank 2: samples {order(32, 0)[20]}, {BAD}"
    assert neighbours in found[0]["message"] and "have not been touched" in found[0]["message"]
    assert found[0]["steps"] == [1, 2, 3]
    assert found[0]["loss after"] == pytest.approx(1.1, abs=0.5)


class Root(nn.Module):
    """A model with a finite output and an infinite gradient at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.linear(x).pow(2).sum(1, keepdim=True).sqrt()


def with_a_slope(world: Any, strategy: str) -> list[Any]:
    """Return the error, steps, and whether weights are finite, without and with a check of the gradients."""
    found: list[Any] = []
    for clip_norm in (None, 1.0):
        data = points()
        data[BAD] = (torch.zeros(6), data[BAD][1])
        trainer = quiet(model=Root, data=data, strategy=strategy, clip_norm=clip_norm)
        with pytest.raises(NotFinite) as raised:
            trainer.fit(6)
        error = raised.value
        finite = bool(flat(trainer.model).isfinite().all())
        found.append((error.what, error.numbers, trainer.step, finite, len(trainer.history)))
        if clip_norm is not None:
            found.append([record["step"] for record in trainer.fit(2)])
    return found


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_gradients_that_are_not_finite_blame_no_samples(strategy: str) -> None:
    for found in run_ranks(with_a_slope, 2, strategy):
        (what, told, step, *_), (looked, norm, made, finite, records), after = found
        assert what.startswith("The loss of step 4 is not finite") and "because the weights are not" in what
        assert "linear.weight" in told and step == 3
        assert looked == "The gradients of step 3 are not finite, although the loss is."
        assert norm == "norm nan; the weights have not been touched" and finite
        assert (made, records, after) == (2, 2, [3, 4])


def numbers(**changed: Any) -> StepNumbers:
    asked: dict[str, Any] = {
        "loss": 1.0, "weight": 8.0, "weighted": False, "held": 0, "ready": 0, "tokens": 8, "seconds": [0.1] * 4,
        "not_finite": [], "fingerprints": [0] * 4,
    }  # fmt: skip
    return StepNumbers(**(asked | changed))


def test_a_late_read_as_on_gpus_reports_the_steps_that_weights_took() -> None:
    reduction = StepReduction(rank=0, world_size=4, device=torch.device("cpu"))
    pending = Pending(5, reduction, 1, 8, range(40, 48), 0.1, Mesh(dp=4), "dp=4")

    check_finite(numbers(), pending, steps_since=2)
    with pytest.raises(NotFinite) as raised:
        check_finite(numbers(not_finite=[1, 3]), pending, steps_since=2)

    assert "ranks 1, 3" in raised.value.what
    assert "rank 1: samples 42, 43; rank 3: samples 46, 47" in raised.value.numbers
    assert "made 2 steps" in raised.value.numbers
