"""The table of a job says what levers of the data axis would save, where its link is waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.nn import functional as F

from nbkit.planner.link_speed import Way
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.train.estimate.first_seconds import seconds_before_a_step
from nbkit.rank.train.estimate.strategy_table import table
from nbkit.rank.train.trainer import Trainer
from nbkit.strategy import Strategy

CONFIG = GPTConfig(vocab=64, block=16, layers=4, heads=2, width=128)
OPERATIONS = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send")


def tables(world: Any, speeds: tuple[float, ...]) -> list[dict[str, Any]]:
    ids = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))
    job = Trainer(
        model=lambda: GPT(CONFIG),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        data=[(row[:-1], row[1:]) for row in ids],
        batch_size=8,
        strategy="ddp",
        log_dir=None,
        progress=False,
    ).job
    job.builder.learn([Strategy(pp=2)])
    # Seconds that no machine's load can change.
    job.builder._know(costs=(0.1,) * 4)
    found = []
    for speed in speeds:
        link = job.builder.link
        ways = dict.fromkeys(OPERATIONS, Way(1e-4, speed))
        job.builder.link = replace(link, ways=ways, crowded=False)
        job.forget_estimates()
        plain = seconds_before_a_step(job.cost_model(), job.builder, Strategy(dp=2), 8)
        found.append({"plain": plain, **table(job)["levers"]})
    return found


def test_levers_are_in_the_table_where_they_would_save_a_twentieth() -> None:
    slow, quick = run_ranks(tables, 2, (1e6, 1e12), timeout=120)[0]
    assert set(quick) == {"plain"}
    assert slow["strategy"] == "dp=2" and slow["step_s"] == pytest.approx(slow["plain"])
    each = slow["each"]
    assert {"compress=bf16", "compress=int8", "sync_every=8"} <= set(each)
    assert slow["step_s"] > each["compress=bf16"] > each["compress=int8"] > each["sync_every=8"]
