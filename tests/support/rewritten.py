"""Rewrites the asserts of all tests before several workers import them: `python -m tests.support.rewritten`.

Each worker of pytest-xdist imports every test. In a fresh clone each would rewrite the asserts of every file, which
takes longer than the import. Here two processes do it once, for half of the files each.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROCESSES = 2


def outdated() -> list[Path]:
    """Return the test files whose asserts have not been rewritten since they were changed."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        made = list((path.parent / "__pycache__").glob(f"{path.stem}.{sys.implementation.cache_tag}-pytest-*.pyc"))
        if not any(each.stat().st_mtime >= path.stat().st_mtime for each in made):
            found.append(path)
    return found


def main() -> None:
    """Collect the outdated files, which makes pytest rewrite and store them. Errors are left to the test run."""
    files = outdated()
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:xdist"]
    parts = [files[i::PROCESSES] for i in range(PROCESSES)] if len(files) > PROCESSES else []
    running = [subprocess.Popen([*command, *map(str, part)], stdout=subprocess.DEVNULL) for part in parts]
    for process in running:
        process.wait()


if __name__ == "__main__":
    main()
