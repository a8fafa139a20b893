"""Compare open files, threads and memory after a hundred switches of all kinds with those after the first ones."""

from __future__ import annotations

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.stats import quantile
from bench.switch.switch import strategies
from bench.table import Row

RANKS = 4
SWITCHES, WARM = 100, 16
SIZE = {"width": 64, "layers": 4, "batch": 8}
BAR_BYTES = 8 << 20
"""Less than 0.1 MB for each switch, which the allocator and the records of the steps may take."""


def run(settings: Settings) -> list[Row]:
    """Return one row: the worst rank."""
    names = strategies(RANKS)[1:] + strategies(RANKS)[:1]
    count = 2 * WARM if settings.quick else SWITCHES + WARM
    route = [names[i % len(names)] for i in range(count)]
    with Ranks("switch.switch", RANKS, folder=settings.folder, **SIZE) as ranks:
        told = ranks.ask("many", strategies=route)
    # A strategy comes back at every eighth switch. It must find the process as it was.
    start = WARM - 1
    end = len(route) - 1 - (len(route) - 1 - start) % len(names)
    more = {key: max(one[end][key] - one[start][key] for one in told) for key in ("files", "threads", "bytes")}
    seconds = quantile([each["seconds"] for each in told[0][WARM:]]).middle
    return [
        Row(
            f"{end - start} switches, {RANKS} ranks, each with a step: more of open files, threads, memory",
            f"{more['files']:+.0f}, {more['threads']:+.0f}, {more['bytes'] / 2**20:+.1f} MB; "
            f"switch and step {seconds * 1e3:.0f} ms",
            f"after {WARM} switches",
            "",
            "",
            f"0, 0, ≤ {BAR_BYTES >> 20} MB",
            more["files"] <= 0 and more["threads"] <= 0 and more["bytes"] <= BAR_BYTES,
            {key: [each[key] for each in told[0]] for key in ("files", "threads", "bytes")},
        )
    ]
