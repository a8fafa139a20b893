"""How long a training stands for a checkpoint of half a gigabyte, beside copying the same bytes in host memory.

The steps are sleeps, so that what a step waits for is seen, and not what it computes: a checkpoint is taken in the
middle of them, and what the step that it is taken in lasts beyond the usual one is the pause.
"""

from __future__ import annotations

import statistics

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.stats import ratio
from bench.table import Row

RANKS = 2
ROUNDS = 9
BAR = 1.5


def run(settings: Settings) -> list[Row]:
    """Two rows: the pause, and the longest of the steps that are made while a thread writes."""
    num_bytes = (32 if settings.quick else 500) << 20
    copies, pauses, others, waited = [], [], [], []
    with Ranks("checkpoint.checkpoint_pause_ranks", RANKS, folder=settings.folder, num_bytes=num_bytes) as ranks:
        ranks.ask("pause", path="kept", beside=True)  # memory and group for the first time
        for number in range(settings.count(ROUNDS)):
            copies.append(max(ranks.ask("copy")))
            own, other = zip(*ranks.ask("pause", path="kept", beside=True), strict=True)
            pauses.append(max(own))
            others.append(max(other))
            if number < 2:
                waited.append(max(one for one, _ in ranks.ask("pause", path="kept", beside=False)))
    figure, what = ratio(pauses, copies), f"checkpoint of {num_bytes >> 20} MiB, {RANKS} ranks"
    return [
        Row(
            f"{what}, written beside the training: pause of the step",
            _ms(pauses),
            f"copy of the same bytes in host memory {_ms(copies)}; a save that is waited for {_ms(waited)}",
            f"{figure.middle:.2f} [{figure.low:.2f}, {figure.high:.2f}]",
            "",
            f"≤ {BAR:g} x (median)",
            figure.middle <= BAR,
            {"nbkit": pauses, "copy": copies},
        ),
        Row(f"{what}: the longest step while it is written, beyond the usual", _ms(others), "", "", "", "", None),
    ]


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f} ms"
