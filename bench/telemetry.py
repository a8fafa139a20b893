"""What telemetry costs a step: calls and bytes counted; then all that is on by default, with times, phases, records on
disk and TensorBoard's scalars. Beside the same step with nothing noted and nothing written.

The same processes train all arms, in blocks that alternate.
"""

from __future__ import annotations

from bench.forked import Ranks
from bench.settings import Settings, shuffled
from bench.stats import ratio
from bench.table import Row, compared

RANKS = 2
STRATEGIES = ("ddp", "zero3", "tp", "pp")
SIZE = {"width": 128, "layers": 4, "block": 64, "batch": 16}
ROUNDS, STEPS = 24, 4
BARS = {"count": 1.01, "time": 1.02}
WORDS = {"count": "counting", "time": "timing, records and scalars on disk"}


def run(settings: Settings) -> list[Row]:
    """Two rows for each strategy."""
    rows = []
    with Ranks("telemetry_ranks", RANKS, folder=settings.folder, **SIZE) as ranks:
        arms = {"off": "off", "off again": "off", "count": "count", "time": "time"}
        for strategy in STRATEGIES:
            ranks.ask("prepare", strategy=strategy)
            seconds: dict[str, list[float]] = {arm: [] for arm in arms}
            cpu: dict[str, list[float]] = {arm: [] for arm in arms}
            for order in shuffled(list(arms), settings.count(ROUNDS)):
                for arm in order:
                    blocks = ranks.ask("block", mode=arms[arm], steps=STEPS)
                    seconds[arm].append(max(wall for wall, _ in blocks))
                    cpu[arm].append(sum(spent for _, spent in blocks))
            for mode, bar in BARS.items():
                what = f"step, {strategy}, {RANKS} ranks, {WORDS[mode]} / without"
                again = [a / b * c for a, b, c in zip(seconds["off again"], seconds["off"], seconds[mode], strict=True)]
                spent = ratio(cpu[mode], cpu["off"])
                note = f"; CPU-seconds of the ranks {spent.middle:.3f} x [{spent.low:.3f}, {spent.high:.3f}]"
                rows.append(compared(what, seconds[mode], "without", seconds["off"], again, bar, "ms", note=note))
    return rows
