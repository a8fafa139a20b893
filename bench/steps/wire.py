"""Compare the bytes of a training step on the wire with published formulas and with telemetry.

Bytes on the wire are those of the loopback interface in a private network namespace. The bytes of one step are
subtracted from those of three, so that messages at the beginning and end of a run, and the barriers around it, do not
count.
"""

from __future__ import annotations

import gc
from typing import Any

from bench.rigs.forked import Ranks
from bench.rigs.formulas import Model, wire_bytes
from bench.rigs.jobs import config, trainer
from bench.rigs.loopback import measured
from bench.settings import Settings
from bench.table import Row, skipped
from nbkit.rank.telemetry import collectives
from nbkit.rank.train.trainer import Trainer
from nbkit.strategy import Strategy

RANKS = (2, 4)
STRATEGIES = {
    2: ("ddp", "zero1", "zero2", "zero3", "tp", "pp", "cp=2"),
    4: ("ddp", "zero1", "zero2", "zero3", "hsdp shard=2", "tp", "pp", "pp schedule=zb", "cp=4",
        "dp=2 tp=2", "dp=2 pp=2 schedule=zbv", "zero3 tp=2", "tp=2 pp=2"),
}  # fmt: skip
SIZE = {"width": 320, "layers": 8, "batch": 8}  # 10 million parameters
QUICK = {"width": 64, "layers": 8, "batch": 8}
SHORT, SEQUENCE, LONG = 16, 64, 128
"""Tokens of a row. A data axis sends as much with few tokens. A pipeline sends little else, so that it gets many."""
BAR, RECORDED = 1.01, 0.01


def run(settings: Settings) -> list[Row]:
    """Return one row for each strategy and number of ranks."""
    if not settings.isolated:
        return [skipped("wire bytes of a step", "formula", "no private network namespace here")]
    size = QUICK if settings.quick else SIZE
    rows = []
    for num in settings.sizes(RANKS):
        with Ranks("steps.wire", num, folder=settings.folder) as ranks:
            for name in STRATEGIES.get(num, STRATEGIES[4]):
                strategy = Strategy.parse(name, num)
                block = {strategy.dp: SHORT, strategy.pp: LONG}.get(num, SEQUENCE)
                model = Model(vocab=256, block=block, **size)
                said = ranks.ask("step", strategy=name, block=block, **size)
                rows.append(_row(model, strategy, said[0]["wire"], [one["recorded"] for one in said]))
    return rows


def _row(model: Model, strategy: Strategy, wire: float, recorded: list[dict[str, float]]) -> Row:
    formula = wire_bytes(model, strategy)
    by_axis: dict[str, float] = {}
    for one in recorded:
        for axis, size in one.items():
            by_axis[axis] = by_axis.get(axis, 0.0) + size
    seen, total = sum(by_axis.values()), sum(formula.values())
    apart = [f"{axis} {by_axis.get(axis, 0) / formula[axis]:.4f}" for axis in formula]
    exact = all(abs(by_axis.get(axis, 0) / formula[axis] - 1) <= 1e-3 for axis in formula)
    return Row(
        f"wire bytes of a step, {model.parameters / 1e6:.0f} M parameters, {strategy}",
        f"{wire / 1e6:.2f} MB; recorded / wire {seen / wire:.4f}; recorded / formula by axis {', '.join(apart)}",
        f"formula {total / 1e6:.2f} MB",
        f"{wire / total:.4f}",
        "",
        f"≤ {BAR:g} x; recorded / wire 1 ± {RECORDED:g}; recorded / formula 1 ± 0.001",
        wire / total <= BAR and abs(seen / wire - 1) <= RECORDED and exact,
        {"wire": [wire], "formula": [total], "recorded": [seen]},
    )


class Worker:
    """A rank that keeps nothing from one strategy to the next."""

    def __init__(self) -> None:
        collectives.set_mode("count")

    def step(self, *, width: int, layers: int, block: int, batch: int, strategy: str) -> dict[str, Any]:
        """Train and return the bytes of a step.

        wire: of all ranks. recorded: axis -> bytes that this rank sends, from what telemetry recorded.
        """
        job = trainer(config(width, layers, block=block), strategy, batch=batch)
        job.fit(1)  # the first step also creates groups and connections
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
    """Train `steps` steps and return their bytes, like `Worker.step`. Collective."""
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
    """Return the bytes that a rank sends for each byte that it hands to the operation.

    gloo's algorithms are ring-optimal. Raises ValueError for other operations.
    """
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
