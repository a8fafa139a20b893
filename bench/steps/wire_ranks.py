"""A rank that trains a step under a strategy, and says what it recorded of it. Run by bench.rigs.forked."""

from __future__ import annotations

import gc
from typing import Any

from bench.rigs.jobs import config, trainer
from bench.rigs.loopback import measured
from nbkit.rank.telemetry import collectives
from nbkit.rank.train.trainer import Trainer


class Worker:
    """Nothing is kept from one strategy to the next."""

    def __init__(self) -> None:
        collectives.set_mode("count")

    def step(self, *, width: int, layers: int, block: int, batch: int, strategy: str) -> dict[str, Any]:
        """wire: bytes of a step, of all ranks; recorded: axis -> bytes that this rank sends by what telemetry noted."""
        job = trainer(config(width, layers, block=block), strategy, batch=batch)
        job.fit(1)  # groups, connections and agreements of the first step
        one, three = trained(job, 1), trained(job, 3)
        job.job.sharded_model.data.close()
        del job
        gc.collect()
        axes = {*one["recorded"], *three["recorded"]}
        return {
            "wire": (three["wire"] - one["wire"]) / 2,
            "recorded": {axis: (three["recorded"].get(axis, 0) - one["recorded"].get(axis, 0)) / 2 for axis in axes},
        }


def trained(job: Trainer, steps: int) -> dict[str, Any]:
    """wire: bytes of `steps` steps, of all ranks; recorded: as `step` says. Collective."""
    ends = []

    def train() -> None:
        ends.append(collectives.ring.end)
        job.fit(steps)
        ends.append(collectives.ring.end)

    _, wire = measured(train)
    calls, lost = collectives.ring.between(*ends)
    assert not lost
    found: dict[str, float] = {}
    for call in calls:
        found[call.axis] = found.get(call.axis, 0.0) + call.bytes * _sent(call.op, len(call.group.members))
    return {"wire": wire, "recorded": found}


def _sent(op: str, n: int) -> float:
    """Bytes that a rank sends for each that it hands to the operation, by gloo's algorithms, which are ring-optimal."""
    known = {
        "all_reduce": 2 * (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_gather": n - 1,
        "all_to_all": (n - 1) / n,
        "send": 1,
        "recv": 0,
        "barrier": 0,
    }
    if op not in known:
        raise ValueError(f"{op}: how much of it is sent is not known")
    return known[op]
