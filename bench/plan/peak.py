"""Bytes that ranks hold at the peak of a step, counted operation by operation, beside what the planner computes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plan.models import NAMES
from bench.rigs.forked import Ranks

RANKS, ROWS = 4, 32
WIDTHS = (64, 128)
STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "hsdp",
    "tp",
    "pp",
    "pp schedule=gpipe",
    "pp schedule=zbv",
    "dp=2 tp=2",
    "dp=2 pp=2",
    "dp=2 cp=2",
    "tp=2 pp=2",
)
MEAN, WORST, REST = 0.03, 0.08, 0.005
"""The bars: of the fullest rank, at the peak and at rest."""


@dataclass(frozen=True)
class Found:
    """Of one cell. measured, predicted: bytes of the fullest rank. rest: the error at rest. refused: why."""

    cell: str
    measured: int = 0
    predicted: int = 0
    rest: float = 0.0
    moment: str = ""
    refused: str = ""

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        if self.refused:
            return f"{self.cell:36} refused: {self.refused}"
        sizes = f"{self.measured / 1e6:8.2f} MB measured {self.predicted / 1e6:8.2f} predicted"
        return f"{self.cell:36} {sizes} {self.error:+7.2%}   at rest {self.rest:+.2%}   {self.moment}"


def run(
    folder: Path, *, names: Sequence[str] = NAMES, widths: Sequence[int] = WIDTHS, only: Sequence[str] = STRATEGIES
) -> list[Found]:
    """Every cell, printed as it comes."""
    found = []
    for name in names:
        for width in widths:
            with Ranks("plan.peak_ranks", RANKS, folder=folder) as ranks:
                for strategy in only:
                    cell = f"{name} {width} {strategy}"
                    said = ranks.ask("peak", name=name, width=width, rows=ROWS, strategy=strategy)
                    found.append(_found(cell, said))
                    print(found[-1], flush=True)
    return found


def bars(found: Sequence[Found]) -> tuple[bool, str]:
    """Whether they are met, and the figures."""
    ran = [one for one in found if not one.refused]
    mean, worst = statistics.fmean(abs(one.error) for one in ran), max(abs(one.error) for one in ran)
    rest = max(abs(one.rest) for one in ran)
    text = f"{len(ran)} cells: peak {mean:.2%} off on average (bar {MEAN:.0%}), {worst:.2%} at worst (bar {WORST:.0%})"
    return mean <= MEAN and worst <= WORST and rest <= REST, f"{text}; at rest {rest:.2%} (bar {REST:.1%})"


def _found(cell: str, said: Sequence[dict[str, Any]]) -> Found:
    if "refused" in said[0]:
        return Found(cell, refused=said[0]["refused"])
    full = max(said, key=lambda one: one["measured"])
    rest = max(one["held"] for one in said) / max(one["rest"] for one in said) - 1
    return Found(cell, full["measured"], max(one["predicted"] for one in said), rest, full["moment"])
