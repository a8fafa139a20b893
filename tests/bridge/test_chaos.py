"""A sample of `make chaos`: what happens to a training, beside the curve of one that was left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos_bench import Bench
from tests.support.chaos_faults import FAULTS, Run


@pytest.fixture(scope="module")
def bench(nbkit_home: Path) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel does not watch stdout where it sees this
        bench = Bench(2, pause=0.005)
        _ = bench.cluster
    yield bench
    bench.end()  # raises where something is left


def test_a_rank_that_hangs_is_named_and_replaced_when_it_is_killed(bench: Bench, tmp_path: Path) -> None:
    run = Run(1, "hung", "zero2", "", 1, 12, 0.0, "update", tmp_path / "saved")
    assert FAULTS["hung"](bench, run) == "equal"
