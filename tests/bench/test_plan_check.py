"""Test the quick parts of `make plan-check`: published step times, and the rating of measured ones.

A sample of its memory peaks is in test_peak_bytes.py.
"""

from __future__ import annotations

import pytest

from bench.plan import seconds
from bench.plan.published import gpt
from bench.plan.published import table as published


def test_published_steps_are_predicted_twice_as_well_as_with_one_constant_mfu() -> None:
    found = published.run()
    met, text = published.bars(found)
    assert met and len(found) == len(published.cases()) - 2, text
    errors = [abs(one.predicted / one.measured - 1) for one in found]
    gpts = len(gpt.cases()) - 1
    assert max(errors[:gpts]) <= 0.1 and sorted(errors)[-2] <= 0.131 and max(errors) <= 0.21, text
    for own in (found[:gpts], found[gpts:]):
        assert published.bars(own)[0], published.bars(own)[1]


def test_a_recommendation_is_rated_by_measured_seconds_and_memory() -> None:
    case = seconds.CASES[0]
    # Each cell has measured seconds and bytes, then the predicted ones. zero1 takes more bytes than predicted.
    cells = {
        "ddp": seconds.Cell(1.00, 100, (1.0, 100)),
        "zero1": seconds.Cell(0.95, 70, (0.9, 60)),
        "tp": seconds.Cell(0.80, 40, (0.97, 40)),
    }
    wide, narrow, tight, none = (seconds.Scenario(case, memory, cells) for memory in (200, 65, 45, 30))
    assert (wide.chosen, wide.fits, wide.regret) == ("zero1", True, pytest.approx(0.95 / 0.8 - 1))
    assert (narrow.chosen, narrow.fits) == ("zero1", False) and "DOES NOT FIT" in str(narrow)
    assert (tight.chosen, tight.fits, tight.regret) == ("tp", True, 0.0)
    assert (none.chosen, none.fits, none.regret) == (None, True, 0.0)
    met, text = seconds.bars([wide, narrow, tight, none])
    assert not met and text.startswith("3 steps predicted: 8.8% off on average") and "21.2% at worst" in text
    assert "in 2 of 4 scenarios" in text and "1 recommendations do not fit" in text
    assert seconds.bars([tight, none])[1].startswith("3 steps predicted")
