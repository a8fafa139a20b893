"""Test that the parity check detects known bugs of parallel training, and passes without them.

This plants three bugs of different kinds, and with `long` those of experts. `make planted` plants all.
"""

from __future__ import annotations

import pytest

from verify.planted import BUGS, unseen

# One bug in a sum over stages, one in the mean of losses, one in the positions of context parallelism.
SAMPLE = (
    "the gradient of a tied weight is not summed over its stages",
    "uneven losses are averaged over micro-batches and ranks as if they were even",
    "the causal mask is off by one on later ranks",
)


EXPERTS = tuple(bug.what for bug in BUGS if "ep=" in bug.case.strategy)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [SAMPLE, pytest.param(EXPERTS, marks=pytest.mark.long)])
def test_the_parity_check_fails_for_planted_bugs(names: tuple[str, ...]) -> None:
    bugs = [bug for bug in BUGS if bug.what in names]

    assert len(bugs) == len(names)
    assert unseen(bugs) == ([], [])


def test_every_bug_can_be_planted() -> None:
    """Check that the names in nbkit which the bugs patch still exist."""
    assert len({bug.what for bug in BUGS}) == len(BUGS) >= 32 and len(EXPERTS) == 14
    for bug in BUGS:
        with bug.plant():
            pass
