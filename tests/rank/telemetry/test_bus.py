"""Test the bus's rule for errors: a sink that raises is named once, and the others still get every event."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any

import pytest
from jobs import Heard

from nbkit.rank.telemetry import sinks
from nbkit.rank.telemetry.sinks import Bus, InThread, ProgressLine, close_all
from nbkit.records.events import LrChanged, Rebalanced, RunStarted, RunStopped, StepDone


class Raises:
    def __init__(self, error: BaseException, method: str = "write") -> None:
        self.calls = 0
        self.error, self.method = error, method

    def open(self, run: dict[str, Any]) -> None:
        self._call("open")

    def write(self, event: dict[str, Any]) -> None:
        self._call("write")

    def _call(self, method: str) -> None:
        self.calls += 1
        if method == self.method:
            raise self.error


def test_a_sink_that_raises_is_named_once_and_gets_no_more_events() -> None:
    bus, bad, mute, kept = Bus(), Raises(OSError("full")), Raises(OSError("shut"), "open"), Heard()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for sink in (bad, mute, kept):
            bus.add(sink, run={"name": "mine"})
        for step in range(3):
            bus.emit(StepDone(step, record={"step": step, "loss": 0.5}))
    said = [str(one.message).partition(" (") for one in caught]
    assert [before for before, *_ in said] == [
        "nothing more is given to the sink Raises: OSError: shut",
        "nothing more is given to the sink Raises: OSError: full",
    ]
    assert all("test_bus.py:" in place for *_, place in said)
    assert (bad.calls, mute.calls) == (2, 1)
    assert [(event.kind, event.step, event.loss) for event in kept] == [("step", step, 0.5) for step in range(3)]


def test_an_interrupt_inside_a_sink_is_not_swallowed() -> None:
    bus = Bus()
    bus.add(Raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        bus.emit(RunStopped(1))


class Changes(Heard):
    def write(self, event: dict[str, Any]) -> None:
        event.clear()


def test_a_change_of_an_event_by_one_sink_does_not_reach_the_next() -> None:
    bus, kept = Bus(), Heard()
    bus.add(Changes())
    bus.add(kept)
    bus.emit(LrChanged(2, old=0.5, new=0.25))
    (event,) = kept
    assert vars(event) == {"kind": "lr_changed", "step": 2, "old": 0.5, "new": 0.25}


class Opened(Heard):
    def open(self, run: dict[str, Any]) -> None:
        self.append(run["name"])

    def close(self) -> None:
        self.append("closed")


def test_close_all_delivers_pending_events_and_closes_only_open_sinks() -> None:
    used, unused = Opened(), Opened()
    bus = Bus()
    bus.add(InThread(used), run={"name": "mine"})
    unopened = InThread(unused)
    bus.emit(LrChanged(1))
    close_all()
    assert used[0] == "mine" and used[1].kind == "lr_changed" and used[2:] == ["closed"]
    assert unused == []
    del unopened


class NotClosed(Heard):
    def close(self) -> None:
        raise OSError("gone")


class NeverOpened(Opened):
    def open(self, run: dict[str, Any]) -> None:
        raise OSError("no network")


def test_a_sink_that_cannot_close_is_named_and_an_unopened_one_is_not_closed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    unopened = NeverOpened()
    bus = Bus()
    for sink in (InThread(NotClosed()), InThread(unopened)):
        bus.add(sink, run={"name": "mine"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bus.emit(LrChanged(1))
        close_all()
    said = capfd.readouterr().err
    assert "given to the sink NotClosed was not closed: OSError: gone (" in said and "Traceback" not in said
    assert unopened == []


def told(monkeypatch: pytest.MonkeyPatch, *, file: bool) -> str:
    """Return what a run of two steps out of nine prints. file: stdout is that of the process."""
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "__stdout__", stdout if file else io.StringIO())
    monkeypatch.setattr(sinks, "_PERIOD_S", 0.0)
    now = {"step": 0, "goal": 9, "loss": 1.0, "eta_s": 30.0}
    line = ProgressLine(lambda: now)
    line.write(RunStarted(0, arithmetic="global 8").as_dict())
    for now["step"] in (1, 2):
        line.write(StepDone(now["step"]).as_dict())
    line.write(Rebalanced(2).as_dict())
    line.write(RunStopped(2, reason="stopped").as_dict())
    return stdout.getvalue()


def test_the_progress_line_is_rewritten_in_a_notebook_and_has_no_time_to_go_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = told(monkeypatch, file=False).split("\r")
    assert [line.split(" · ")[0].strip() for line in lines[:3]] == ["global 8", "step 1/9", "step 2/9"]
    assert "to go" in lines[2] and lines[-1].strip() == "step 2/9 · loss 1"


def test_in_a_file_the_progress_is_a_few_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = told(monkeypatch, file=True)
    first, step, _, last = text.splitlines()
    assert "\r" not in text and all(line == line.rstrip() for line in text.splitlines())
    assert (first, step.partition(" · ")[0], last) == ("global 8", "step 1/9", "step 2/9 · loss 1")
