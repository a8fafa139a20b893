"""Compare predictions of the planner with measurements.

python -m bench.plan [peak seconds published planning] [names of models]     without a name: everything but nodes
python -m bench.plan nodes     seconds on two nodes of two ranks; runs only when it is named
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.plan import peak, seconds
from bench.plan.models import NAMES
from bench.plan.published import table as published
from nbkit.notebook.planning import plan
from nbkit.planner.gpt_config import GPTConfig

_BARS = {"8 H100": 0.2, "128 x 8 H100": 1.0, "2048 x 8 H100": 3.0}
"""CPU-seconds that a plan of GPT-175B may take on this hardware."""


def planning() -> tuple[bool, str]:
    """Return whether plans are made fast enough, and the CPU-seconds of each, without start-up."""
    config = GPTConfig(vocab=50304, block=2048, layers=96, heads=96, width=12288)
    took = {}
    for on in _BARS:
        began = time.process_time()
        plan(config, batch=4096, on=on)
        took[on] = time.process_time() - began
    text = ", ".join(f"{on} {spent:.2f} s (bar {_BARS[on]:g})" for on, spent in took.items())
    return all(took[on] <= bar for on, bar in _BARS.items()), f"a plan of GPT-175B: {text}"


def main(words: list[str]) -> int:
    """Run the parts that are named (without a name all but `nodes`) and return the exit status."""
    names = [word for word in words if word in NAMES] or NAMES
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], tuple[bool, str]]] = {
            "planning": planning,
            "published": lambda: published.bars(published.run()),
            "seconds": lambda: seconds.bars(seconds.run(Path(folder))),
            "nodes": lambda: seconds.bars(seconds.run(Path(folder), seconds.NODES)),
            "peak": lambda: peak.bars(peak.run(Path(folder), names=names)),
        }
        if unknown := [word for word in words if word not in (*parts, *NAMES)]:
            print(f"There is no part {unknown[0]!r}: {', '.join(parts)}; of peak also {', '.join(NAMES)}")
            return 2
        asked = [word for word in words if word in parts] or [part for part in parts if part != "nodes"]
        good = True
        for part in asked:
            met, text = parts[part]()
            good = good and met
            print(f"{'met' if met else 'MISSED'}: {text}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
