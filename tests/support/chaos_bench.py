"""The cluster and the training that `make chaos` disturbs, and the curve of an undisturbed training."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from nbkit import Cluster
from nbkit.errors import NbkitError
from nbkit.notebook.cluster import registry
from nbkit.wire.messages import GetStatus

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp shard=2", "tp=4", "pp=4", "dp=2 tp=2", "dp=2 pp=2")
STEPS, SWITCHED, SAVED = 24, 9, 5
EQUAL = 1e-10
RUN_SECONDS = 240.0  # a run that takes longer hangs, on a busy machine too

SETUP = """
import os, signal, time
import torch
from torch.nn import functional as F
from nbkit.rank.models.gpt import GPT, Block, GPTConfig

torch.set_default_dtype(torch.float64)
at = {}    # step -> (rank, what happens in it)
happened = []

class Fails(torch.optim.AdamW):
    def step(self, closure=None):
        super().step()
        if training := globals().get("trainer"):
            stamps = globals().setdefault("stamps", [])
            stamps.append((training.step, time.time(), time.process_time()))
        happens("update")

def happens(place):
    training = globals().get("trainer")
    here = at.get(training.step if training is not None else -1)
    if here is None or here[0] != rank or here[2] != place or here in happened:
        return
    happened.append(here)
    if here[1] == "exception":
        raise ValueError("planted")
    if here[1] == "memory":
        raise torch.OutOfMemoryError("planted")
    os.kill(os.getpid(), getattr(signal, here[1]))

class Passing(Block):
    def forward(self, x):
        happens("forward")
        return super().forward(x)

def model(layers=4, width=16, vocab=24, block=8):
    made = GPT(GPTConfig(vocab=vocab, block=block, layers=layers, heads=4, width=width, dropout=0.1))
    for block in made.blocks:
        block.__class__ = Passing
    return made

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

draw = torch.Generator().manual_seed(5)
rows = [tuple(torch.randint(24, (2, 8), generator=draw)) for _ in range(36)]

def pace(trainer, record):
    time.sleep(PAUSE)

def make(strategy, folder=None, **options):
    at.clear()
    happened.clear()
    given = dict(model=model, batch_size=8, clip_norm=1.0, callbacks=[pace],
                 recovery=nbkit.Recovery(on_oom="fit", backup_every=1))
    saves = dict(checkpoints=nbkit.Checkpoints(path=folder, every=SAVED)) if folder else {}
    return nbkit.Trainer(loss=loss, optimizer=lambda m: Fails(m.parameters(), lr=0.01), data=rows, strategy=strategy,
                         log_dir=None, progress=False, **{**given, **saves, **options})

def losses():
    return [record["loss"] for record in trainer.history]
"""


class Wrong(Exception):
    """A run that neither continued with an equal curve nor ended in order."""


class Bench:
    """The cluster that runs share until one of them ends it, and the curve of an undisturbed training."""

    def __init__(self, n: int = 4, pause: float = 0.02) -> None:
        self.n, self.pause = n, pause
        self._cluster: Cluster | None = None
        self.alone: list[float] = []

    @property
    def cluster(self) -> Cluster:
        """Return the cluster. Start one if there is none."""
        if self._cluster is None:
            self._cluster = Cluster.start(self.n, cpu=True, name="chaos", ttl=600)
            self.set_up(self._cluster)
        return self._cluster

    def set_up(self, cluster: Cluster) -> None:
        cluster.run(f"PAUSE, SAVED = {self.pause}, {SAVED}\n{SETUP}", timeout=RUN_SECONDS)
        if not self.alone:
            cluster.run(f"trainer = make('ddp')\ntrainer.fit({STEPS})", timeout=RUN_SECONDS)
            self.alone = cluster.run("losses()").values[0]

    def take(self, name: str) -> Cluster:
        """Attach to the cluster that another process has started."""
        self.end()
        self._cluster = Cluster.attach(name)
        return self._cluster

    def end(self) -> None:
        """End the cluster. Raise Wrong if something is left of it."""
        if (cluster := self._cluster) is None:
            return
        self._cluster = None
        entry = cluster.entry
        with contextlib.suppress(NbkitError):
            cluster.stop()
        registry.end(entry)
        if left := entry.left():
            raise Wrong(f"{len(left)} processes are left of the cluster")

    def check(self, values: dict[int, Any], steps: int = STEPS) -> None:
        """Raise Wrong unless every rank has the curve of the undisturbed training."""
        for rank in range(self.n):
            found = values.get(rank) or []
            if len(found) != steps:
                raise Wrong(f"rank {rank} has {len(found)} losses of {steps}")
            apart = max(abs(one - other) for one, other in zip(found, self.alone, strict=False))
            if apart > EQUAL:
                raise Wrong(f"rank {rank}: losses differ by {apart:.2g}")

    def reach(self, step: int) -> None:
        """Return when the training has made so many steps, or has ended."""
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            told = self.cluster.connection.client.ask(range(self.n), GetStatus())
            steps = [each["progress"].get("step", 0) for each in told.values() if each["training"]]
            if max(steps, default=0) >= step or self.cluster.connection.busy() is None:
                return
            time.sleep(0.02)

    def goes_on(self, folder: Path) -> None:
        """Load the checkpoint on a new cluster, and check that the curve continues."""
        self.end()
        self.cluster.run(f"trainer = make('ddp', {str(folder)!r})\ntrainer.load({str(folder)!r})", timeout=RUN_SECONDS)
        self.cluster.run(f"trainer.fit(until={STEPS})", timeout=RUN_SECONDS)
        self.check(self.cluster.run("losses()").values)
