"""Trainings with faults, compared with one without: the curve must continue, or the training end in order.

python -m tests.support.chaos                   all of it, as make chaos
python -m tests.support.chaos faults N=20 SEED=3    20 runs from seed 3 on; others: kill, pairs
python -m tests.support.chaos kill N=2 zero3 "dp=2 pp=2"    in these strategies only
python -m tests.support.chaos goodput MINUTES=20 EVERY=100     takes 40 minutes, and is not in "all of it"

kill    a rank is killed in each strategy: seconds to the first step after it, by part; steps lost; the curve.
faults  one fault of a list, at a random moment, under a random strategy, with a switch and saves. Each run ends with
        the curve of a run without faults, or in order: with its reason, and a checkpoint that can continue.
pairs   two of 4 and of 8 ranks are killed at once; they hold each other's backup, or not.
goodput ranks are killed again and again, under zero3 and then ddp: steps per second, compared with the same
        training without kills, which takes as long.

The number of a run seeds its random choices: SEED=17 N=1 repeats run 17.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from nbkit.notebook.cluster import registry
from tests.support.chaos_bench import STRATEGIES, Bench
from tests.support.chaos_faults import FAULTS, faults
from tests.support.chaos_goodput import GOODPUT, goodput
from tests.support.chaos_kill import kill, pairs


@contextlib.contextmanager
def home() -> Iterator[Path]:
    """Put clusters that are started inside into their own folder. End those that are left."""
    with tempfile.TemporaryDirectory(prefix="nbkit-chaos-") as folder:
        before, os.environ["NBKIT_HOME"] = os.environ.get("NBKIT_HOME"), folder
        try:
            yield Path(folder)
        finally:
            for entry in registry.entries():
                registry.end(entry)
            del os.environ["NBKIT_HOME"]
            if before is not None:
                os.environ["NBKIT_HOME"] = before


def main(words: Sequence[str]) -> int:
    strategies = [word for word in words if word in STRATEGIES]
    words = [word for word in words if word not in STRATEGIES]
    numbers = {name: int(value) for name, _, value in (word.partition("=") for word in words) if value}
    parts = [word for word in words if "=" not in word]
    wrong: list[str] = []
    with home() as folder:
        if not parts or "faults" in parts:
            bench = Bench()
            only = next((word for word in parts if word in FAULTS), "")
            wrong += faults(bench, folder, numbers.get("SEED", 0), numbers.get("N", 200), only)
            bench.end()
        if not parts or "kill" in parts:
            bench = Bench()
            wrong += kill(bench, numbers.get("N", 10), strategies or STRATEGIES)
            bench.end()
        if not parts or "pairs" in parts:
            wrong += pairs((4, 8))
        if "goodput" in parts:
            bench = Bench()
            minutes, every = numbers.get("MINUTES", 20), numbers.get("EVERY", 100)
            wrong += goodput(bench, minutes, every, strategies or GOODPUT, numbers.get("SEED", 0))
            bench.end()
    for line in wrong:
        print(line)
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
