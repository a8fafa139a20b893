"""What of `make plan-check` takes no time: published steps. Its peaks have a sample in test_peak_bytes.py."""

from __future__ import annotations

from bench.plan import published


def test_published_steps_are_told_at_least_twice_as_well_as_by_one_constant_share_of_the_peak() -> None:
    found = published.run()
    met, text = published.bars(found)
    assert met and len(found) == len(published.cases()) - 1, text
    assert all(abs(one.predicted / one.measured - 1) <= 0.1 for one in found), text
