"""Test a sample of `make chaos`: compare a disturbed training with the curve of an undisturbed one."""

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
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel does not watch stdout if it sees this
        bench = Bench(2, pause=0.005)
        _ = bench.cluster
    yield bench
    bench.end()  # raises if something is left


# tests/bridge/test_hang_timeout.py tests a rank that is stopped and replaced, and asks `why` about another hang.
@pytest.mark.long
def test_a_hung_rank_is_named_and_is_replaced_after_a_kill(bench: Bench, tmp_path: Path) -> None:
    run = Run(1, "hung", "zero2", "", 1, 12, 0.0, "update", tmp_path / "saved")
    assert FAULTS["hung"](bench, run) == "equal"


def test_one_kill_is_drawn_in_each_span_and_every_rank_is_hit() -> None:
    kills = drawn(1200.0, 100.0, 4, seed=0)
    assert [int(kill.when / 100) for kill in kills] == list(range(12))
    assert {kill.rank for kill in kills} == {0, 1, 2, 3}
    assert kills == drawn(1200.0, 100.0, 4, seed=0) != drawn(1200.0, 100.0, 4, seed=1)


@pytest.mark.long
def test_a_training_with_kills_has_the_curve_of_an_undisturbed_one(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert goodput(bench, 2.0 / 60, 2.0, ["zero3"], compute=0.02) == []
    said = capsys.readouterr().out
    assert "with 1 kills" in said and "was replaced" in said
