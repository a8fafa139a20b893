"""Measure records of a million steps: the memory of the writer, and how soon the tab shows such a run.

Then measure the time from the writing of a step by 1 or 64 ranks until the tab's page has it, which asks once a
second. The benchmark asks as the page does: through TensorBoard's server, for the list of runs, the whole curve, one
step.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil

from bench.settings import Settings
from bench.table import Row, absolute
from nbkit.notebook.board.board import Board
from nbkit.rank.telemetry.session import record_path
from nbkit.records.record_file import Overview, RecordFile
from nbkit.records.records import Detail, Group, Header, StepRecord, Traffic

STEPS, QUICK_STEPS, RANKS = 1_000_000, 20_000, 4
FLAT, OPENS_S, VISIBLE_S = 1.05, 2.0, 2.0
WRITERS, PERIOD_S, WATCHED, ASKED_EVERY_S = (1, 64), 0.1, 100, 1.0
LABEL = "dp 1 [all]"


def run(settings: Settings) -> list[Row]:
    """Return rows about memory and opening, and one for each number of writers."""
    steps = QUICK_STEPS if settings.quick or settings.rounds else STEPS
    folder = settings.folder / "runs"
    grown = _write(folder / "long", steps)
    with _board(folder) as board:
        began = time.perf_counter()
        assert any(one["name"] == "long" for one in _ask(board, "runs")["runs"])
        points = _ask(board, "poll", run="long")["points"]
        shown = _ask(board, "step", run="long", step=steps)
        opened = time.perf_counter() - began
        wrong = "" if points[-1][0] == shown["step"] == steps and points[0][0] < steps / 100 else "not the whole run"
    what = f"{steps:,} steps of {RANKS} ranks"
    bytes_left = sum(path.stat().st_size for path in (folder / "long" / "telemetry").iterdir()) / RANKS
    rows = [
        absolute(f"memory of the writer, {what}: at the end / after a tenth", [grown], FLAT, "x",
                 peer=f"{bytes_left / 2**20:.0f} MiB on disk for each rank"),
        absolute(f"the tab's first picture of {what}", [opened], OPENS_S, "s", wrong=wrong),
    ]  # fmt: skip
    for writers in WRITERS:
        seen = _until_visible(settings.folder / f"watched-{writers}", writers)
        rows.append(absolute(f"step written to shown in the tab, p95, {writers} ranks", seen, VISIBLE_S, "s", at=0.95))
    return rows


def _write(run_dir: Path, steps: int) -> float:
    """Write a rank's records of `steps` steps and copy them for the other ranks.

    Returns the memory of this process at the end divided by that after a tenth of the steps.
    """
    file, process = record_file(run_dir, 0, RANKS), psutil.Process()
    overview, early = Overview(file.path), 0
    for step in range(1, steps + 1):
        record = written_step(step)
        file.write([record, Detail(step, laps=(("forward", 0, 10**7),))] if step % 50 == 0 else [record])
        overview.add(record)
        if step == steps // 10:
            early = process.memory_info().rss
    late = process.memory_info().rss
    file.close()
    for path in list(file.path.parent.iterdir()):
        for rank in range(1, RANKS):
            shutil.copy(path, path.with_name(path.name.replace("rank0", f"rank{rank}")))
    return late / early


def _until_visible(folder: Path, writers: int) -> list[float]:
    """Return, for each step, the seconds from its writing by all ranks until an answer to the page has it."""
    files = [record_file(folder / "watched", rank, writers) for rank in range(writers)]
    written: dict[int, float] = {}

    def write() -> None:
        for step in range(1, WATCHED + 1):
            for file in files:
                file.write([written_step(step)])
            written[step] = time.monotonic()
            time.sleep(PERIOD_S)

    seen: dict[int, float] = {}
    with _board(folder) as board:
        _ask(board, "runs")
        thread = threading.Thread(target=write)
        thread.start()
        deadline = time.monotonic() + 60
        epoch, count = -1, 0
        while len(seen) < WATCHED and time.monotonic() < deadline:
            try:
                answer = _ask(board, "poll", run="watched", epoch=epoch, points=count)
            except urllib.error.HTTPError:  # the first line is not there yet
                answer = {"epoch": -1, "keep": 0, "points": []}
            epoch, count = answer["epoch"], answer["keep"] + len(answer["points"])
            for point in answer["points"]:
                seen.setdefault(point[0], time.monotonic())
            time.sleep(ASKED_EVERY_S)
        thread.join()
    for file in files:
        file.close()
    return [seen.get(step, float("inf")) - at for step, at in written.items()]


@contextmanager
def _board(folder: Path) -> Iterator[Board]:
    try:
        yield Board.start(folder)
    finally:
        Board.end()


def _ask(board: Board, what: str, **values: object) -> Any:
    url = f"http://127.0.0.1:{board.port}/data/plugin/communication/{what}?{urlencode(values)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def record_file(run_dir: Path, rank: int, ranks: int) -> RecordFile:
    group = Group(LABEL, "dp", tuple(range(ranks)))
    return RecordFile(record_path(run_dir, rank), lambda part: [Header(rank, ranks, part, host="here"), group])


_PARTS = {"compute": 0.04, "exposed": 0.005, "bubble": 0.0, "data": 0.001, "optimizer": 0.003, "other": 0.001}
_ONE = StepRecord(
    0,
    seconds=0.05,
    parts=_PARTS,
    traffic=tuple(Traffic(op, "dp", LABEL, None, 4, 1e6, 4, 0.01, 0.005) for op in ("all_reduce", "all_gather")),
    cpu_seconds=0.05,
    own_seconds=1e-4,
)


def written_step(number: int) -> StepRecord:
    numbers = {"step": number, "loss": 2.0 + 1 / number, "lr": 3e-4, "tokens": 4096, "seconds": 0.05}
    return replace(_ONE, step=number, start_ns=number * 50_000_000, numbers=numbers)
