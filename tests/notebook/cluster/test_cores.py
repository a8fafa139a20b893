"""Test which cores a process may use, and how they are divided among ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nbkit.errors import UsageError
from nbkit.notebook.cluster.machine.machine import cores_here, quota_here, share_cores, show_cores


def test_the_cores_are_those_this_process_may_use() -> None:
    assert sorted(cores_here()) == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("count", range(1, 12))
def test_every_core_has_one_owner_and_shares_differ_by_one_at_most(count: int) -> None:
    shares = share_cores(count, range(11))

    assert [core for share in shares for core in share] == list(range(11))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_sharing_without_cores_is_refused() -> None:
    with pytest.raises(UsageError):
        share_cores(1, [])


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("400000 100000", 4.0), ("150000 100000", 1.5), ("broken", None)]
)
def test_the_cpu_quota_of_a_container_is_read(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)

    assert quota_here(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("250000", 2.5)])
def test_the_cpu_quota_of_cgroup_version_1_is_read(tmp_path: Path, quota: str, cores: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")

    assert quota_here(tmp_path) == cores


def test_a_machine_without_a_quota_has_no_limit(tmp_path: Path) -> None:
    assert quota_here(tmp_path) is None


@pytest.mark.parametrize(
    ("cores", "text"), [((3,), "core 3"), ((0, 1, 2), "cores 0-2"), ((8, 0, 2, 1, 10), "cores 0-2,8,10")]
)
def test_consecutive_cores_are_shown_as_ranges(cores: tuple[int, ...], text: str) -> None:
    assert show_cores(cores) == text
