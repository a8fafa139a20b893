"""Test that the records of a long training keep a constant size, and are the same after a resume."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch

from nbkit.mesh import Mesh
from nbkit.rank.train.step import history as module
from nbkit.rank.train.step.history import History
from nbkit.rank.train.step.step_stats import Pending, StepReduction


def make_steps(history: History, until: int) -> None:
    """Record steps as a single rank does."""
    for step in range(history.step + 1, until + 1):
        reduction = StepReduction(rank=0, world_size=1, device=torch.device("cpu"))
        reduction.launch(torch.tensor(1.0 / step), 1.0, weighted=False, stage=0, tokens=8, seconds=0.1, fingerprint=0)
        reduction.finish(None)
        history.pending.append(Pending(step, reduction, 0, 8, range(8), 0.1, Mesh(dp=1), "ddp"))
        history.made()
        history.settle(keep=1)


KEPT = 400


@pytest.mark.long
def test_records_of_old_steps_are_thinned_and_memory_stays_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", KEPT)
    monkeypatch.setattr(module, "_THINNED_EVERY", 100)
    history = History(world_size=1)
    tracemalloc.start()
    try:
        make_steps(history, 3 * KEPT)
        gc.collect()  # the amount of garbage differs by chance
        before, _ = tracemalloc.get_traced_memory()
        held = len(history.records)
        make_steps(history, 5 * KEPT)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    steps = [record["step"] for record in history.records]

    assert len(steps) <= 2 * KEPT + 100 and abs(len(steps) - held) <= 100
    assert after - before < 100 * 2 * KEPT, "every record takes memory of its own"
    assert steps[-KEPT:] == list(range(5 * KEPT - KEPT, 5 * KEPT))
    older = [step for step in steps if step < 3 * KEPT]
    assert older == list(range(4, 3 * KEPT, 4))

    resumed = History(world_size=1)
    resumed.replace(history.records[-1]["step"], list(history.records), loaded=True)
    make_steps(history, 5 * KEPT + 300)
    make_steps(resumed, 5 * KEPT + 300)
    assert resumed.records == history.records
