"""Compare a step of Muon under zero1, where one rank updates each matrix, with DDP, where all ranks update all.

Muon computes 15 products of matrices for each matrix and step, whatever the batch is. So its share of a step depends on
how many tokens a rank has. Here a rank has 512, and the products take about three fifths of the peer's CPU-seconds.
"""

from __future__ import annotations

from bench.settings import Settings
from bench.steps.step_cpu import pairs
from bench.steps.steps import QUICK
from bench.table import Row

RANKS = 4
SIZE = {"width": 512, "layers": 4, "block": 128, "batch": 16}
STARTS, OF_ONE_START, STEPS = 3, 5, 3
BAR = 0.8


def run(settings: Settings) -> list[Row]:
    """Return a row of CPU-seconds of all ranks and one of wall seconds."""
    size = QUICK if settings.quick else SIZE
    what = f"step of Muon and AdamW, zero1, {RANKS} ranks, GPT of width {size['width']}"
    counts = settings.count(STARTS), settings.count(OF_ONE_START), STEPS
    strategies, peer = {"nbkit": "zero1", "torch": "ddp"}, "DistributedDataParallel"
    return pairs(what, strategies, peer, settings.folder, RANKS, counts, BAR, BAR, muon=True, **size)
