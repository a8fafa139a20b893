"""Test that pid and start time identify a process, also after a change of the clock or a reused pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from waiting import until

from nbkit.wire.processes import Process, followers

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="start ticks and the boot's name are Linux's")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


@linux_only
def test_a_process_stays_the_same_after_a_change_of_the_clock(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process.of(sleeper.pid)
    true_start = psutil.Process(sleeper.pid).create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: true_start + 3600)
    assert process.is_alive()
    process.end(signal.SIGKILL)
    assert sleeper.wait(timeout=10) == -signal.SIGKILL


@linux_only
@pytest.mark.parametrize("changes", [{"started": 1.0}, {"boot": "another boot"}], ids=["later start", "after a boot"])
def test_a_later_process_with_the_same_pid_is_a_different_one(
    sleeper: subprocess.Popen[bytes], changes: dict[str, float | str]
) -> None:
    other = replace(Process.of(sleeper.pid), **changes)  # type: ignore[arg-type]
    assert not other.is_alive()
    other.end(signal.SIGKILL)
    assert sleeper.poll() is None


def test_a_zombie_is_not_alive_and_a_free_pid_raises_process_lookup_error(
    sleeper: subprocess.Popen[bytes],
) -> None:
    process = Process.of(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_alive()
    sleeper.wait()
    assert not process.is_alive()
    with pytest.raises(ProcessLookupError):
        Process.of(sleeper.pid)


def test_processes_left_by_an_ended_leader_are_found_by_their_folder(tmp_path: Path) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '1000'])"
    environment = {**os.environ, "IPP_PROFILE_DIR": str(tmp_path / "profile")}
    leader = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
    leader.wait()
    left = followers(leader.pid, tmp_path)
    try:
        assert [psutil.Process(process.pid).name() for process in left] == ["sleep"]
        assert followers(leader.pid, tmp_path / "prof") == []
        assert followers(os.getpid(), tmp_path) == []
    finally:
        for process in left:
            process.end(signal.SIGKILL)
    until(lambda: not followers(leader.pid, tmp_path), 10)
