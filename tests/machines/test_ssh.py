"""Test hosts that SSH cannot reach or that do not fit: the error names the host, and nothing is left behind."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ssh_hosts import SshHosts

from nbkit import Cluster
from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.hosts import progress
from nbkit.notebook.cluster.hosts.launchers.ssh import SshRequest, read_hosts
from nbkit.notebook.cluster.hosts.network import address_towards, interface_of
from nbkit.notebook.cluster.hosts.progress import StartProgress


def refused(ssh: SshHosts, *names: str, python: str = "", then: Callable[[], None] = lambda: None) -> ClusterError:
    """Return the error of a start on these hosts. Call `then`, and check that nothing of the start is left."""
    try:
        with pytest.raises(ClusterError) as caught:
            Cluster.start(name="refused", on=SshRequest(tuple((name, 1) for name in names), cpu=True, python=python))
    finally:
        then()
    assert registry.find("refused") is None
    deadline = time.monotonic() + 40  # a process that imports torch ends only after the import
    while (left := [ssh.processes(name) for name in ssh.names]) != [[], []] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == [[], []]
    return caught.value


@contextmanager
def once(seen: Callable[[StartProgress], bool], act: Callable[[], None]) -> Iterator[None]:
    """Call `act` when `seen` is true for the progress of a start in this block."""

    def watch() -> None:
        while not over.wait(0.02):
            if (state := progress.read(registry.home() / "refused")) and seen(state):
                act()
                return

    over, thread = threading.Event(), threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def release(ssh: SshHosts) -> None:
    """Let the start that `slow_python` delays go on, and connect the second host again."""
    (ssh.folder / "gate").unlink()
    ssh.link(2, "up")


@contextmanager
def slow_python(ssh: SshHosts, host: str) -> Iterator[str]:
    """Yield a Python that starts on `host` only after the block."""
    gate, python = ssh.folder / "gate", ssh.folder / "slow"
    gate.touch()
    python.write_text(
        f'#!/bin/sh\nwhile [ "$(hostname)" = {host} -a -e {gate} ]; do sleep 0.1; done\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    try:
        yield str(python)
    finally:
        gate.unlink(missing_ok=True)


def refused_as_node2_dies(ssh: SshHosts, *, slow: str) -> ClusterError:
    """Return the error of a start whose second host dies after one of the two has answered.

    The host `slow` does not answer earlier, because no Python starts there.
    """
    with (
        slow_python(ssh, slow) as python,
        once(lambda state: "1 of 2 hosts have answered" in state.words, lambda: ssh.link(2, "down")),
    ):
        return refused(ssh, *ssh.names, python=python, then=lambda: release(ssh))


def test_hosts_come_from_the_line_or_from_a_file(tmp_path: Path) -> None:
    assert read_hosts("node1:4,me@node2") == (("node1", 4), ("me@node2", 1))
    (tmp_path / "hosts").write_text("# the lab\nnode1:4\nnode2 slots=2\n\n")
    assert read_hosts(str(tmp_path / "hosts")) == (("node1", 4), ("node2", 2))
    for wrong in ("node1:many", "node1:0", "-oProxyCommand=x:1", ""):
        with pytest.raises(UsageError, match="is not a host with a number of ranks"):
            read_hosts(wrong)


def test_the_address_towards_hosts_and_its_interface_are_found() -> None:
    assert address_towards(["127.0.0.1", "localhost"]) == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    with pytest.raises(ClusterError, match=r"The host no\.such\.host\.invalid has no address here"):
        address_towards(["no.such.host.invalid"])


def test_an_unknown_host_is_an_error(ssh: SshHosts) -> None:
    assert "The host nowhere.invalid has no address here" in refused(ssh, "node1", "nowhere.invalid").what


def test_a_key_that_the_host_does_not_accept_is_an_error(ssh: SshHosts) -> None:
    error = refused(ssh, "node2", "locked")
    assert error.what == "The host locked does not let you in without a password."
    assert error.hint == "ssh-copy-id locked"


@pytest.mark.long
def test_a_host_that_dies_while_its_ranks_start_is_named(ssh: SshHosts) -> None:
    with once(lambda state: state.phase == "forked", lambda: ssh.link(2, "down")):
        error = refused(ssh, *ssh.names, then=lambda: ssh.link(2, "up"))
    assert error.what == "Rank 1 died while the cluster was starting."
    assert error.numbers == "its host node2 does not answer"
    assert error.hint == "%cluster start   again"


@pytest.mark.long
def test_hosts_that_cannot_connect_to_each_other_are_named_early(ssh: SshHosts) -> None:
    ssh.block("on")
    error = refused(ssh, *ssh.names, then=lambda: ssh.block("off"))
    assert error.what == "The host node1 cannot connect to node2."
    assert f"from node1 ({ssh.net}.1) to node2 ({ssh.net}.2, port " in error.numbers
    assert f"; from node2 ({ssh.net}.2) to node1 ({ssh.net}.1, port " in error.numbers
    assert error.hint.startswith(f"ping {ssh.net}.2")


@pytest.mark.long
def test_a_host_that_dies_after_its_agent_answered_is_named(ssh: SshHosts) -> None:
    error = refused_as_node2_dies(ssh, slow="node1")
    assert error.what == "The host node2 does not answer any more: the cluster was starting."
    assert error.hint == "%cluster start   again"


@pytest.mark.long
def test_a_host_that_dies_before_its_agent_answered_is_named(ssh: SshHosts) -> None:
    error = refused_as_node2_dies(ssh, slow="node2")
    assert error.what == "The host node2 does not answer."
    assert "node2" in error.hint


@pytest.mark.long
def test_a_host_with_a_changed_key_is_an_error(ssh: SshHosts) -> None:
    assert refused(ssh, "changed").what == "The key of the host changed has changed."


@pytest.mark.long
def test_a_missing_python_on_the_host_is_an_error(ssh: SshHosts) -> None:
    error = refused(ssh, "node1", python="/nowhere/bin/python")
    assert error.what == "There is no /nowhere/bin/python on the host node1."


@pytest.mark.long
def test_another_version_of_torch_is_named_by_host(ssh: SshHosts) -> None:
    old = ssh.folder / "old"
    old.mkdir()
    (old / "sitecustomize.py").write_text(
        "from importlib import metadata\nreal = metadata.version\n"
        "metadata.version = lambda name: '2.11.9' if name == 'torch' else real(name)\n"
    )
    python = ssh.folder / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$(hostname)" = node2 ] && export PYTHONPATH={old}:$PYTHONPATH\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    error = refused(ssh, "node1", "node2", python=str(python))
    assert error.what == "The hosts have different versions of torch."
    assert "on node1; 2.11.9 on node2" in error.numbers
