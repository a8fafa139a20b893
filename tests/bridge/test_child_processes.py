"""Test that nbkit reads how many processes the kernel killed for lack of memory, and reports it for a killed rank."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from nbkit.bridge.parent.child_processes import Ends, oom_kills


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "low 0\noom 2\noom_kill 3\n"}, 3),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.events": "oom_kill 4\n"}, 4),
        (
            {
                "proc/self/cgroup": "5:cpu:/c\n4:memory,hugetlb:/a\n",
                "sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 5\n",
            },
            5,
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "nr_free_pages 7\noom_kill 6\n"}, 6),
        ({}, 0),
    ],
    ids=["container", "cgroup of its own", "version 1", "machine", "not said"],
)
def test_oom_kills_reads_the_count_from_the_file_that_the_system_has(
    tmp_path: Path, files: dict[str, str], kills: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == kills


def test_an_oom_kill_is_distinguished_from_another_sigkill_and_counts_once(tmp_path: Path) -> None:
    counted = tmp_path / "sys/fs/cgroup/memory.events"
    counted.parent.mkdir(parents=True)
    counted.write_text("oom_kill 3\n")  # other processes, killed before
    ends, killed = Ends(tmp_path), int(signal.SIGKILL)  # as os.waitpid gives it
    assert ends.how(killed, "") == "SIGKILL"
    counted.write_text("oom_kill 4\n")
    assert ends.how(int(signal.SIGTERM), "") == "SIGTERM"
    assert ends.how(killed, "") == "SIGKILL: the kernel ended it because memory ran out"
    assert ends.how(killed, "") == "SIGKILL"
