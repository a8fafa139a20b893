"""Test that gradients and losses equal those of one process, however the batch is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import (
    Recording,
    assert_same_gradients,
    dict_loss,
    mean_loss,
    one_process,
    points,
    quiet,
    weighted_loss,
)
from ranks import run_ranks

import nbkit

STEPS = 6


def as_dicts(data: list[Any]) -> list[dict[str, Any]]:
    return [{"input": x, "label": y} for x, y in data]


# name -> (arguments of the Trainer, arguments of the loop in plain torch). 21 samples in batches of 8 leave 5, which
# four ranks share as 2 + 1 + 1 + 1. 18 samples leave 2, so two of four ranks have no row.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": ({"compute": nbkit.Compute(microbatch_size=1)}, {}),
    "ragged": ({"data": points(21)}, {"data": points(21)}),
    "ranks without rows": ({"data": points(18), "compute": nbkit.Compute(microbatch_size=2)}, {"data": points(18)}),
    "dropped": (
        {"data": points(21), "loading": nbkit.Loading(drop_last=True)},
        {"data": points(21), "drop_last": True},
    ),
    "weighted": ({"loss": weighted_loss}, {"loss": weighted_loss}),
    "weighted, accumulated, ragged": (
        {"loss": weighted_loss, "data": points(21), "compute": nbkit.Compute(microbatch_size=1)},
        {"loss": weighted_loss, "data": points(21)},
    ),
    "weighted, ranks without rows": (
        {"loss": weighted_loss, "data": points(18)},
        {"loss": weighted_loss, "data": points(18)},
    ),
    "dicts": ({"data": as_dicts(points(21)), "inputs": ["input"], "loss": dict_loss}, {"data": points(21)}),
}


def train_all(world: Any) -> dict[str, tuple[list[float], list[torch.Tensor], list[dict[str, Any]]]]:
    found = {}
    for name, (asked, _) in CASES.items():
        trainer = quiet(**asked)
        records = trainer.fit(STEPS)
        found[name] = ([r["loss"] for r in records], trainer.optimizer.seen, trainer.history)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_gradients_and_losses_equal_one_process(num_ranks: int) -> None:
    ranks = run_ranks(train_all, num_ranks)

    for name, (_, plain) in CASES.items():
        losses, optimizer, _ = one_process(**({"data": points(), "steps": STEPS} | plain))
        for found in ranks:
            assert found[name][0] == pytest.approx(losses, rel=1e-5), name
            assert_same_gradients(found[name][1], optimizer.seen)
            assert found[name][2] == ranks[0][name][2], name


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train_adamw(world: Any) -> list[float]:
    return [r["loss"] for r in quiet(optimizer=adamw, batch_size=8).fit(10)]


def clipped(world: Any) -> tuple[list[dict[str, Any]], list[torch.Tensor], list[torch.Tensor]]:
    trainer = quiet(clip_norm=0.05)
    trainer.fit(3)
    unclipped = quiet(compute=nbkit.Compute(grad_norm_every=2))
    unclipped.fit(4)
    return trainer.history, trainer.optimizer.seen, [bool("grad_norm" in r) for r in unclipped.history]


def test_clipping_scales_to_the_norm_and_records_the_original_norm() -> None:
    losses, optimizer, _ = one_process(points(), steps=1)
    for history, grads, recorded in run_ranks(clipped, 2):
        assert history[0]["grad_norm"] == pytest.approx(float(optimizer.seen[0].norm()), rel=1e-5)
        assert history[0]["grad_norm"] > 0.05
        assert [float(g.norm()) for g in grads] == pytest.approx([0.05] * 3, rel=1e-3)
        assert recorded == [False, True, False, True]
        assert history[0]["loss"] == pytest.approx(losses[0], rel=1e-5)


def bf16(world: Any) -> list[float]:
    return [r["loss"] for r in quiet(precision="bf16", optimizer=Recording).fit(4)]


def test_bf16_losses_are_close_but_not_equal() -> None:
    losses, _, _ = one_process(points(), steps=4, loss=mean_loss)
    (found,) = run_ranks(bf16, 1)

    assert found == pytest.approx(losses, rel=0.03)
    assert found != pytest.approx(losses, rel=1e-6)
