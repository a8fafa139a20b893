"""Test that ranks save at a step boundary and end if their parent, controller or a rank is killed or told to end.

The saved training can continue. Each test starts and ends its own cluster.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked_parents import forked_parents
from ranks import run_ranks
from waiting import until

from nbkit import Cluster
from nbkit.errors import NbkitError
from nbkit.wire.messages import GetStatus

SETUP = """
import time
import torch
from torch import nn
from torch.nn import functional as F
import nbkit

def made(folder, pause):
    torch.set_default_dtype(torch.float64)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return nbkit.Trainer(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)), loss=F.mse_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=[(x[i], x[i].sum().tanh().reshape(1)) for i in range(64)], batch_size=8, strategy="zero1",
        callbacks=[lambda trainer, record: time.sleep(pause)], log_dir=None,
        checkpoints=nbkit.Checkpoints(path=folder, every=False), progress=False,
    )
"""
WAYS = {
    "the parent is killed": ("parent", signal.SIGKILL, "the parent of the ranks has ended"),
    "the parent gets SIGTERM": ("parent", signal.SIGTERM, "the cluster was told to end"),
    "the controller is killed": ("controller", signal.SIGKILL, "the controller of the cluster has ended"),
    "a rank gets SIGTERM": ("rank", signal.SIGTERM, "told to end"),
}


def gone_on(world: Any, folder: str) -> tuple[int, list[float], list[float]]:
    """Return the step of the checkpoint, and the losses of two trainings: one continues from it, one is undisturbed."""
    names: dict[str, Any] = {}
    exec(SETUP, names)
    loaded, alone = names["made"](None, 0), names["made"](None, 0)
    loaded.load(folder)
    step = loaded.step
    for trainer in (loaded, alone):
        trainer.fit(until=step + 3)
    return step, *([record["loss"] for record in trainer.history] for trainer in (loaded, alone))


def test_a_process_forked_by_a_cell_ends_by_sigterm(two: Cluster) -> None:
    # The signal may come before the process begins. With the rank's handler, about 7 of 20 would survive it.
    code = """
import multiprocessing, time
fork, codes = multiprocessing.get_context("fork"), set()
for _ in range(20):
    other = fork.Process(target=time.sleep, args=(60,))
    other.start(); other.terminate(); other.join(10)
    codes.add(other.exitcode)
    if other.exitcode is None:
        other.kill()
        break
codes
"""
    assert two.run(code).values == {0: {-signal.SIGTERM}, 1: {-signal.SIGTERM}}


# tests/notebook/cluster/test_launch.py also tests ranks without a controller, and test_parent.py a parent that gets
# SIGTERM.
LONG = ("the parent gets SIGTERM", "the controller is killed")


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.long) if way in LONG else way for way in WAYS])
def test_a_training_ends_at_a_step_boundary_with_a_checkpoint(way: str, nbkit_home: Path, tmp_path: Path) -> None:
    whom, number, why = WAYS[way]
    folder = tmp_path / "saved"
    with forked_parents(controllers=whom != "controller"):
        cluster = Cluster.start(2, cpu=True, name="ended", ttl=600)
    entry = cluster.entry
    try:
        cluster.run(SETUP)
        handle = cluster.run(f"trainer = made({str(folder)!r}, 0.02)\ntrainer.fit(100_000)", detach=True)
        client = cluster.connection.client
        while client.ask([0], GetStatus()).get(0, {}).get("progress", {}).get("step", 0) < 3:
            time.sleep(0.05)
        os.kill({"parent": entry.parent, "controller": entry.controller, "rank": entry.ranks[1]}[whom].pid, number)
        said = rf"(?s){why}.*has ended after step \d+, saved to {folder}.*trainer\.load"
        with pytest.raises(NbkitError, match=said) as caught:
            handle.wait(timeout=60)
        assert "died" not in str(caught.value)
        ending = entry.ranks if whom != "rank" else entry.ranks[1:]
        until(lambda: not any(rank.is_alive() for rank in ending), 20)
        ((step, loaded, alone),) = run_ranks(gone_on, 1, str(folder))
        assert f"after step {step}," in str(caught.value) and step >= 3
        assert loaded == pytest.approx(alone, abs=1e-10)
        if whom != "rank":
            with pytest.raises(NbkitError, match="has ended"):
                cluster.run("1")
    finally:
        cluster.stop()
