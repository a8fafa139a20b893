"""Test the statistics of the table on data whose answer is known."""

from __future__ import annotations

import numpy
import pytest

from bench.settings import shuffled
from bench.stats import Interval, meets, quantile, ratio


@pytest.mark.long
def test_the_interval_of_a_median_contains_the_true_median_in_95_of_100_runs() -> None:
    """Check that the interval is not so narrow that noise counts as a difference."""
    draws = numpy.random.default_rng(1).lognormal(0.0, 0.5, (200, 60))

    hits = sum((found := quantile(list(row))).low <= 1.0 <= found.high for row in draws)

    assert 180 <= hits <= 199


def test_a_quantile_of_equal_values_has_no_width() -> None:
    assert quantile([2.0] * 9) == Interval(2.0, 2.0, 2.0)


def test_the_p95_quantile_is_95_of_0_to_100() -> None:
    assert quantile([float(n) for n in range(101)], 0.95).middle == pytest.approx(95.0)


def test_a_ratio_is_computed_round_by_round() -> None:
    """Check that a machine which becomes ten times slower does not change the ratio of two sides."""
    speed = numpy.array([1.0] * 20 + [10.0] * 21)

    found = ratio(list(0.9 * speed), list(speed))

    assert (found.low, found.middle, found.high) == pytest.approx((0.9, 0.9, 0.9))


def test_different_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="2 of ours, 1 of theirs"):
        ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        quantile([])


def test_the_upper_end_of_the_interval_must_meet_the_bar() -> None:
    assert meets(Interval(0.9, 0.8, 1.0), bar=1.0)
    assert not meets(Interval(0.9, 0.8, 1.1), bar=1.0)


def test_the_noise_of_an_a_a_run_is_allowed_above_the_bar() -> None:
    again = Interval(1.0, 0.97, 1.03)

    assert meets(Interval(1.02, 1.0, 1.045), bar=1.02, again=again)
    assert not meets(Interval(1.02, 1.0, 1.055), bar=1.02, again=again)


def test_the_allowance_shrinks_with_a_bar_below_one() -> None:
    again = Interval(1.0, 0.9, 1.1)

    assert meets(Interval(0.1, 0.1, 0.164), bar=0.15, again=again)
    assert not meets(Interval(0.1, 0.1, 0.17), bar=0.15, again=again)


def test_every_round_has_every_arm_once_and_their_order_changes() -> None:
    rounds = list(shuffled(["a", "b", "c"], 20))

    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1
    assert rounds == list(shuffled(["a", "b", "c"], 20))
