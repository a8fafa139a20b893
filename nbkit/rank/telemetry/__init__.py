"""Measures a job while it trains, and writes the records.

In a cell, after `from nbkit.rank import telemetry`, `telemetry.recent()` lists the newest collectives of this rank, and
`with telemetry.phase("data"):` declares what your own loop is doing.
"""

from nbkit.rank.telemetry.collectives import mode, recent, set_mode
from nbkit.rank.telemetry.phases import clock, phase

__all__ = ["clock", "mode", "phase", "recent", "set_mode"]
