"""Test that predictions are stored beside the measurements. Each line applies to the steps after it."""

from __future__ import annotations

from pathlib import Path

from fake_run import forecast_of

from nbkit.planner import forecast
from nbkit.planner.job_facts import Facts, Weight
from nbkit.strategy import Strategy

WEIGHTS = [Weight(f"block{i}", (8, 16), blocks=(i,)) for i in range(4)]
ELEMENTS = 4 * 8 * 16


def test_a_forecast_has_the_memory_and_traffic_of_all_ranks() -> None:
    made = forecast_of(WEIGHTS, Facts(), Strategy.parse("zero1", 4), step=7)

    assert (made.step, made.strategy) == (7, "dp=4 zero=1")
    assert [rest.optimizer for rest in made.memory] == [8 * ELEMENTS // 4] * 4
    given = {(term.op, term.axis): (term.calls, term.bytes) for term in made.traffic}
    # Each rank passes the whole to a reduce-scatter, and a quarter to an all-gather.
    assert given == {("reduce_scatter", "dp"): (1, 4 * 4 * ELEMENTS), ("all_gather", "dp"): (1, 4 * ELEMENTS)}


def test_read_returns_the_appended_lines_without_a_torn_one(tmp_path: Path) -> None:
    assert forecast.read(tmp_path) == []
    first = forecast_of(WEIGHTS, Facts(), Strategy.parse("ddp", 2))
    second = forecast_of(WEIGHTS, Facts(), Strategy.parse("zero3", 2), step=10)
    forecast.append(tmp_path, first)
    forecast.append(tmp_path, second)
    with (tmp_path / "telemetry" / "plan.jsonl").open("a") as file:
        file.write('{"step":20,"stra')

    found = forecast.read(tmp_path)

    assert found == [first, second]
    assert forecast.in_force(found, 10) == first and forecast.in_force(found, 11) == second
    assert forecast.in_force([], 1) is None
