"""Measure what a live dashboard costs its kernel while 8 ranks write 20 steps a second.

The cost is CPU time of the kernel's process, less that without a dashboard. Also checks that every step reaches the
widget, and counts the messages. The dashboard is nbkit.Dashboard in a real kernel. Its widget sends all its messages,
but there is no page that draws them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.rigs.kernel import Kernel
from bench.settings import Settings
from bench.table import Row, absolute
from bench.telemetry.telemetry_long import record_file, written_step

RANKS, PERIOD_S = 8, 0.05
ROUNDS, SECONDS = 6, 8.0
SHARE = 0.01
_SETTLES_S, _AT_LAST_S = 4.0, 20.0  # the dashboard reads every three seconds, less often on a busy machine

_SETUP = f"""
import json, time
import nbkit

def share():
    wall, cpu = time.perf_counter(), time.process_time()
    time.sleep({SECONDS})
    return (time.process_time() - cpu) / (time.perf_counter() - wall)
"""
_OPEN = """
dashboard = nbkit.Dashboard({folder!r})
steps, times, send = [], [], dashboard.widget.send

def heard(content, buffers):  # as the page puts it together
    if content["kind"] == "curve":
        steps[content["keep"]:] = [int(step) for step in memoryview(buffers[0]).cast("d")[::7]]
        times.append(time.monotonic())
    send(content, buffers)

dashboard.widget.send = heard
"""
_TOLD = """
until = time.monotonic() + {wait}
while steps[-1] < {last} and time.monotonic() < until:
    time.sleep(0.1)
print(json.dumps([steps, len(times) / (times[-1] - times[0])]))
"""


def run(settings: Settings) -> list[Row]:
    """Return one row: the share of a core that the dashboard takes."""
    folder, rounds = settings.folder / "run", settings.count(ROUNDS)
    measured = f"print(json.dumps([share() for _ in range({rounds})]))"
    with Kernel(settings.folder / "kernel") as kernel:
        kernel.run(_SETUP)
        without = median(json.loads(kernel.run(measured).text))
        with _training(folder) as written:
            kernel.run(_OPEN.format(folder=str(folder)) + f"time.sleep({_SETTLES_S})")
            began, first = time.monotonic(), len(written)
            shares = json.loads(kernel.run(measured).text)
            rate = (len(written) - first) / (time.monotonic() - began)
        told, messages = json.loads(kernel.run(_TOLD.format(wait=_AT_LAST_S, last=written[-1])).text)
    lost = set(written) - set(told)
    what = f"a live dashboard of {RANKS} ranks at {rate:.0f} steps a second: CPU of its kernel, share of a core"
    peer = f"the kernel without it {without:.4f}; {len(told)} steps shown, in {messages:.1f} messages a second"
    more = [one - without for one in shares]
    return [
        absolute(
            what,
            more,
            SHARE,
            "x",
            wrong=f"{len(lost)} steps lost, {min(lost)} to {max(lost)}" if lost else "",
            peer=peer,
        )
    ]


@contextmanager
def _training(folder: Path) -> Iterator[list[int]]:
    """Write a step of every rank each PERIOD_S in a thread. Yields the list of steps written so far, which grows."""
    files, over = [record_file(folder, rank, RANKS) for rank in range(RANKS)], threading.Event()
    written: list[int] = []

    def write() -> None:
        due = time.monotonic()
        while not over.is_set():
            written.append(len(written) + 1)
            for file in files:
                file.write([written_step(len(written))])
            due += PERIOD_S
            over.wait(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield written
    finally:
        over.set()
        thread.join()
        for file in files:
            file.close()
