"""The parity sees the bugs that parallel training is known for; without them the same ranks are as one process."""

from __future__ import annotations

import pytest

from parity.planted import BUGS, unseen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_planted_bug_turns_the_parity_red(num_ranks: int) -> None:
    assert unseen(num_ranks) == ([], [])


def test_there_are_twelve_of_them_at_least() -> None:
    assert len({bug.what for bug in BUGS}) == len(BUGS) >= 12
