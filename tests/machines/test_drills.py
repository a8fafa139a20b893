"""Test that all features of one machine work on two hosts: cells, first error, stop, values, a switch, a dead rank."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import psutil
import pytest
from ssh_hosts import SshHosts

from nbkit import Cluster
from nbkit.errors import CellError, ClusterError, RankDied

TRAINING = """
import copy
from torch.nn.functional import mse_loss
torch.manual_seed(0)
MODEL = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
DATA = [(torch.randn(4).double(), torch.randn(1).double()) for _ in range(32)]

def trained(strategies, steps=3):
    torch.manual_seed(0)
    trainer = nbkit.Trainer(
        model=lambda: copy.deepcopy(MODEL), loss=mse_loss, data=DATA, batch_size=8, seed=0, log_dir=None,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), progress=False, strategy=strategies[0])
    losses = []
    for strategy in strategies:
        if strategy != strategies[0]:
            trainer.switch(strategy)
        losses += [record['loss'] for record in trainer.fit(steps)]
    return losses
"""


def engine_file(cluster: Cluster, home: Path) -> Path:
    """Return the file with keys that an engine needs to reach the controller."""
    return home / cluster.entry.name / "profile/security" / f"ipcontroller-{cluster.entry.name}-engine.json"


def test_ranks_are_numbered_by_host_and_meet_in_one_world(spread: Cluster) -> None:
    cell = "total = torch.ones(1); dist.all_reduce(total); [rank, local_rank, int(total), dist.get_world_size()]"
    assert spread.run(cell).values == {rank: [rank, rank % 2, 4, 4] for rank in range(4)}
    hosts = [label.partition(":")[0] for label in spread.entry.labels]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    # From these, strategies know which ranks share a node, even if two nodes of Slurm are one machine.
    cell = "from nbkit.rank.comm.link_probe import link_of\nlink_of(device).node_of"
    assert set(spread.run(cell).values.values()) == {(0, 0, 1, 1)}


def test_the_first_error_releases_the_ranks_of_the_other_host(spread: Cluster) -> None:
    with pytest.raises(CellError, match="Rank 3 failed: ZeroDivisionError") as caught:
        spread.run("1 / 0 if rank == 3 else dist.barrier()")
    assert "Ranks 0-2: released" in str(caught.value)
    assert set(spread.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values.values()) == {4.0}


def test_stop_interrupts_a_rank_on_the_other_host_in_native_code(spread: Cluster) -> None:
    # Only SIGINT ends it, and only the parent on its own host can send this.
    handle = spread.run("import re\nif rank == 3: re.match(r'(a+)+$', 'a' * 40 + 'b')\ndist.barrier()", detach=True)
    time.sleep(0.5)
    assert handle.stop(end_after=30).status == "interrupted"
    assert spread.run("rank").values[3] == 3


def test_values_are_sent_without_shared_memory(spread: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("shared memory was used")

    monkeypatch.setattr("nbkit.wire.parcel.write", refuse)
    spread.push({"numbers": bytearray(b"123" * 1000)})
    assert spread.pull("numbers + bytes([48 + rank])", ranks=3) == b"123" * 1000 + b"3"
    assert spread.pull("rank", ranks=None) == [0, 1, 2, 3]


def test_sync_copies_the_projects_files_to_hosts_that_do_not_see_them(
    spread: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/layers.py").write_text("WIDTH = 3")
    (tmp_path / "sizes.py").write_text("from parts.layers import WIDTH")
    (tmp_path / "old.py").write_text("")
    (tmp_path / "data.bin").write_bytes(bytes((16 << 20) + 1))
    (tmp_path / "secret.txt").write_text("word")
    (tmp_path / "other.py").symlink_to("/etc/hostname")
    (tmp_path / ".gitignore").write_text("secret.txt")
    looks = "import sizes, pathlib\n[sizes.WIDTH, pathlib.Path(sizes.__file__).parent.as_posix()]"

    first = spread.sync(".")
    values = spread.run(looks).values
    assert [width for width, _ in values.values()] == [3] * 4
    assert [reason.partition(" ")[0] for reason in first.left_out] == ["data.bin", "other.py"]
    if "on_slurm" in os.environ["PYTEST_CURRENT_TEST"]:  # the nodes of Slurm see this file system
        assert {folder for _, folder in values.values()} == {str(tmp_path)}
        assert set(first.hosts.values()) == {None} and "sees them itself" in str(first)
        return
    # These are .gitignore, layers.py, old.py and sizes.py, in a private folder.
    assert [sent and sent[0] for sent in first.hosts.values()] == [4, 4]
    assert spread.run("import os; [os.stat(sizes.__file__).st_mode & 0o77, os.path.exists('secret.txt')]").values == {
        rank: [0, False] for rank in range(4)
    }
    (tmp_path / "parts/layers.py").write_text("WIDTH = 5")
    (tmp_path / "old.py").unlink()
    again = spread.sync()
    assert [sent and sent[0] for sent in again.hosts.values()] == [1, 1]
    assert again.stale == ("parts.layers",) and "importlib.reload" in str(again)
    reload = "import importlib, parts.layers\n[importlib.reload(parts.layers).WIDTH, importlib.util.find_spec('old')]"
    assert spread.run(reload).values == {rank: [5, None] for rank in range(4)}
    assert [sent and sent[0] for sent in spread.sync().hosts.values()] == [0, 0]


def test_a_training_with_switches_gives_the_losses_of_one_strategy(spread: Cluster) -> None:
    spread.run(TRAINING)
    one = spread.run("trained(['ddp'], steps=9)").values[0]
    switched = spread.run("trained(['ddp', 'zero3', 'pp=2'])").values[0]
    assert one == pytest.approx(switched, rel=1e-9)


def test_keys_are_in_no_command_line_and_no_file_readable_by_others(spread: Cluster, nbkit_home: Path) -> None:
    info = json.loads(engine_file(spread, nbkit_home).read_text())
    assert info["curve_serverkey"]
    words = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in words if info["curve_serverkey"] in line]
    assert not os.stat(nbkit_home / spread.entry.name).st_mode & 0o077
    on_hosts = spread.run("import os\nos.stat(nbkit.bridge.calls.runner.capture.folder.parent).st_mode").values
    assert not any(mode & 0o077 for mode in on_hosts.values())


def test_every_socket_listens_only_on_the_address_that_is_needed(spread: Cluster, nbkit_home: Path) -> None:
    entry = spread.entry
    family = [psutil.Process(entry.parent.pid), psutil.Process(entry.controller.pid)]
    family += psutil.Process(entry.controller.pid).children(recursive=True)
    listening = {c.laddr.ip for one in family for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    info = json.loads(engine_file(spread, nbkit_home).read_text())
    assert listening <= {info["interface"].removeprefix("tcp://"), "127.0.0.1"}


STORE = """
import os, socket
store = [os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])]
client = dist.TCPStore(*store, world_size=4, is_master=False, timeout=__import__('datetime').timedelta(seconds=20))
client.add('seen', 1)
store
"""


def test_the_store_of_the_world_admits_only_hosts_of_the_job(spread: Cluster) -> None:
    for _ in range(2):  # in two generations
        stores = spread.run(STORE).values
        address, port = stores[0]
        assert stores == {rank: [address, port] for rank in range(4)}  # each reached it, from the other host too
        if not address.startswith("127."):  # Slurm's two nodes are this machine
            with pytest.raises(TimeoutError):  # the notebook's host has no rank
                socket.create_connection((address, port), 1)
        with pytest.raises(CellError):
            spread.run("1 / 0 if rank == 3 else dist.barrier()")


def test_a_rank_that_dies_is_named_and_the_other_host_is_released(spread: Cluster) -> None:
    began = time.monotonic()
    with pytest.raises(RankDied, match="Rank 3 died: SIGKILL") as caught:
        spread.run("import os\nos.kill(os.getpid(), 9) if rank == 3 else dist.barrier()")
    assert "Ranks 0-2: released" in str(caught.value)
    assert time.monotonic() - began < 20
    with pytest.raises(ClusterError, match="Rank 3 has died"):
        spread.run("rank")


@pytest.mark.long
def test_ranks_die_with_the_agent_of_their_host(spread: Cluster) -> None:
    cell = "import os, time\nos.kill(os.getppid(), 9) if rank == 2 else None\ntime.sleep(100)"
    handle = spread.run(cell, ranks=[0, 1, 2], detach=True)
    with pytest.raises(RankDied, match=r"Rank 2 died: the agent of its host .* ended") as caught:
        handle.wait(20)
    assert "Ranks 0-1: released" in str(caught.value)


@pytest.mark.long
def test_a_disconnected_host_is_named_within_seconds(on_ssh: Cluster, ssh: SshHosts) -> None:
    handle = on_ssh.run("import time; time.sleep(100)", ranks=[0, 1], detach=True)
    time.sleep(0.5)
    ssh.link(1, "down")
    try:
        with pytest.raises(RankDied, match=r"Rank 0 died: its host node1 does not answer"):
            handle.wait(15)
    finally:
        ssh.link(1, "up")


@pytest.mark.long
def test_restart_gives_fresh_ranks_on_the_hosts(on_slurm: Cluster) -> None:
    on_slurm.restart()
    assert set(on_slurm.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values.values()) == {4.0}
