"""Test that steps after a rewind are bit-equal to the first time, or nearly equal under another strategy."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import flat, net, quiet
from ranks import run_ranks

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.train import snapshots


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def losses(trainer: Any) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in trainer.history]


def rewound(world: Any, folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    torch.set_default_dtype(torch.float64)
    data = [(x.double(), y) for x, y in quiet().loop.data]
    trainer = quiet(
        model=lambda: net(dropout=0.5),
        optimizer=adamw,
        data=data,
        batch_size=12,  # the last batch of an epoch is smaller
        lr_schedule=lambda step: 1 / (1 + step),
        checkpoints=nbkit.Checkpoints(snapshot_every=3, every=5, path=folder / "kept"),
    )
    trainer.fit(2)
    trainer.lr = 0.05
    trainer.fit(6)
    first, weights = losses(trainer), flat(trainer.model)
    told["steps"] = trainer.snapshots.steps
    told["back"] = trainer.rewind(5), trainer.step, trainer.saves.last.path, len(trainer.history)
    trainer.lr = 0.5  # the next rewind discards these steps
    trainer.fit(4)
    told["other"] = losses(trainer) != first
    told["again"] = trainer.rewind(3)
    trainer.fit(5)
    told["same"] = losses(trainer) == first, torch.equal(weights, flat(trainer.model)), trainer.lr
    trainer.rewind(6)
    trainer.switch("zero3")
    told["sharded"] = trainer.rewind(0), trainer.snapshots.steps
    trainer.fit(2)
    trainer.lr = 0.05
    trainer.fit(6)
    told["far"] = max(abs(a - b) for (_, a), (_, b) in zip(losses(trainer), first, strict=True))
    told["zero3 steps"] = trainer.snapshots.steps
    trainer.switch("pp")
    trainer.rewind(4)  # taken under zero3
    trainer.fit(5)
    told["far"] = max(told["far"], *(abs(a - b) for (_, a), (_, b) in zip(losses(trainer), first, strict=True)))
    with pytest.raises(TrainingError) as refused:
        quiet().rewind(3)
    told["refused"] = str(refused.value)

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # Each rank holds half of the weights, so there is room for two snapshots.
        small = quiet(checkpoints=nbkit.Checkpoints(snapshot_every=1), progress=True)
        share = 8 // 2 * sum(p.numel() for p in small.model.parameters())
        snapshots.left = lambda *args, **kwargs: 5 * share - sum(each.flat.numel() for each in small.snapshots._kept)  # type: ignore[assignment]
        snapshots._SHARE_OF_FREE = 0.5
        small.fit(5)
        told["fits"] = small.snapshots.steps
        snapshots.left = lambda *args, **kwargs: 10  # type: ignore[assignment]
        none = quiet(checkpoints=nbkit.Checkpoints(snapshot_every=1), progress=True)
        none.fit(2)
        told["none"] = none.snapshots.steps
    told["said"] = [line for line in printed.getvalue().split("\r") if "snapshots" in line]
    return told


@pytest.mark.long
def test_steps_after_a_rewind_equal_the_original_steps(tmp_path: Path) -> None:
    first, second = run_ranks(rewound, 2, tmp_path, timeout=180)

    assert first["steps"] == [0, 3, 6] and first["back"] == (3, 3, None, 3) and first["other"] and first["again"] == 3
    for each in (first, second):
        assert each["same"][:2] == (True, True)
        assert each["sharded"] == (0, [0]) and each["zero3 steps"] == [0, 3, 6] and each["far"] < 1e-12
        assert "snapshot_every=50" in each["refused"]
        assert each["fits"] == [4, 5]
        assert each["none"] == []
    assert len(first["said"]) == 1 and "no snapshots: one needs 0.00" in first["said"][0] and second["said"] == []
