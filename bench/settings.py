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
    """folder: scratch of this run. isolated: nothing that runs here can reach a process outside.

    rounds: instead of each benchmark's own number. ranks: only these cluster sizes. steps: of `long_run`, in
    the place of minutes.
    """

    folder: Path
    isolated: bool
    quick: bool = False
    rounds: int | None = None
    ranks: tuple[int, ...] | None = None
    steps: int | None = None

    def count(self, full: int) -> int:
        """Rounds to measure, where a full run takes `full`."""
        return self.rounds or (min(full, QUICK_ROUNDS) if self.quick else full)

    def sizes(self, full: Sequence[int]) -> list[int]:
        """Cluster sizes to measure, where a full run takes `full`."""
        return [n for n in full if self.ranks is None or n in self.ranks]

    @property
    def without_nbdistributed(self) -> str | None:
        """Why nbdistributed cannot be measured here; None when it can."""
        if find_spec("nbdistributed") is None:
            return "not installed"
        # It listens on every interface, and ends processes by patterns of their command lines.
        return None if self.isolated else "not run: no private network and process space here"


def shuffled(arms: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The arms once per round, each round in another order, so that no arm always follows the same other."""
    order = random.Random(0)
    for _ in range(rounds):
        yield order.sample(list(arms), len(arms))
