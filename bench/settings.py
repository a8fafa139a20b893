"""Settings of a run of the benchmarks: how many rounds, on how many ranks, and which peers may run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

QUICK_ROUNDS = 5


@dataclass(frozen=True)
class Settings:
    """The settings of a run. folder: for temporary files. isolated: processes of the run can reach no process outside.

    rounds: replaces each benchmark's own number. ranks: only these cluster sizes. steps: `long_run` ends after this
    number, not after minutes.
    """

    folder: Path
    isolated: bool
    quick: bool = False
    rounds: int | None = None
    ranks: tuple[int, ...] | None = None
    steps: int | None = None

    def count(self, full: int) -> int:
        """Return how many rounds to measure. full: the rounds of a full run."""
        return self.rounds or (min(full, QUICK_ROUNDS) if self.quick else full)

    def sizes(self, full: Sequence[int]) -> list[int]:
        """Return the cluster sizes to measure. full: those of a full run."""
        return [n for n in full if self.ranks is None or n in self.ranks]

    @property
    def without_nbdistributed(self) -> str | None:
        """Return why nbdistributed cannot be measured here; None if it can."""
        if find_spec("nbdistributed") is None:
            return "not installed"
        # It listens on every interface, and ends processes whose command line matches a pattern.
        return None if self.isolated else "not run: no private network and process space here"


def shuffled(arms: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Yield the arms of each round, in a new order every time, so that no arm always follows the same other one."""
    order = random.Random(0)
    for _ in range(rounds):
        yield order.sample(list(arms), len(arms))
