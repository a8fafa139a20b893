"""Test the parent of the ranks alone: starts that are abandoned or stopped half-way, and children that end."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_parents import parent_of
from ranks import run_ranks

from nbkit.bridge.parent import parent as parents
from nbkit.bridge.parent.child_processes import has_ended
from nbkit.wire.link import Link
from nbkit.wire.messages import RankReady, encoded
from nbkit.wire.processes import Process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for the parent of a cluster of three ranks whose controller is not ready yet."""
    pin = {"env": {}, "cores": [], "threads": 1}
    spec = {
        "name": "half",
        "folder": str(tmp_path),
        "profile_dir": str(tmp_path / "profile"),
        "engine_file": str(tmp_path / "engine.json"),
        "backend": "gloo",
        "device": "cpu",
        "ttl": 60,
        "launcher": vars(Process.of(os.getpid())),
        "forked": True,
        "pins": [pin] * 3,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    return tmp_path


def test_a_parent_ends_if_its_notebook_ends_before_the_controller_is_ready(folder: Path) -> None:
    # The notebook has started this controller, but it is not ready.
    controller = subprocess.Popen(["sleep", "1000"])
    (folder / "controller.json").write_text(json.dumps(vars(Process.of(controller.pid))))
    spec = json.loads((folder / "spec.json").read_text())
    spec["launcher"]["started"] += 1  # as if the notebook has ended
    (folder / "spec.json").write_text(json.dumps(spec))
    parent = parent_of(folder)
    parent.start()
    try:
        parent.join(timeout=60)
        assert parent.exitcode == 0
        assert controller.wait(timeout=10) != 0
    finally:
        parent.kill()
        parent.join()
        controller.kill()
        controller.wait()


def stopped_while_it_forks(rank: int, folder: Path) -> list[int]:
    """Tell a parent to end while it forks the second rank. Return the ranks that it started."""
    started = []

    def start_rank(self: parents.Parent, rank: int) -> None:
        started.append(rank)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.pause()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # the new child is not in the list yet
        mine, _theirs = socket.socketpair()
        self.children[rank] = parents.Child(rank, pid, Link(mine))

    parents.Parent.start_rank = start_rank  # type: ignore[method-assign,assignment]  # in a forked process
    parents.Parent(folder).run()
    return started


def test_a_parent_that_is_stopped_while_it_forks_starts_no_more_ranks(folder: Path) -> None:
    assert run_ranks(stopped_while_it_forks, 1, folder, join=False) == [[0, 1]]


def heard_from_another_release(rank: int, folder: Path) -> int:
    """Return 1 if the parent ended a rank whose first message has another protocol."""
    parent = parents.Parent(folder)
    mine, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.pause()
    child = parents.Child(0, pid, Link(mine))
    parent.selector.register(mine, selectors.EVENT_READ, 0)
    theirs.sendall(json.dumps({**encoded(RankReady()), "_protocol": "another"}).encode() + b"\n")
    parent._hear(child)
    assert not child.ready
    for _ in range(1000):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return 1
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return 0


def test_a_rank_of_another_release_is_ended(folder: Path) -> None:
    assert run_ranks(heard_from_another_release, 1, folder, join=False) == [1]


def test_has_ended_sees_the_end_of_a_child_without_reaping_it() -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"], {})
    try:
        assert not has_ended(pid)
    finally:
        os.kill(pid, 9)
    while not has_ended(pid):
        time.sleep(0.01)
    assert os.waitpid(pid, os.WNOHANG)[0] == pid  # has_ended did not reap it
