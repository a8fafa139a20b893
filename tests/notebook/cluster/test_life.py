"""Test clusters that end or are taken without the notebook's knowledge: nothing hangs, and the next cell says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forked_parents import forked_parents

from nbkit import Cluster
from nbkit.errors import CellError, ClusterError, NbkitError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.launch.launch import connect


@pytest.fixture
def cluster(nbkit_home: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with forked_parents(controllers="controller killed" not in request.node.name):
        cluster = Cluster.start(2, cpu=True, name="life")
    yield cluster
    found = registry.find("life")
    cluster.connection.close()
    if found:
        registry.end(found)


def wait_until(condition: object, seconds: float = 20) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("how", ["stopped elsewhere", "controller killed", "scheduler killed", "parent killed"])
def test_a_running_cell_ends_when_its_cluster_does(cluster: Cluster, how: str) -> None:
    handle = cluster.run("import time; time.sleep(600)", detach=True)
    time.sleep(0.3)
    if how == "stopped elsewhere":
        registry.end(cluster.entry)
    elif how == "controller killed":
        os.kill(cluster.entry.controller.pid, signal.SIGKILL)
    elif how == "scheduler killed":  # it forwards cells, answers or output
        psutil.Process(cluster.entry.controller.pid).children()[2].kill()
    else:
        os.kill(cluster.entry.parent.pid, signal.SIGKILL)
    said = "died" if how == "stopped elsewhere" else "Its ranks live, and end with this cell"
    with pytest.raises(NbkitError, match=said) as of_the_cell:
        handle.wait(timeout=30)
    with pytest.raises(ClusterError, match="ended") as of_the_next:
        cluster.run("1")
    assert of_the_next.value.hint == "%cluster restart"
    if how in ("stopped elsewhere", "parent killed"):  # the hint works with and without living ranks
        assert "%cluster restart" in of_the_cell.value.hint
        cluster.restart()
        assert cluster.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == {0: 2.0, 1: 2.0}


@pytest.mark.long
def test_a_new_generation_is_formed_after_an_interrupted_attempt(cluster: Cluster) -> None:
    with pytest.raises(CellError):
        cluster.run("if rank == 0: raise ValueError\ndist.barrier()")
    # After an interrupted attempt, the ranks are in a generation that the notebook has not counted.
    wire = cluster.connection.client
    _, port = wire.call_and_wait([0], "nbkit.bridge.calls:open_store")[0]
    wire.call_and_wait(range(2), "nbkit.bridge.calls:reform", 2, "127.0.0.1", port)
    cluster.connection.generation.spoil("as before")
    with pytest.raises(ClusterError, match="run the cell again"):
        cluster.run("1")
    assert cluster.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == {0: 2.0, 1: 2.0}


def test_another_notebook_is_refused_unless_it_takes_the_cluster(cluster: Cluster) -> None:
    code = (
        "from nbkit import Cluster\ncluster = Cluster.attach('life', take={take})\n"
        "print(cluster.run('rank').values, flush=True); input()"
    )
    refused = subprocess.run(
        [sys.executable, "-c", code.format(take=False)], capture_output=True, text=True, timeout=60
    )
    assert "Another notebook uses the cluster" in refused.stderr
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code.format(take=True)], **pipes) as taker:
        assert any("{0: 0, 1: 1}" in line for line in taker.stdout or ())
        with pytest.raises(ClusterError, match=r"taken.*\n.*--take"):
            cluster.run("1")
        for end in (cluster.stop, cluster.restart):  # they would end what the other notebook uses
            with pytest.raises(ClusterError, match=r"taken the cluster over, and uses it.*\n.*--take"):
                end()
        assert all(process.is_alive() for process in cluster.entry.ranks)
        taker.communicate("\n", timeout=60)
    cluster.stop()  # no notebook uses it now
    assert registry.find("life") is None


@pytest.mark.long
def test_a_cluster_whose_notebook_is_killed_during_the_start_can_be_attached(nbkit_home: Path) -> None:
    code = "from nbkit import Cluster; Cluster.start(2, cpu=True, name='orphan')"
    with subprocess.Popen([sys.executable, "-c", code]) as starting:
        wait_until(lambda: registry.find("orphan"))
        starting.kill()
    found = registry.find("orphan")
    assert found and not found.ranks, "it was killed too late to show anything"
    cluster = Cluster.attach("orphan")
    try:
        assert cluster.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == {0: 2.0, 1: 2.0}
        assert len(cluster.status().rows) == 2
    finally:
        cluster.stop()


@pytest.mark.long
def test_attaching_to_a_cluster_with_a_dead_rank_reports_the_death(cluster: Cluster) -> None:
    os.kill(cluster.entry.ranks[1].pid, signal.SIGKILL)
    wait_until(lambda: cluster.connection.deaths)
    again = Cluster.attach("life")
    wait_until(lambda: again.connection.deaths)
    again.connection.client.ipp._ids = [0, 1]  # as if the hub had not missed a heartbeat yet
    with pytest.raises(ClusterError, match=r"Rank 1 has died \(SIGKILL\)\.\nleft: rank 0\n"):
        again.run("1")
    assert again.run("rank", ranks=[0]).values == {0: 0}
    again.connection.close()


@pytest.mark.long
def test_attach_finds_all_ranks_of_a_cluster_registered_without_them(cluster: Cluster) -> None:
    registry.save(replace(cluster.entry, ranks=()))  # as if the notebook had been killed while they started
    again = Cluster.attach("life")
    assert [row.pid for row in again.status().rows] == [process.pid for process in cluster.entry.ranks]
    assert again.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == {0: 2.0, 1: 2.0}
    again.connection.close()


@pytest.mark.long
def test_a_death_is_known_even_if_its_message_is_lost(cluster: Cluster) -> None:
    # This imitates messages that are published while a connection is made, which do not arrive.
    client = cluster.connection.client.ipp
    client._registration_callbacks.clear()
    client.listener = None
    handle = cluster.run("import time; time.sleep(600)", ranks=[1], detach=True)
    os.kill(cluster.entry.ranks[1].pid, signal.SIGKILL)
    with pytest.raises(CellError, match=r"Rank 1 died: SIGKILL"):
        handle.wait(timeout=30)


def test_a_client_knows_ranks_that_registered_while_it_was_created(two: Cluster) -> None:
    client = connect(two.entry)
    # This imitates ranks that register after the hub lists its ranks, and before it publishes them to this client.
    client.ipp._ids, client.ipp._engines = [], type(client.ipp._engines)()
    try:
        assert not client.wait_for(2, 0.05)
        wait_until(lambda: client.wait_for(2, 0.05))
        assert client.ranks == [0, 1]
        assert client.call_and_wait(range(2), "nbkit.bridge.calls:hello", timeout=20)[1]["rank"] == 1
    finally:
        client.close()


@pytest.mark.long
def test_attaching_twice_in_one_notebook_shows_everything_once(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    again = Cluster.attach("life")
    again.run("print('once')")
    assert capsys.readouterr().out.count("once") == 1
    again.connection.close()


def test_a_rank_that_dies_during_a_pull_leaves_nothing_in_shared_memory(cluster: Cluster) -> None:
    from nbkit.errors import TransferError
    from nbkit.wire import parcel

    cluster.run(
        "class Deadly:\n    def __reduce__(self):\n        import os, time\n"
        "        if rank == 1: time.sleep(0.5); os.kill(os.getpid(), 9)\n        return (float, (1.0,))\n"
        "value = [torch.zeros(300_000), Deadly()]"
    )
    others = set(parcel.folder().glob("nbkit-*"))  # other processes may use this machine
    with pytest.raises(TransferError, match="could not be fetched"):
        cluster.pull("value", None)
    assert set(parcel.folder().glob("nbkit-*")) <= others
