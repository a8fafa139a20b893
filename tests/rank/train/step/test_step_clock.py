"""Test that the time of a step does not include work between steps."""

from __future__ import annotations

import time

import pytest

from nbkit.rank.train.step.history import Clock


def test_a_lap_excludes_time_while_the_clock_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()

    now[0] += 2
    with clock.stopped():
        now[0] += 50
    now[0] += 1

    assert clock.lap() == 3
    now[0] += 4
    assert clock.lap() == 4


def test_a_clock_stopped_twice_excludes_the_time_once_and_its_inner_laps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()

    now[0] += 2
    with clock.stopped():
        now[0] += 10
        with clock.stopped():
            now[0] += 50
        clock.restart()
        now[0] += 5
        assert clock.lap() == 5
    now[0] += 1

    assert clock.lap() == 3
