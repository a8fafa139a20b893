"""Steps on data that takes 20 ms a batch to read, with workers, without, and without that time; all of it is slept."""

from __future__ import annotations

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.table import Row, absolute

ROUNDS = 9
STEPS = 20
STEP_SECONDS, BATCH_SECONDS = 0.04, 0.02
WORKERS = 2
BAR = 0.05


def run(settings: Settings) -> list[Row]:
    """A row: the share of the reading that steps still wait for."""
    shown: list[float] = []
    seconds: list[tuple[float, float]] = []
    with Ranks("data.loading_ranks", 1, folder=settings.folder, step=STEP_SECONDS) as ranks:
        for _ in range(settings.count(ROUNDS)):
            ideal, ahead, in_step = (
                ranks.ask("steps", count=STEPS, batch_seconds=batch, workers=workers)[0]
                for batch, workers in ((0.0, 0), (BATCH_SECONDS, WORKERS), (BATCH_SECONDS, 0))
            )
            shown.append((ahead - ideal) / (in_step - ideal))
            seconds.append((ahead, in_step))
    ahead, in_step = (sorted(some)[len(some) // 2] * 1e3 for some in zip(*seconds, strict=True))
    return [
        absolute(
            f"reading that a step waits for, {BATCH_SECONDS * 1e3:g} ms a batch, workers={WORKERS}",
            *(shown, BAR, "x"),
            peer=f"workers=0: 1 x; a step {ahead:.1f} ms with workers, {in_step:.1f} ms without",
        )
    ]
