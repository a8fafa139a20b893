"""Measure switches in place while memory is 90 % full: a rank's peak, compared with the larger model.

The limit is emulated (NBKIT_MEMORY_LIMIT). The peak is the kernel's count of resident bytes, less all that is not a
tensor of a model. Before each switch, the same switch fails on one rank for lack of memory, and rolls back.
"""

from __future__ import annotations

import gc
import os
from itertools import pairwise
from typing import Any

import torch

from bench.rigs.forked import Ranks
from bench.rigs.formulas import Model
from bench.rigs.jobs import config, trainer
from bench.settings import Settings
from bench.table import Row
from nbkit.errors import SwitchError
from nbkit.rank.parallel import fact_finder
from nbkit.rank.parallel.reshard.redistribute import TargetStorage
from nbkit.rank.telemetry.health import bytes_held, reset_peak, storage_bytes
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.estimate.free_memory import side_bytes, trim
from nbkit.strategy import Strategy

RANKS = 4
SIZE = {"width": 640, "layers": 9, "vocab": 1536, "block": 16, "batch": 8}  # 46 million parameters
TOUR = ("ddp", "zero3", "tp", "pp", "zero1", "zero3", "ddp")
"""Each switch goes from one to the next."""
FULL, HALF = 0.9, 0.5
BAR_BYTES = 64 << 20
BAR_LOSS = 1e-5


def run(settings: Settings) -> list[Row]:
    """Return two rows: switches that succeed, and switches that are rolled back."""
    ranks = settings.sizes((RANKS,))
    if not ranks:
        return []
    with Ranks("switch.switch_full", ranks[0], folder=settings.folder, start=TOUR[0], **SIZE) as asked:
        losses: list[float] = []
        done: dict[str, list[dict[str, Any]]] = {}
        back: dict[str, list[dict[str, Any]]] = {}
        for old, new in pairwise(TOUR[:3] if settings.quick else TOUR):
            back[f"{old} → {new}"] = asked.ask("switch", strategy=new, full=FULL, fails_after=HALF)
            done[f"{old} → {new}"] = asked.ask("switch", strategy=new, full=FULL)
            losses += [back[f"{old} → {new}"][0]["loss"], done[f"{old} → {new}"][0]["loss"]]
    with Ranks("switch.switch_full", ranks[0], folder=settings.folder, start=TOUR[0], **SIZE) as asked:
        never = [asked.ask("step")[0] for _ in losses]
    apart = max(abs(one - other) for one, other in zip(losses, never, strict=True))
    size = f"{12 * Model(**SIZE).parameters / 2**20:.0f} MiB of weights and moments, {ranks[0]} ranks, memory 90 % full"
    held = all(one["place"] and one["identical"] for said in done.values() for one in said)
    refused = all(one["failed"] for said in back.values() for one in said)
    return [
        _row(f"switch in place, {size}", done, held, apart),
        _row(f"the same, refused memory half-way and rolled back, {size}", back, refused, apart),
    ]


def _row(what: str, said: dict[str, list[dict[str, Any]]], sound: bool, apart: float) -> Row:
    beyond = {name: max(one["most"] - one["held"] for one in every) for name, every in said.items()}
    most = max(beyond.values())
    return Row(
        what,
        f"at the peak {most / 2**20:.0f} MB beyond the larger model ("
        + ", ".join(f"{name} {extra / 2**20:.0f}" for name, extra in beyond.items())
        + f"); losses {apart:.1g} from never switched",
        "",
        "",
        "",
        f"≤ {BAR_BYTES >> 20} MB; losses ≤ {BAR_LOSS:g}",
        sound and most <= BAR_BYTES and apart <= BAR_LOSS,
        {
            "bytes beyond": list(beyond.values()),
            "pause": [max(one["pause"] for one in every) for every in said.values() if every[0]["pause"] is not None],
        },
    )


CPU = torch.device("cpu")


class Worker:
    """A rank with a GPT job that has made its first step."""

    def __init__(self, *, width: int, layers: int, batch: int, vocab: int, block: int, start: str) -> None:
        setattr(fact_finder, "measure_costs", lambda module, chain, call: (1.0,) * len(chain))  # noqa: B010
        self.job = trainer(config(width, layers, vocab=vocab, block=block), start, batch=batch)
        self.step()

    def switch(self, strategy: str, *, full: float, fails_after: float | None = None) -> dict[str, Any]:
        """Switch under a memory limit of which this rank already uses the part `full`, and return the measurements.

        fails_after: the last rank gets no memory after this part of the new model. Returned values: held: bytes of the
        larger model. most: bytes at the peak, only of the models' tensors. loss: of the step after the switch.
        """
        gc.collect()
        trim(CPU)
        now, old, job = bytes_held()[0], self._held(), self.job.job
        to = Strategy.parse(strategy, job.world_size)
        new = side_bytes(job.builder, job.bytes_per_element(), to, job.rank)
        os.environ["NBKIT_MEMORY_LIMIT"] = str(int(now / full))
        reset_peak()
        said: dict[str, Any] = {"place": None, "identical": None, "pause": None}
        take, failed = TargetStorage.take, False
        if fails_after is not None and job.rank == job.world_size - 1:
            setattr(TargetStorage, "take", _refusing(take, fails_after))  # noqa: B010
        try:
            event = self.job.switch(strategy)
            said = {"place": event.in_place, "identical": event.identical, "pause": event.pause_s}
        except SwitchError:
            failed = True
        finally:
            setattr(TargetStorage, "take", take)  # noqa: B010
        return {
            **said,
            "failed": failed,
            "held": max(old, new),
            "most": bytes_held()[1] - (now - old),
            "loss": self.step(),
        }

    def step(self) -> float:
        """Make one step and return its loss."""
        loss = float(self.job.fit(1)[-1]["loss"])
        for bucket in _buckets(self.job.job.sharded_model.data):
            bucket.zero_()  # untouched memory would not count: buckets are new after the first step
        return loss

    def _held(self) -> int:
        """Return the bytes of weights, of optimizer state, and of the buffers that hold gradients between steps."""
        sharded_model, inner = self.job.job.sharded_model, self.job.job.optimizer.inner
        seen: set[int] = set()
        state = [tensor for tensor, _ in job_state.state(sharded_model, inner).values()]
        return storage_bytes([*state, *_buckets(sharded_model.data)], seen)


def _buckets(data: Any) -> list[torch.Tensor]:
    """Return the buffers that a data axis keeps for gradients."""
    if hasattr(data, "_replicas"):
        return [bucket.flat for bucket in data._replicas._buckets]
    if hasattr(data, "_buckets"):
        return [grad for bucket in data._buckets for grad in bucket.grads]
    return [part.sums for unit in data.parts for part in unit._parts if part.sums is not None]


def _refusing(take: Any, after: float) -> Any:
    taken = 0

    def refusing(sharded_model: TargetStorage, key: str) -> None:
        nonlocal taken
        taken += 1
        if taken > after * len(sharded_model.state):
            raise MemoryError(f"refused {key}")
        take(sharded_model, key)

    return refusing
