"""Test that the headline of a run names its planted cause. `python -m tests.support.planted_causes` prints all."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_causes import CAUSES, ask


@pytest.mark.long
def test_a_slow_rank_is_named_and_no_rank_if_none_is_late(tmp_path: Path) -> None:
    causes = [cause for cause in CAUSES[2] if cause.name in ("slow rank", "nobody, ddp")]
    found = ask(2, causes, tmp_path)

    assert [(each.cause.name, each.wrong, each.sentence) for each in found if each.wrong] == []
    assert [each.late for each in found] == [1, None]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", CAUSES)
def test_each_of_24_planted_causes_is_named(ranks: int, tmp_path: Path) -> None:
    found = ask(ranks, CAUSES[ranks], tmp_path)

    assert sum(map(len, CAUSES.values())) == 24
    assert [(each.cause.name, each.wrong, each.sentence) for each in found if each.wrong] == []
