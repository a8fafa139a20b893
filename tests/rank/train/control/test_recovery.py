"""Test that ranks interrupted at different places go on together. Otherwise weights would differ silently."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from jobs import flat, mean_loss, one_process, order, points, quiet
from ranks import run_ranks

from nbkit.errors import TrainingError
from nbkit.rank.train.control import step_boundary


class Interruptible(torch.optim.AdamW):
    """AdamW that spoils a weight and raises in its third step, on chosen ranks."""

    when: str = ""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        # Copies of the optimizer are tried before the training.
        if self.when == "within" and self.steps == 3 and step_boundary.training() is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise KeyboardInterrupt
        super().step()


def interrupted_until(world: Any) -> dict[str, Any]:
    return interrupted(world, (0,), until=6)


def interrupted(world: Any, within: tuple[int, ...], **again: int) -> dict[str, Any]:
    """Interrupt ranks in `within` inside the third optimizer step, and the others right after it."""
    rank = world.place.rank
    Interruptible.when = "within" if rank in within else ""

    def schedule(step: int) -> float:
        if Interruptible.when == "" and step == 3 and trainer.optimizer.steps == 3 and not done:
            raise KeyboardInterrupt
        return 1.0

    done: list[bool] = []
    trainer: Any = None
    trainer = quiet(optimizer=Interruptible, lr_schedule=schedule, data=points(40))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(6)
    done.append(True)
    before = trainer.step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(**again or {"steps": 3})
        except TrainingError as error:
            return {"error": str(error)}
    return {
        "before": before,
        "losses": [r["loss"] for r in trainer.history],
        "weights": flat(trainer.model),
        "said": [str(w.message) for w in caught if "interrupted within a step" in str(w.message)],
    }


def test_ranks_interrupted_in_and_after_a_step_go_on_from_whole_weights() -> None:
    found = run_ranks(interrupted, 2, (0,))

    losses, _, model = one_process(points(40), steps=6, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    assert [one["before"] for one in found] == [2, 3]
    for one in found:
        assert one["losses"] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(one["weights"], flat(model), rtol=1e-4, atol=1e-6)
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert "2, 3; all ranks continue from rank 1's step 3" in found[0]["said"][0] and not found[1]["said"]


def test_until_counts_from_the_common_step_of_the_ranks() -> None:
    found = run_ranks(interrupted_until, 2)

    assert [one["before"] for one in found] == [2, 3]
    assert [len(one["losses"]) for one in found] == [6, 6] and found[0]["losses"] == found[1]["losses"]


def test_an_error_is_raised_if_no_rank_has_whole_weights() -> None:
    for one in run_ranks(interrupted, 2, (0, 1)):
        assert "no rank has whole weights" in one["error"] and "2, 2" in one["error"]


def broken_in_forward(world: Any) -> list[Any]:
    found = []
    for data in (points(40), Again(points(40))):
        once = iter([True])

        def loss(output: torch.Tensor, target: torch.Tensor, once: Iterator[bool] = once) -> torch.Tensor:
            # Count only whole shares: the loss check calls the loss on fewer rows too.
            training = step_boundary.training()
            if training is not None and training.step == 2 and len(output) == 4 and next(once, False):
                raise KeyboardInterrupt
            return mean_loss(output, target)

        trainer = quiet(loss=loss, data=data)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(4)
        trainer.fit(3)
        found.append([r["loss"] for r in trainer.history])
    return found


class Again(torch.utils.data.IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([self.samples[i] for i in order(40, 0)])


def test_the_batch_of_an_unfinished_step_is_read_again() -> None:
    losses, _, _ = one_process(points(40), steps=5)
    for found in run_ranks(broken_in_forward, 2):
        assert found == [pytest.approx(losses, rel=1e-5)] * 2


def gone(world: Any) -> list[bool]:
    models = []
    for _ in range(2):
        trainer = quiet(log_dir="runs")
        trainer.fit(2)
        models.append(weakref.ref(trainer.model))
    del trainer
    gc.collect()
    return [model() is None for model in models]


def test_a_deleted_trainer_frees_its_memory() -> None:
    """Check it, because a user of a notebook runs the cell that builds a Trainer again and again."""
    assert run_ranks(gone, 2) == [[True, True]] * 2
