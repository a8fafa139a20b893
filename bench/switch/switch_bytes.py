"""What a switch sends, between all ordered pairs of eight strategies, against the least that it could send.

The lower bound is counted here on flags of elements, and knows nothing of the plan. The bytes are those of the network
interface in a private namespace, less the traffic of two barriers around nothing.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from functools import cache

import numpy as np

from bench.settings import Settings
from bench.switch.switch_bytes_ranks import shards_held, strategies
from bench.table import Row, skipped

RANKS = (4, 8)
WIDTH, LAYERS, QUICK_WIDTH = 320, 8, 64
BYTES_FACTOR, BYTES_PER_RANK = 1.02, 64 << 10
PAUSE_FACTOR, PAUSE_SECONDS = 1.5, 0.150


def run(settings: Settings) -> list[Row]:
    """Rows of bytes, of the pairs that need nothing, of identity and of time, for each number of ranks."""
    rows = []
    for ranks in settings.sizes(RANKS):
        if not settings.isolated:
            return [skipped("bytes of a switch", "lower bound", "no private network namespace here")]
        width = QUICK_WIDTH if settings.quick else WIDTH
        rows += _rows(ranks, _measured(settings, ranks, width), _bounds(ranks, width))
    return rows


Measured = list[tuple[str, str, int, int, float, float, float, bool]]


def _measured(settings: Settings, ranks: int, width: int) -> Measured:
    out = settings.folder / f"switch-{ranks}.json"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bench.switch.switch_bytes_ranks", str(port)]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks), str(width), str(LAYERS), str(out)]) for rank in range(ranks)
    ]
    try:
        if failed := [rank for rank, process in enumerate(started) if process.wait()]:
            raise RuntimeError(f"ranks {failed} failed")
    finally:
        for process in started:
            process.kill()
    return [tuple(row) for row in json.loads(out.read_text())]  # type: ignore[misc]


def _bounds(ranks: int, width: int) -> dict[tuple[str, str], int]:
    """(old, new) -> bytes of the elements that ranks must hold and do not."""

    @cache
    def lacking(before: object, after: object) -> int:
        flags = np.zeros(after.shape, dtype=bool)  # type: ignore[attr-defined]
        for _, box in after.pieces:  # type: ignore[attr-defined]
            flags[box.slices] = True
        for _, box in before.pieces if before is not None else ():  # type: ignore[attr-defined]
            flags[box.slices] = False
        return int(np.count_nonzero(flags)) * 4

    every = {name: shards_held(mesh, zero, width, LAYERS) for name, (mesh, zero) in strategies(ranks).items()}
    return {
        (old, new): sum(
            lacking(before.get(key), layout)
            for before, after in zip(every[old], every[new], strict=True)
            for key, layout in after.items()
        )
        for old in every
        for new in every
        if old != new
    }


def _rows(ranks: int, measured: Measured, bounds: dict[tuple[str, str], int]) -> list[Row]:
    moving = [row for row in measured if bounds[row[0], row[1]]]
    still = [row for row in measured if not bounds[row[0], row[1]]]
    of = f"{len(measured)} pairs of strategies, {ranks} ranks"
    fits = [wire <= BYTES_FACTOR * bounds[a, b] + BYTES_PER_RANK * ranks for a, b, _, wire, *_ in measured]
    factors = [wire / bounds[a, b] for a, b, _, wire, *_ in moving]
    planned = all(row[2] == bounds[row[0], row[1]] for row in measured)
    quick = [took <= PAUSE_FACTOR * plain + PAUSE_SECONDS for *_, took, plain, _, _ in measured]
    slowdowns = sorted(took / plain for *_, took, plain, _, _ in moving)
    same = [row[-1] for row in measured]
    return [
        Row(
            f"wire bytes of a switch, {of}",
            f"{sum(fits)}/{len(fits)} within; worst {max(factors):.4f} x; planned {'exactly' if planned else 'WRONG'}",
            "lower bound",
            f"{sorted(factors)[len(factors) // 2]:.4f}",
            "",
            f"≤ {BYTES_FACTOR:g} x + {BYTES_PER_RANK >> 10} KB per rank",
            all(fits) and planned,
            {"wire / bound": factors},
        ),
        Row(
            f"the {len(still)} of them that need nothing",
            f"at most {max(row[3] for row in still):,} bytes",
            "nothing",
            "",
            "",
            f"≤ {BYTES_PER_RANK >> 10} KB per rank",
            all(row[3] <= BYTES_PER_RANK * ranks for row in still),
            {"wire": [float(row[3]) for row in still]},
        ),
        Row(
            f"exchange of a switch, {of}",
            f"{sum(quick)}/{len(quick)} within; slowest {max(row[4] for row in measured) * 1e3:.0f} ms",
            "one raw all-to-all of the same bytes",
            f"{slowdowns[len(slowdowns) // 2]:.2f}",
            "",
            f"≤ {PAUSE_FACTOR:g} x + {PAUSE_SECONDS * 1e3:.0f} ms",
            all(quick),
            {"nbkit": [row[4] for row in measured], "raw": [row[5] for row in measured]},
        ),
        Row(
            f"state identical after a switch, {of}",
            f"{sum(same)}/{len(same)}",
            "digest before",
            "",
            "",
            "all",
            all(same),
        ),
    ]
