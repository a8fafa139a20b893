"""Measure the first cell after a failed cell, in which rank 2 raised while the others waited in a collective."""

from __future__ import annotations

from bench.rigs.kernel import Kernel
from bench.rigs.peers import start_nbkit, stop_nbkit
from bench.settings import Settings
from bench.table import Row, absolute

RANKS = 4
FAILURES = 40
BAR_SECONDS = 1.5
FAILING = """%%distributed
if rank == 2:
    raise ValueError("on purpose")
dist.all_reduce(torch.ones(1))
"""
NEXT = """%%distributed
total = torch.ones(1); dist.all_reduce(total)
int(total.item())
"""


def run(settings: Settings) -> list[Row]:
    """Return two rows: the failed cell, and the cell after it."""
    failed, after = [], []
    wrong = ""
    with Kernel(settings.folder / "recovery") as kernel:
        start_nbkit(kernel, RANKS)
        kernel.run(NEXT)
        for _ in range(settings.count(FAILURES)):
            cell = kernel.run(FAILING, may_fail=True)
            if cell.status != "error" or "on purpose" not in cell.text:
                wrong = "a failing cell did not end with its error"
            failed.append(cell.seconds)
            cell = kernel.run(NEXT)
            if f"[0-{RANKS - 1}]" not in cell.text or str(RANKS) not in cell.text:
                wrong = f"the next cell showed {cell.text!r}"
            after.append(cell.seconds)
        stop_nbkit(kernel)
    return [
        absolute(f"a cell in which one of {RANKS} ranks raises, p95", failed, BAR_SECONDS, "s", at=0.95, wrong=wrong),
        absolute(f"first cell after a failed one, p95, {RANKS} ranks", after, BAR_SECONDS, "s", at=0.95, wrong=wrong),
    ]
