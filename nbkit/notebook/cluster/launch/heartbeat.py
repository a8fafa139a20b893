"""The controller's heartbeat: it asks the engines for a sign of life often while they arrive, seldom afterwards.

ipyparallel registers an engine at a heartbeat, so a short period is a quick start; but a short period for ever is a
percent of a core, taken from the ranks of a machine that has few. ipyparallel has one period for both. Nor may hundreds
of engines be asked as often as two: an answer that comes two periods late does not count, and the controller takes 0.07
ms of a core for each. The controller's own process calls `slow_down` from the configuration file that `launch` writes.
"""

from __future__ import annotations

from typing import Any

FAST_MS = 50
SLOW_MS = 1000
MS_PER_ENGINE = 2  # so that the answers take the controller 3 to 4 % of a core at most
QUIET_SECONDS = 5.0  # without a new engine, after the first one
GIVEN_UP_SECONDS = 300.0  # an engine that the hub gives up never comes back, so it is slow to


def slow_down() -> None:
    """Make every HeartMonitor of this process and its forks beat less often where engines have arrived, or are many."""
    from ipyparallel.controller.heartmonitor import HeartMonitor

    beat = getattr(HeartMonitor, "beat", None)
    if beat is None:
        return  # see ipyparallel_private.py

    def beat_and_adjust(monitor: Any) -> None:
        known = len(monitor.hearts)
        beat(monitor)
        if not monitor.hearts or len(monitor.hearts) > known:
            monitor.last_arrival = monitor.lifetime
        quiet = monitor.lifetime - monitor.last_arrival > QUIET_SECONDS
        period = max(SLOW_MS if quiet else FAST_MS, MS_PER_ENGINE * len(monitor.hearts))
        monitor.caller.callback_time = period
        monitor.max_heartmonitor_misses = int(GIVEN_UP_SECONDS * 1000 / period)

    HeartMonitor.beat = beat_and_adjust
