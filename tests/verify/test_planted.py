"""The parity sees known bugs of parallel training; without them the same ranks are as one process.

This plants three bugs of different kinds, and with `long` those of experts. `make planted` plants all.
"""

from __future__ import annotations

import pytest

from verify.planted import BUGS, unseen

# A sum over stages; how losses are averaged; what each rank knows of the others' positions.
SAMPLE = (
    "the gradient of a tied weight is not summed over its stages",
    "uneven losses are averaged over micro-batches and ranks as if they were even",
    "the causal mask is off by one on later ranks",
)


EXPERTS = tuple(bug.what for bug in BUGS if "ep=" in bug.case.strategy)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [SAMPLE, pytest.param(EXPERTS, marks=pytest.mark.long)])
def test_planted_bugs_turn_the_parity_red(names: tuple[str, ...]) -> None:
    bugs = [bug for bug in BUGS if bug.what in names]

    assert len(bugs) == len(names)
    assert unseen(bugs) == ([], [])


def test_each_of_them_can_still_be_planted() -> None:
    """A bug patches a name in nbkit, which may have moved."""
    assert len({bug.what for bug in BUGS}) == len(BUGS) >= 32 and len(EXPERTS) == 14
    for bug in BUGS:
        with bug.plant():
            pass
