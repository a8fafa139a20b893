"""Test that the tab opens the run that trains now, not the run that was written last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fake_run import FakeRun

from nbkit.notebook.board.plugin.plugin import RunCatalog
from nbkit.records.record_file import newest_run, rank_files
from nbkit.records.records import Header, Outside, Traffic, from_line, to_line

OUTSIDE = Outside(0, (Traffic("all_reduce", "world", "world", None, 1, 4, 1, 0.1, 0.1),))


def record(folder: Path, began: float, *, steps: int, stopped: bool = False, started: bool = True) -> Path:
    """Write a run of two ranks that began at `began`."""
    run = FakeRun(folder, 2, "ddp")
    for _ in range(steps):
        run.step()
    if stopped:
        run.event("run_stopped", reason="done")
    run.close()
    for path in rank_files(folder).values():
        head, *rest = path.read_bytes().splitlines()
        header = from_line(head)
        assert isinstance(header, Header)
        lines = [to_line(replace(header, unix_s=began)).encode(), *(rest if started else [])]
        path.write_bytes(b"\n".join(lines) + b"\n")
    return folder


def goes_on_noting(folder: Path) -> None:
    """Append a record, as an idle Trainer does while another Trainer trains."""
    for path in rank_files(folder).values():
        with path.open("ab") as file:
            file.write(to_line(OUTSIDE).encode() + b"\n")


def names(folder: Path) -> list[str]:
    return [str(one["name"]) for one in RunCatalog(folder).summaries()]


def test_a_run_without_steps_is_neither_live_nor_first(tmp_path: Path) -> None:
    record(tmp_path / "trains", 100.0, steps=3)
    idle = record(tmp_path / "idle", 200.0, steps=0, started=False)
    goes_on_noting(idle)

    assert [(one["name"], one["live"]) for one in RunCatalog(tmp_path).summaries()] == [
        ("trains", True),
        ("idle", False),
    ]
    assert newest_run(tmp_path) == tmp_path / "trains"


def test_runs_are_ordered_by_their_start_and_not_by_their_last_write(tmp_path: Path) -> None:
    first = record(tmp_path / "first", 100.0, steps=3, stopped=True)
    record(tmp_path / "second", 200.0, steps=3, stopped=True)
    goes_on_noting(first)

    assert names(tmp_path) == ["second", "first"]
    record(tmp_path / "earlier", 50.0, steps=3)
    assert names(tmp_path) == ["earlier", "second", "first"]  # it still trains
