"""The plugin behind pytest --cpu: CPU-seconds of each test file, summed over this process and its descendants.

Wall-clock seconds say little on a busy machine. It works in one process only: without -n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest


class CpuSeconds:
    """Adds up the CPU-seconds of processes, while they run and after they were waited for.

    A process that outlives its parent, such as a cluster's, is counted if it ran at the end of a test.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], psutil.Process] = {}
        self._of_file: Counter[str] = Counter()
        self._num: Counter[str] = Counter()
        self._before = self._total()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count a test's CPU-seconds. A fixture of a file or folder counts for the first test that asks for it."""
        done: Any = yield
        after = self._total()
        file = item.nodeid.partition("::")[0]
        self._of_file[file] += max(after - self._before, 0.0)  # type: ignore[assignment]
        self._num[file] += 1
        self._before = after
        return done

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the files, the most expensive first."""
        terminalreporter.section("CPU-seconds")
        for file, seconds in self._of_file.most_common():
            terminalreporter.line(f"{seconds:8.1f}  {self._num[file]:4d} tests  {file}")
        terminalreporter.line(f"{sum(self._of_file.values()):8.1f}  {sum(self._num.values()):4d} tests")

    def _total(self) -> float:
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            self._known[process.pid, process.create_time()] = process
        seconds = 0.0
        for key, process in list(self._known.items()):
            try:
                seconds += sum(process.cpu_times()[:4])  # of the process, and of children that it has waited for
            except psutil.NoSuchProcess:
                del self._known[key]
        return seconds
