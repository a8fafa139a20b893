"""Measure the time from a fresh kernel until every rank is ready: modules imported and first all_reduce done."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from bench.rigs.kernel import Kernel
from bench.rigs.peers import only_explicit_cells, start_nbdistributed, start_nbkit, stop_nbkit
from bench.settings import Settings, shuffled
from bench.table import Row, compared, skipped

RANKS, MORE_RANKS = 4, 8
ROUNDS = 5
AGAINST_NBDISTRIBUTED = 1.0
MORE_AGAINST_FEWER = 1.5
# Each rank leaves a file, because a cell can return before it has run everywhere.
READY = """%%distributed
import pathlib, torch, torch.distributed as dist
import torch.distributed.fsdp, torch.distributed.tensor.parallel, torch.distributed.pipelining
total = torch.ones(1); dist.all_reduce(total)
pathlib.Path(f"ready-{dist.get_rank()}").write_text(str(int(total.item())))
"""


def run(settings: Settings) -> list[Row]:
    """Return two rows: nbkit and nbdistributed on 4 ranks, and nbkit on 8 ranks and on 4."""
    fewer, more = f"nbkit, {RANKS} ranks", f"nbkit, {MORE_RANKS} ranks"
    arms: dict[str, tuple[Callable[[Kernel, int], None], int]] = {
        fewer: (start_nbkit, RANKS),
        f"{fewer}, again": (start_nbkit, RANKS),
        more: (start_nbkit, MORE_RANKS),
    }
    absent = settings.without_nbdistributed
    if not absent:
        arms["nbdistributed"] = (start_nbdistributed, RANKS)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    # The very first start reads torch from disk, so it is not measured.
    _once(settings.folder / "warm-up", start_nbkit, RANKS)
    for number, order in enumerate(shuffled(list(arms), settings.count(ROUNDS))):
        for arm in order:
            start, n = arms[arm]
            seconds[arm].append(_once(settings.folder / f"{number}-{arm}", start, n))

    what = f"from a fresh kernel until {RANKS} ranks are ready and have imported torch's parallel modules"
    ours, again = seconds[fewer], seconds[f"{fewer}, again"]
    if absent:
        first = skipped(what, "nbdistributed", absent)
    else:
        first = compared(what, ours, "nbdistributed", seconds["nbdistributed"], again, AGAINST_NBDISTRIBUTED, "s")
    wider = f"the same with {MORE_RANKS} ranks"
    return [first, compared(wider, seconds[more], fewer, ours, again, MORE_AGAINST_FEWER, "s")]


def _once(folder: Path, start: Callable[[Kernel, int], None], n: int) -> float:
    with Kernel(folder) as kernel:
        began = time.perf_counter()
        start(kernel, n)
        if start is start_nbdistributed:
            only_explicit_cells(kernel)
        shown = kernel.run(READY).text
        seconds = time.perf_counter() - began
        done = [path.read_text() for path in folder.glob("ready-*")]
        if done != [str(n)] * n:
            raise RuntimeError(f"{len(done)} of {n} ranks were ready: {shown[-500:]}")
        if start is start_nbkit:
            stop_nbkit(kernel)
    return seconds
