"""The cell that ranks run before a test trains: it defines a small network, its data, and a function for Trainers.

The network has float64 weights and dropout: two trainings are equal if their losses agree to 1e-10. A test adds its own
cell; `defaults` are the other options of its trainings, `slow` are extra seconds of a step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence

import pytest
from waiting import until

from nbkit import Cluster
from nbkit.wire.messages import GetStatus

NETWORK = """
import time
import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
slow, defaults = 0.02, {}

class Net(nn.Module):
    def __init__(self, width=16, buffer=0):
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 1)
        if buffer:
            self.register_buffer("seen", torch.zeros(buffer))

    def forward(self, x):
        return self.second(F.dropout(torch.tanh(self.first(x)), 0.1, self.training))

def rows():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return [(x[i], x[i].sum().tanh().reshape(1)) for i in range(64)]

def pace(trainer, record):
    time.sleep(slow)

def make(**options):
    optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = dict(model=Net, loss=F.mse_loss, optimizer=optimizer, data=rows(), batch_size=8)
    settings |= dict(callbacks=[pace], progress=False, log_dir=None)
    return nbkit.Trainer(**{**settings, **defaults, **options})
"""


def cluster_of(ranks: int, name: str, setup: str) -> Iterator[Cluster]:
    """Yield a cluster of CPU ranks that have run `setup`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel does not capture stdout if this is set
        cluster = Cluster.start(ranks, cpu=True, name=name, ttl=600)
    cluster.run(setup)
    yield cluster
    cluster.stop()


def until_step(cluster: Cluster, step: int, *, rank: int = 0) -> None:
    """Wait until the training has made so many steps, according to `rank`."""

    def made() -> bool:
        told = cluster.connection.client.ask([rank], GetStatus()).get(rank, {})
        return bool(told.get("training")) and told["progress"].get("step", 0) >= step

    until(made)


def kill_at(cluster: Cluster, ranks: Sequence[int], step: int) -> threading.Thread:
    """Kill the ranks, from a thread, when another rank says that the training has made so many steps."""
    pids = [cluster.entry.ranks[rank].pid for rank in ranks]
    other = next(rank for rank in range(len(cluster.entry.ranks)) if rank not in ranks)

    def act() -> None:
        until_step(cluster, step, rank=other)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread
