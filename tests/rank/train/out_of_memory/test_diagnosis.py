"""What took the memory, from numbers as a GPU has them: the step, a leak, gaps, somebody else."""

from __future__ import annotations

from nbkit.rank.train.out_of_memory.diagnosis import Seen

GB = 10**9


def test_a_step_that_is_too_large_is_nobody_elses_fault() -> None:
    assert Seen(80 * GB, 79 * GB, 78 * GB, 77 * GB, levels=(2, 9, 9, 9, 9, 9)).findings() == []
    assert Seen().findings() == []


def test_live_tensors_that_grow_at_every_step_are_a_leak() -> None:
    levels = [(10 + i) * GB for i in range(6)]
    (found,) = Seen(80 * GB, 79 * GB, 78 * GB, 77 * GB, levels=levels).findings()
    assert "grew by 1,000 MB a step" in found
    # The optimizer's state comes once, and a few bytes more are no leak.
    assert Seen(levels=levels[:5]).findings() == []
    assert Seen(levels=[10 * GB + i for i in range(6)]).findings() == []
    assert Seen(levels=[*levels[:5], levels[4]]).findings() == []


def test_gaps_and_other_processes_are_told_apart() -> None:
    (gaps,) = Seen(80 * GB, 79 * GB, 78 * GB, 60 * GB).findings()
    assert "1.8e+04 MB of 7.8e+04 MB" in gaps and "expandable_segments" in gaps
    (others,) = Seen(80 * GB, 79 * GB, 50 * GB, 49 * GB).findings()
    assert "held by others" in others
