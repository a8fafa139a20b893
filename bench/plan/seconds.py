"""What the strategy that is recommended before the first step costs more than the best of all, each measured.

Compute is slept, so that ranks on shared cores take the seconds that they would have alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rigs.forked import Ranks

RANKS = 4
STRATEGIES = ("ddp", "zero1", "zero3", "dp=2 pp=2", "pp", "pp microbatches=16")
BAR, SHARE = 0.03, 0.9
ALIKE = 1.02


@dataclass(frozen=True)
class Scenario:
    """A GPT, its batch, and the seconds that a block sleeps for a row, forward."""

    width: int
    layers: int
    batch: int
    seconds: float


SCENARIOS = (
    Scenario(64, 4, 16, 0.004),
    Scenario(64, 8, 16, 0.002),
    Scenario(256, 4, 16, 0.004),
    Scenario(384, 4, 16, 0.001),
)


@dataclass(frozen=True)
class Found:
    """Of a scenario: seconds by strategy, (measured, predicted)."""

    scenario: Scenario
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
        each = ", ".join(f"{name} {m * 1e3:.0f} ({p * 1e3:.0f})" for name, (m, p) in self.seconds.items())
        return f"{self.scenario}: {self.chosen}, regret {self.regret:.1%}; ms measured (predicted): {each}"


def run(folder: Path, scenarios: Sequence[Scenario] = SCENARIOS) -> list[Found]:
    """Every scenario, printed as it comes."""
    found = []
    for scenario in scenarios:
        seconds = {}
        with Ranks("plan.regret_ranks", RANKS, folder=folder) as ranks:
            for strategy in STRATEGIES:
                said = ranks.ask("tried", **vars(scenario), strategy=strategy)
                if "refused" not in said[0] and said[0]["predicted"] is not None:
                    seconds[strategy] = max(one["measured"] for one in said), said[0]["predicted"]
        found.append(Found(scenario, seconds))
        print(found[-1], flush=True)
    return found


def bars(found: Sequence[Found]) -> tuple[bool, str]:
    """Whether the regret is small in most scenarios, and the figures."""
    good = sum(one.regret <= BAR for one in found)
    errors = [abs(p / m - 1) for one in found for m, p in one.seconds.values()]
    text = f"regret at most {BAR:.0%} in {good} of {len(found)} scenarios (bar {SHARE:.0%}), seconds "
    return good >= SHARE * len(found), text + f"{sum(errors) / len(errors):.1%} off on average before the first step"
