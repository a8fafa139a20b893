"""Measure `%load_ext nbkit` in a fresh kernel, and check that it does not import torch."""

from __future__ import annotations

from bench.rigs.kernel import Kernel
from bench.settings import Settings
from bench.table import Row, absolute

KERNELS = 10
BAR_SECONDS = 0.5


def run(settings: Settings) -> list[Row]:
    """Return one row."""
    seconds = []
    wrong = ""
    for number in range(settings.count(KERNELS)):
        with Kernel(settings.folder / f"loadext-{number}") as kernel:
            seconds.append(kernel.run("%load_ext nbkit").seconds)
            if "True" in kernel.run("import sys\n'torch' in sys.modules").text:
                wrong = "torch was imported"
    return [absolute("`%load_ext nbkit`, torch not imported", seconds, BAR_SECONDS, "s", wrong=wrong)]
