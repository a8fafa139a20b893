"""A sample of `make chaos`: what happens to a training, beside the curve of one that was left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos_bench import Bench
from tests.support.chaos_faults import FAULTS, Run
from tests.support.chaos_goodput import drawn, goodput


@pytest.fixture(scope="module")
def bench(nbkit_home: Path) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel does not watch stdout where it sees this
        bench = Bench(2, pause=0.005)
        _ = bench.cluster
    yield bench
    bench.end()  # raises where something is left


# tests/bridge/test_hang_timeout.py has one that is stopped and replaced, and one that `why` is asked about.
@pytest.mark.long
def test_a_rank_that_hangs_is_named_and_replaced_when_it_is_killed(bench: Bench, tmp_path: Path) -> None:
    run = Run(1, "hung", "zero2", "", 1, 12, 0.0, "update", tmp_path / "saved")
    assert FAULTS["hung"](bench, run) == "equal"


def test_kills_come_one_in_each_span_and_hit_every_rank_in_the_end() -> None:
    kills = drawn(1200.0, 100.0, 4, seed=0)
    assert [int(kill.when / 100) for kill in kills] == list(range(12))
    assert {kill.rank for kill in kills} == {0, 1, 2, 3}
    assert kills == drawn(1200.0, 100.0, 4, seed=0) != drawn(1200.0, 100.0, 4, seed=1)


@pytest.mark.long
def test_a_training_in_which_ranks_are_killed_has_the_curve_of_the_one_that_is_left_alone(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert goodput(bench, 2.0 / 60, 2.0, ["zero3"], compute=0.02) == []
    said = capsys.readouterr().out
    assert "with 1 kills" in said and "was replaced" in said
