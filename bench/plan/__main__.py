"""python -m bench.plan [peak ...] [words that a cell has]: what the planner foretells beside what is measured."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.plan import peak
from bench.plan.models import NAMES


def main(words: list[str]) -> int:
    """Run the parts that are named, all without a name. Returns the exit status."""
    parts = [word for word in words if word in ("peak",)] or ["peak"]
    names = [word for word in words if word in NAMES] or NAMES
    good = True
    with tempfile.TemporaryDirectory() as folder:
        if "peak" in parts:
            met, text = peak.bars(peak.run(Path(folder), names=names))
            good = good and met
            print(f"{'met' if met else 'MISSED'}: {text}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
