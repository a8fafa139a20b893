"""Test that a failed start leaves nothing, and that an end leaves nothing and touches no other process."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import machines
import psutil
import pytest
from clusters import home_of_clusters
from forked_parents import forked_parents
from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalProcessLauncher
from ipyparallel.controller.app import IPController
from waiting import until

from nbkit import Board, Cluster
from nbkit.bridge.parent.parent import controller_of
from nbkit.errors import ClusterError, ClusterExists, ClusterNotFound, UsageError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.launch.launch import START_SECONDS, controller_launcher, make_folder
from nbkit.wire.processes import followers


@pytest.fixture(scope="module", autouse=True)
def nbkit_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder without the clusters that other files share."""
    with forked_parents(False), home_of_clusters(tmp_path_factory.mktemp("clusters")) as home:
        yield home


@pytest.fixture
def forked() -> Iterator[None]:
    """Fork the parents of clusters, in tests that are not about the start of the parent."""
    with forked_parents(controllers=False):  # some controllers are killed here
        yield


def processes_of(home: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or [])]


HIDING = ("queue", "random", "profile", "logging", "socket")
"""Standard modules that have the name of a file in the folder in which `as_a_user` starts."""


@pytest.fixture
def as_a_user(nbkit_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Start a cluster of two ranks as a user does, which takes seconds of a core; attach if it runs already."""
    if registry.find("gone"):
        return Cluster.attach("gone")
    for name in HIDING:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the {name} of the user')")
    (tmp_path / "of_mine.py").write_text("answer = 42")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "error,ignore::ImportWarning")
    return Cluster.start(2, cpu=True, name="gone")


def test_files_of_the_folder_hide_no_standard_module_and_warnings_end_no_start(as_a_user: Cluster) -> None:
    source = f"import os, {', '.join(HIDING)}, of_mine\n(of_mine.answer, os.environ['PYTHONWARNINGS'])"
    assert as_a_user.run(source).values[1] == (42, "default,ignore::ImportWarning")
    # The user's modules are also found after a cell has changed the folder.
    assert as_a_user.run("os.chdir('/'); import importlib; importlib.reload(of_mine).answer").values[1] == 42


def test_modules_of_every_rank_are_imported_by_its_parent(as_a_user: Cluster) -> None:
    # The parent's objects are frozen, so `gc` does not list them.
    source = "import gc, types; [each.__name__ for each in gc.get_objects() if isinstance(each, types.ModuleType)]"
    own = as_a_user.run(source).values[0]
    assert "tornado.platform.asyncio" in own and len(own) < 30, own
    assert not {"debugpy", "ipykernel.debugger", "pydevd"} & set(own)


def test_stop_leaves_nothing_behind(nbkit_home: Path, as_a_user: Cluster) -> None:
    cluster = as_a_user
    cluster.run("import subprocess; subprocess.Popen(['sleep', '1000'])")
    family = psutil.Process(cluster.entry.parent.pid).children(recursive=True)
    assert any("sleep" in process.name() for process in family)
    cluster.stop()
    assert processes_of(nbkit_home) == []
    assert psutil.wait_procs(family, timeout=5)[1] == []
    assert registry.find("gone") is None


def test_a_rank_that_cannot_start_is_an_error_with_its_last_lines(
    nbkit_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # This sitecustomize breaks a module that only ranks import.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['nbkit.rank.world.failure_alarm'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"nbkit\.rank\.world\.failure_alarm"):
        Cluster.start(2, cpu=True, name="broken")
    assert processes_of(nbkit_home) == []
    assert registry.find("broken") is None


def test_a_start_that_is_interrupted_leaves_nothing(nbkit_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(launcher: LocalControllerLauncher) -> None:
        LocalProcessLauncher.start(launcher)
        started.append(launcher.pid)
        raise KeyboardInterrupt

    def wait_procs(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)  # a second Ctrl-C, during the clean-up
        return waited(*args, **options)

    waited = psutil.wait_procs
    monkeypatch.setattr(LocalControllerLauncher, "start", start)
    monkeypatch.setattr(psutil, "wait_procs", wait_procs)
    with pytest.raises(KeyboardInterrupt):
        Cluster.start(2, cpu=True, name="interrupted")
    assert not psutil.pid_exists(started[0])
    assert followers(started[0], nbkit_home / "interrupted") == []
    assert processes_of(nbkit_home) == []
    assert registry.find("interrupted") is None


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_a_cluster_without_a_name_gets_one_and_is_reused_by_the_next_start(nbkit_home: Path) -> None:
    first = Cluster.start(1, cpu=True)
    try:
        assert first.entry.name in repr(Cluster.list())
        first.run("kept = dist.get_world_size()")
        second = Cluster.start(1, cpu=True)
        assert second.run("kept").values == {0: 1}
        assert len(registry.entries()) == 1
        with pytest.raises(ClusterExists, match="other options"):
            Cluster.start(2, cpu=True)
    finally:
        first.stop()


def test_attaching_to_an_unknown_cluster_says_what_runs(nbkit_home: Path) -> None:
    with pytest.raises(ClusterNotFound, match="no cluster is running"):
        Cluster.attach("nobody")


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_clean_ends_only_what_the_registry_names(nbkit_home: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)  # nbkit.bridge worker"])
    cluster = Cluster.start(2, cpu=True, name="half")
    try:
        entry = cluster.entry
        assert len(followers(entry.controller.pid, entry.folder)) > 1  # its schedulers
        entry.parent.end(signal.SIGSTOP)  # it would end the ranks itself
        entry.controller.end(signal.SIGKILL)
        time.sleep(0.1)
        assert not entry.is_alive()
        done = registry.clean()
        assert done
        assert done[0].startswith("half: ended")
        assert entry.left() == []
        assert processes_of(nbkit_home) == []
        assert followers(entry.controller.pid, entry.folder) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_hub_waits_for_a_rank_as_long_as_the_notebook(nbkit_home: Path) -> None:
    hub = IPController()
    hub.parse_command_line(controller_launcher(make_folder("waits"), "waits").controller_args)
    assert hub.registration_timeout == START_SECONDS
    registry.forget("waits")


def test_a_pid_reused_by_another_process_is_left_alone() -> None:
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        stale = registry.Process(bystander.pid, started=12345.0)
        assert not stale.is_alive()
        stale.end(signal.SIGKILL)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_no_other_process_can_take_a_port_that_a_controller_has_chosen() -> None:
    source = """
import socket, zmq
from ipyparallel import util
from nbkit.notebook.cluster.launch.controller import hold_ports

hold_ports()
context = zmq.Context()
for port in util.select_random_ports(40):
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            pass
        else:
            print("taken", port)
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    server.bind(f"tcp://127.0.0.1:{port}")
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(b"here")
    assert server.poll(10_000) and server.recv_multipart()[1] == b"here"
context.destroy(0)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_a_start_in_which_a_scheduler_dies_ends_at_once(nbkit_home: Path) -> None:
    def kill() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            controller = controller_of(nbkit_home / "deaf")
            children = psutil.Process(controller.pid).children() if controller else []
            if len(children) > 2:
                children[2].kill()  # the one that forwards requests
                return
            time.sleep(0.01)

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(ClusterError, match=r"controller ended while the cluster was starting") as caught:
        Cluster.start(2, cpu=True, name="deaf")
    killing.join()
    assert "ControlScheduler ended (exit code -9), and so does the controller." in str(caught.value)
    assert processes_of(nbkit_home) == [] and registry.find("deaf") is None


@pytest.mark.usefixtures("forked")
def test_the_ranks_end_when_the_controller_is_gone(nbkit_home: Path) -> None:
    cluster = Cluster.start(2, cpu=True, name="headless")
    entry = cluster.entry
    entry.controller.end(signal.SIGKILL)
    until(lambda: not entry.left(), 30)  # also none of the controller's schedulers
    cluster.stop()


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_ranks_end_when_their_parent_is_killed_but_not_within_a_cell(nbkit_home: Path) -> None:
    cluster = Cluster.start(2, cpu=True, name="orphans")
    cluster.run("import time; time.sleep(2)", detach=True)
    time.sleep(0.3)
    os.kill(cluster.entry.parent.pid, signal.SIGKILL)
    time.sleep(0.5)
    assert all(rank.is_alive() for rank in cluster.entry.ranks)
    until(lambda: not any(rank.is_alive() for rank in cluster.entry.ranks), 20)
    cluster.stop()


@pytest.mark.long
def test_ranks_can_be_spawned_if_forking_is_unsafe(nbkit_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBKIT_START", "spawn")
    cluster = Cluster.start(2, cpu=True, name="spawned")
    try:
        assert cluster.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == {0: 2.0, 1: 2.0}
    finally:
        cluster.stop()
    assert processes_of(nbkit_home) == []


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_unusable_gpus_and_more_ranks_than_cores_give_notes_and_no_error(
    nbkit_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = tuple(os.sched_getaffinity(0))
    machine = replace(machines.KAGGLE, torch=machines.CPU_TORCH, cores=cores)
    monkeypatch.setattr("nbkit.notebook.cluster.cluster.read_machine", lambda: machine)
    cluster = Cluster.start(len(cores) + 1, name="many")
    try:
        seen, shared = cluster.notes
        assert "2 GPUs (Tesla T4) cannot be used, since torch 2.13.0+cpu is built for the CPU" in seen
        assert "share" in shared
        assert set(cluster.run("torch.cuda.is_available()").values.values()) == {False}
    finally:
        cluster.stop()


def test_a_cluster_of_zero_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one rank"):
        Cluster.start(0, cpu=True)


RUNS = """
def where(**asked):
    data = [(torch.ones(1), torch.zeros(1))] * 2
    return nbkit.Trainer(
        model=lambda: torch.nn.Linear(1, 1), loss=torch.nn.functional.mse_loss, data=data, batch_size=1,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **asked,
    ).run_dir.parent

from nbkit.rank.train.runs_dir import MAX_BYTES
[str(where()), str(where(log_dir="runs")), MAX_BYTES]
"""


@pytest.mark.long
def test_runs_are_recorded_where_nbkit_toml_says_unless_log_dir_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nbkit.toml").write_text(f'runs = "{tmp_path / "kept"}"\nmax_disk = "2GB"\n')
    cluster = Cluster.start(1, cpu=True, name="recorded")

    assert cluster.run(RUNS).values == {
        0: [str(tmp_path / "kept" / getpass.getuser()), str(tmp_path / "runs"), 2_000_000_000]
    }
    assert Board.start().logdir == tmp_path / "kept" / getpass.getuser()
    Board.end()
    cluster.stop()
