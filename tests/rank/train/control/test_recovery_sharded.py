"""Test that sharded ranks have whole weights again after interrupts at different places, or raise an error."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from jobs import mean_loss, quiet
from ranks import run_ranks
from torch import nn

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.train.control import step_boundary

pytestmark = pytest.mark.usefixtures("rows_are_known")

STEPS = 5


def deep() -> nn.Module:
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 3))


class Interruptible(torch.optim.AdamW):
    """AdamW that raises in its third step with weights half updated, on chosen ranks."""

    within = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        # Copies of the optimizer are tried before the training.
        if self.within and self.steps == 3 and step_boundary.training() is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise KeyboardInterrupt
        super().step()


def interrupted(world: Any, cases: list[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> list[dict[str, Any]]:
    """Interrupt step 3: ranks in `within` in the optimizer, those in `before` before it, the others after it."""
    Interruptible.within = False
    expected = quiet(model=deep, optimizer=Interruptible, strategy="ddp", clip_norm=1e9)
    expected.fit(STEPS)
    found = []
    for strategy, within, before in cases:
        found.append(one(world.place.rank, strategy, within, before))
        found[-1]["expected"] = [r["loss"] for r in expected.history]
    return found


def one(rank: int, strategy: str, within: tuple[int, ...], before: tuple[int, ...]) -> dict[str, Any]:
    Interruptible.within = rank in within
    done: list[bool] = []

    def schedule(step: int) -> float:
        if step == 3 and rank not in (*within, *before) and not done and trainer.step == 3:
            raise KeyboardInterrupt
        return 1.0

    trainer: Any = None
    trainer = quiet(model=deep, optimizer=Interruptible, strategy=strategy, clip_norm=1e9, lr_schedule=schedule)
    clip = trainer.job.clip

    def clip_and_break(norm: float) -> Any:
        clip(norm)
        if rank in before and trainer.step == 2 and not done:
            raise KeyboardInterrupt

    trainer.job.clip = clip_and_break
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(STEPS)
    done.append(True)
    stood = trainer.step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(1)
        except TrainingError as error:
            return {"stood": stood, "error": str(error)}
        trainer.fit(STEPS - trainer.step)
    return {
        "stood": stood,
        "losses": [r["loss"] for r in trainer.history],
        "said": [str(w.message) for w in caught if "interrupted within a step" in str(w.message)],
    }


@pytest.mark.long
def test_ranks_recover_from_replicas_and_missing_parts_are_an_error() -> None:
    cases: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        ("hsdp shard=2", (0,), ()),
        ("dp=2 pp=2", (2,), ()),
        # Only rank 0 has made the third step, and its stage is not the whole model. The second step is complete.
        ("dp=2 pp=2", (), (1, 2, 3)),
        ("zero3", (1,), ()),
        ("pp microbatches=4", (1,), ()),
    ]
    found = run_ranks(interrupted, 4, cases, timeout=240)

    for rank, (replica, stage, back, zero3, pipeline) in enumerate(found):
        assert replica["stood"] == (2 if rank == 0 else 3)
        for case in (replica, stage, back):
            assert case["losses"] == pytest.approx(case["expected"], rel=1e-5), case
        assert back["stood"] == (3 if rank == 0 else 2)
        for case in (zero3, pipeline):
            assert "no step is whole" in case["error"] and "build the Trainer again" in case["error"]
            assert "for rank 1" in case["error"] and "3, 2, 3, 3" in case["error"]
    assert "continue from rank 1's step 3" in found[0][0]["said"][0] and not found[1][0]["said"]
    assert "3, 2, 2, 2; all ranks continue from rank 1's step 2" in found[0][2]["said"][0]


def in_forward(world: Any, strategies: list[str]) -> list[tuple[list[float], list[float]]]:
    found = []
    for strategy in strategies:
        expected = quiet(model=deep, optimizer=Interruptible, strategy=strategy)
        expected.fit(5)
        calls: list[int] = []

        def loss(output: torch.Tensor, target: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.extend([1] * (step_boundary.training() is not None))
            if len(calls) == 6:
                raise KeyboardInterrupt
            return mean_loss(output, target)

        trainer = quiet(
            model=deep, optimizer=Interruptible, strategy=strategy, loss=loss, compute=nbkit.Compute(microbatch_size=2)
        )
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(5)
        trainer.fit(5 - trainer.step)
        found.append(([r["loss"] for r in trainer.history], [r["loss"] for r in expected.history]))
    return found


@pytest.mark.long
def test_ranks_interrupted_in_forward_keep_their_shards() -> None:
    for found in run_ranks(in_forward, 2, ["zero1", "zero3"], timeout=120):
        for losses, expected in found:
            assert losses == pytest.approx(expected, rel=1e-5)
