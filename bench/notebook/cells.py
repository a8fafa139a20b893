"""Measure a trivial cell on every rank, from its request to reply and idle.

Compares nbkit with `%%px`, nbdistributed and a plain kernel.
"""

from __future__ import annotations

from contextlib import ExitStack

from bench.rigs.kernel import Kernel
from bench.rigs.peers import only_explicit_cells, start_nbdistributed, start_nbkit, start_px, stop_nbkit, stop_px
from bench.settings import Settings, shuffled
from bench.table import Row, compared, skipped

ROUNDS = 200
SIZES = (2, 4, 8)
WARM_UP = 5  # cells before the first measured one
AGAINST_PX = 1.0
AGAINST_NBDISTRIBUTED = 0.15
NBDISTRIBUTED_UP_TO = 4  # ranks; each of its cells takes a tenth of a second


def run(settings: Settings) -> list[Row]:
    """Return two rows for each cluster size. The smallest also has a row with the plain kernel."""
    rows: list[Row] = []
    for n in settings.sizes(SIZES):
        rows += _at(settings, n, plain=n == SIZES[0])
    return rows


def _at(settings: Settings, n: int, *, plain: bool) -> list[Row]:
    what = f"trivial cell, {n} ranks"
    absent = settings.without_nbdistributed
    sources = {"nbkit": "%%distributed\nx = 1", "%%px": "%%px\nx = 1", "plain kernel": "x = 1"}
    if n <= NBDISTRIBUTED_UP_TO and not absent:
        sources["nbdistributed"] = "%%distributed\nx = 1"
    with ExitStack() as stack:
        kernels = {name: stack.enter_context(Kernel(settings.folder / f"cells-{n}-{name}")) for name in sources}
        start_nbkit(kernels["nbkit"], n)
        stack.callback(stop_nbkit, kernels["nbkit"])
        start_px(kernels["%%px"], n)
        stack.callback(stop_px, kernels["%%px"])
        if "nbdistributed" in kernels:
            start_nbdistributed(kernels["nbdistributed"], n)
            only_explicit_cells(kernels["nbdistributed"])
        arms = {**{name: name for name in sources}, "nbkit again": "nbkit"}
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for name in sources:
            for _ in range(WARM_UP):
                kernels[name].run(sources[name])
        for order in shuffled(list(arms), settings.count(ROUNDS)):
            for arm in order:
                seconds[arm].append(kernels[arms[arm]].run(sources[arms[arm]]).seconds)

    ours, again = seconds["nbkit"], seconds["nbkit again"]
    rows = [compared(what, ours, "`%%px`", seconds["%%px"], again, AGAINST_PX, "ms")]
    if "nbdistributed" in seconds:
        rows.append(compared(what, ours, "nbdistributed", seconds["nbdistributed"], again, AGAINST_NBDISTRIBUTED, "ms"))
    elif n <= NBDISTRIBUTED_UP_TO:
        rows.append(skipped(what, "nbdistributed", absent or ""))
    if plain:
        rows.append(compared(what, ours, "plain kernel", seconds["plain kernel"], again, None, "ms"))
    return rows
