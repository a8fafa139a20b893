"""Seconds of a step as foretold before it ever ran, and what the recommendation costs beside the best, all measured.

A scenario is a model on a mesh over a link. Blocks sleep instead of computing and links are slept too
(bench/rigs/slept_link.py), so that ranks on shared cores take the seconds that they would have alone; the link is
measured as ever, before the first step, and knows nothing of its rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rigs.forked import Ranks

RANKS = 4
STRATEGIES = ("ddp", "zero1", "zero3", "tp", "dp=2 tp=2", "pp", "pp microbatches=16", "dp=2 pp=2")
BAR, SHARE = 0.03, 0.9
MEAN, WORST = 0.05, 0.12
ALIKE = 1.02


@dataclass(frozen=True)
class Model:
    """A GPT and its batch. seconds: that a block sleeps for a row, forward; twice as long backward."""

    width: int
    layers: int
    batch: int
    seconds: float


# Of a rank under ddp four seconds, so that what Python adds on a busy machine is little beside it.
LARGE, SMALL = Model(256, 4, 16, 0.08), Model(128, 8, 16, 0.04)


@dataclass(frozen=True)
class Case:
    """latency: seconds of an operation. speed: bytes per second that leave a rank."""

    model: Model
    latency: float
    speed: float


CASES = (
    Case(LARGE, 0.004, 200e6),
    Case(LARGE, 0.004, 25e6),
    Case(LARGE, 0.01, 6.25e6),
    Case(SMALL, 0.004, 25e6),
    Case(SMALL, 0.04, 6.25e6),
)


@dataclass(frozen=True)
class Found:
    """Of a case: seconds by strategy, (measured, predicted)."""

    case: Case
    seconds: dict[str, tuple[float, float]]

    @property
    def chosen(self) -> str:
        """The simplest of those that are predicted as fast as any."""
        best = min(predicted for _, predicted in self.seconds.values())
        return next(name for name, (_, predicted) in self.seconds.items() if predicted <= ALIKE * best)

    @property
    def regret(self) -> float:
        """How much longer its step is than that of the best."""
        return self.seconds[self.chosen][0] / min(measured for measured, _ in self.seconds.values()) - 1

    def __str__(self) -> str:
        each = "; ".join(f"{name} {m:.3f} ({p:.3f}, {p / m - 1:+.1%})" for name, (m, p) in self.seconds.items())
        return f"{self.case}: {self.chosen}, regret {self.regret:.1%}; s measured (predicted): {each}"


def run(folder: Path, cases: Sequence[Case] = CASES, strategies: Sequence[str] = STRATEGIES) -> list[Found]:
    """Every case, printed as it comes."""
    found = []
    for model in dict.fromkeys(case.model for case in cases):
        with Ranks("plan.seconds_ranks", RANKS, folder=folder, **vars(model)) as ranks:
            for case in (case for case in cases if case.model == model):
                ranks.ask("link", latency=case.latency, speed=case.speed)
                seconds = {}
                for strategy in strategies:
                    said = ranks.ask("tried", strategy=strategy)
                    if "refused" in said[0]:
                        print(f"{strategy}: {said[0]['refused']}", flush=True)
                    elif said[0]["predicted"] is not None:
                        seconds[strategy] = max(one["measured"] for one in said), said[0]["predicted"]
                found.append(Found(case, seconds))
                print(found[-1], flush=True)
    return found


def bars(found: Sequence[Found]) -> tuple[bool, str]:
    """Whether seconds and recommendations are as close as they have to be, and the figures."""
    good = sum(one.regret <= BAR for one in found)
    errors = [abs(p / m - 1) for one in found for m, p in one.seconds.values()]
    mean = sum(errors) / len(errors)
    text = f"{len(errors)} steps foretold: {mean:.1%} off on average (bar {MEAN:.0%}), {max(errors):.1%} at worst "
    text += f"(bar {WORST:.0%}); regret at most {BAR:.0%} in {good} of {len(found)} (bar {SHARE:.0%})"
    return mean <= MEAN and max(errors) <= WORST and good >= SHARE * len(found), text
