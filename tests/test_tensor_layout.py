"""Test how a dim is split: into contiguous parts, or into one run from the head and one from the tail."""

from __future__ import annotations

import pytest

from nbkit.tensor_layout import bounds, contiguous, count, head_and_tail


@pytest.mark.parametrize("parting", [contiguous, head_and_tail])
def test_parts_hold_each_index_once_and_as_many_as_bounds_returns(parting: object) -> None:
    for size in range(1, 8):
        for total in range(40):
            parts = [parting(total, size, i) for i in range(size)]  # type: ignore[operator]
            assert sorted(x for runs in parts for run in runs for x in range(*run)) == list(range(total))
            for i, runs in enumerate(parts):
                start, stop = bounds(total, size, i)
                assert count(runs) == stop - start and list(runs) == sorted(runs), (total, size, i)


def pairs(runs: tuple[tuple[int, int], ...]) -> int:
    """Count the pairs of causal query and key. All queries of a run see all keys up to the end of the run."""
    return sum((stop - start) * stop for start, stop in runs)


@pytest.mark.parametrize("total", [2048, 2047, 2041, 4099])
def test_head_and_tail_parts_have_equal_causal_cost(total: int) -> None:
    for size in (2, 4, 8):
        balanced, in_order = (
            [pairs(parting(total, size, i)) for i in range(size)] for parting in (head_and_tail, contiguous)
        )
        assert max(balanced) / (sum(balanced) / size) <= (1.0 if total % (2 * size) == 0 else 1.02)
        assert max(in_order) / (sum(in_order) / size) == pytest.approx(2 * size / (size + 1), rel=0.01)
