"""Compare a table's predictions of a switch and of the steps after it with measurements.

The job goes through ordered pairs of strategies. Before each switch, its table predicts the cost of the switch. Seconds
of a step are predicted for strategies that have not run, so that each of them has a new job.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import torch.distributed as dist

from bench.rigs.forked import Ranks
from bench.rigs.jobs import config, trainer
from bench.settings import Settings
from bench.switch.switch import strategies, tour
from bench.table import Row
from nbkit.rank.train.estimate import strategy_table
from nbkit.rank.train.estimate.time_model import measured_pace
from nbkit.strategy import Strategy

RANKS = 4
SIZE = {"width": 256, "layers": 8, "batch": 8}
QUICK = {"width": 64, "layers": 8, "batch": 8}
STEPS = 8
STEPS_ON = 2  # ranks: not more than two cores
FIRST = "ddp"
BAR_PAUSE, BAR_STEP = 0.25, 0.15


def run(settings: Settings) -> list[Row]:
    """Return three rows: bytes of every pair, seconds of every switch, seconds of a step."""
    size = QUICK if settings.quick else SIZE
    return [*_switches(settings, size), _steps(settings, size)]


def _switches(settings: Settings, size: dict[str, int]) -> list[Row]:
    said = []
    with Ranks("switch.predicted", RANKS, folder=settings.folder, **size) as ranks:
        route = tour(strategies(RANKS))
        for _, new in list(pairwise(route))[: 8 if settings.quick else None]:
            said.append(ranks.ask("switch", strategy=new)[0])
    exact = sum(one["bytes"][0] == one["bytes"][1] for one in said)
    known = [one["seconds"] for one in said if one["seconds"][0] is not None]
    predicted, measured = ([seconds[which] for seconds in known] for which in (0, 1))
    errors = [abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]
    return [
        Row(
            f"bytes of a switch, predicted / measured, {len(said)} pairs, {RANKS} ranks",
            f"{exact}/{len(said)} equal",
            "measured",
            "",
            "",
            "all",
            exact == len(said),
        ),
        Row(
            f"pause of a switch, predicted beside measured, {len(said)} switches, {RANKS} ranks",
            f"off by {median(errors):.0%} (median); {len(said) - len(known)} shown as unknown, the very first",
            "measured",
            f"{median(a / b for a, b in zip(predicted, measured, strict=True)):.2f}",
            "",
            f"≤ {BAR_PAUSE:.0%} (median)",
            median(errors) <= BAR_PAUSE,
            {"predicted": predicted, "measured": measured},
        ),
    ]


def _steps(settings: Settings, size: dict[str, int]) -> Row:
    found = []
    for name in ("zero1", "zero3", "tp", "pp"):
        with Ranks("switch.predicted", STEPS_ON, folder=settings.folder, **size) as ranks:
            found.append((name, *ranks.ask("steps", strategy=name, steps=STEPS)[0]))
    known = [(name, predicted, measured) for name, predicted, measured in found if predicted is not None]
    errors = [abs(predicted / measured - 1) for _, predicted, measured in known]
    told = ", ".join(f"{name} {predicted * 1e3:.0f} for {measured * 1e3:.0f} ms" for name, predicted, measured in known)
    return Row(
        f"seconds of a step of a strategy that has not run, {STEPS_ON} ranks, from {FIRST}",
        (f"off by {median(errors):.0%} (median): {told}; " if known else "")
        + (f"{len(found) - len(known)} of {len(found)} shown as unknown" if len(known) < len(found) else ""),
        "measured",
        "",
        "",
        f"≤ {BAR_STEP:.0%} (median), or unknown",
        not errors or median(errors) <= BAR_STEP,
    )


class Worker:
    """A rank with a GPT job that begins under ddp."""

    def __init__(self, *, width: int, layers: int, batch: int) -> None:
        self.job = trainer(config(width, layers, block=32), "ddp", batch=batch, log_dir="runs")
        self.job.fit(2)

    def switch(self, strategy: str) -> dict[str, Any]:
        """Switch, make a step, and return `bytes` and `seconds` of the switch: (predicted, measured on this rank)."""
        row = self._row(strategy)
        done = self.job.switch(strategy)
        self.job.fit(1)
        return {"bytes": (row["moved_bytes"], done.moved_bytes), "seconds": (row["switch_s"], done.pause_s)}

    def steps(self, strategy: str, steps: int) -> tuple[float | None, float | None]:
        """Return the seconds of a step of `strategy`: predicted before the switch, and measured. None: unknown."""
        self.job.fit(steps)
        predicted = self._row(strategy)["predicted_step_s"]
        self.job.switch(strategy)
        self.job.fit(steps)
        pace = measured_pace(self.job.job, self.job.job.strategy)
        return predicted, None if pace is None else pace.seconds

    def _row(self, strategy: str) -> dict[str, Any]:
        """Return the row of `strategy` in the table. Only rank 0 makes it; the others wait, to leave it the cores."""
        wanted = str(Strategy.parse(strategy, dist.get_world_size()))
        strategy_table.look_at_all(self.job.job)
        rows = strategy_table.table(self.job.job)["options"] if dist.get_rank() == 0 else []
        dist.barrier()
        found: dict[str, Any] = next(
            (row for row in rows if row["strategy"] == wanted),
            dict.fromkeys(("moved_bytes", "switch_s", "predicted_step_s")),
        )
        return found
