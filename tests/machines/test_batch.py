"""Test clusters in jobs of LSF, PBS and Grid Engine. Their commands are stand-ins that run the jobs on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import batch_systems
import pytest
from clusters import assert_gone
from waiting import until

from magics.cluster import options_of
from nbkit import Cluster
from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts import coordinator
from nbkit.notebook.cluster.hosts.launcher import LauncherDriver, LauncherRequest, LauncherStatus
from nbkit.notebook.cluster.hosts.launchers import batch
from nbkit.notebook.cluster.hosts.progress import StartProgress
from nbkit.notebook.cluster.hosts.start_options import requested

SYSTEMS = sorted(batch_systems.SYSTEMS)
TITLES = {"lsf": "LSF", "pbs": "PBS", "sge": "Grid Engine"}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that installs a system's commands and returns their folder."""

    def install(system: str) -> Path:
        batch_systems.install(system, tmp_path / system)
        monkeypatch.setenv("PATH", f"{tmp_path / system}:{os.environ['PATH']}")
        return tmp_path / system

    monkeypatch.setattr(batch, "_POLL_SECONDS", 0.0)
    return install


def driver(system: str, folder: Path, *options: str) -> LauncherDriver:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    # This is a stand-in for Python that prints its host number and the agent's payload.
    program = folder / "agent"
    program.write_text('#!/bin/sh\nread payload; echo "$NBKIT_HOST_INDEX $payload"; exec sleep 60\n')
    program.chmod(0o755)
    return LauncherDriver(LauncherRequest(system, 2, 2, options=options, python=str(program)), folder)


def test_a_cluster_waits_in_the_queue_and_starts_one_host_per_job(commands: Callable[[str], Path]) -> None:
    folder = commands("lsf")
    (folder / "hold").touch()
    on = requested(options_of("start --launcher lsf -n 2 --nodes 2 --cpu --detach -- -q normal"))
    assert on == LauncherRequest("lsf", 2, 2, cpu=True, options=("-q", "normal"))
    assert on is not None
    Cluster.submit(on, name="batched", ttl=60)
    until(lambda: "LSF jobs 101, 102: 2 of 2 waiting" in repr(Cluster.list()))
    (folder / "hold").unlink()
    cluster = Cluster.attach("batched")
    try:
        cell = (
            "import os\nseen = torch.ones(1); dist.all_reduce(seen)\nseen.item(), os.environ.get('LSB_STDOUT_DIRECT')"
        )
        assert cluster.run(cell).values == {0: (2.0, "Y"), 1: (2.0, "Y")}
    finally:
        cluster.stop()
    agents = [path.read_text().strip() for path in (folder / "jobs").glob("???")]
    assert len(agents) == 2
    assert_gone(lambda: [pid for pid in agents if "nbkit" in command_line(pid)])


def command_line(pid: str) -> str:
    """Return the command line of a process, or "" if it has ended."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("system", SYSTEMS)
def test_jobs_are_submitted_polled_and_deleted(commands: Callable[[str], Path], tmp_path: Path, system: str) -> None:
    folder = commands(system)
    (folder / "hold").touch()
    started = driver(system, tmp_path / "cluster")
    assert started.counts == (1, 1) and started.address == "127.0.0.1"
    started.start("what nobody else may read")
    status = started.status()
    assert (status.state, status.words) == ("pending", f"{TITLES[system]} jobs 101, 102: 2 of 2 waiting")
    (folder / "hold").unlink()
    until(lambda: started.log().splitlines() == ["0 what nobody else may read", "1 what nobody else may read"])
    assert started.status().state == "running" and started.status().error is None
    for script in (folder / "jobs").glob("*.script"):
        assert "nobody else" not in script.read_text()
    assert (tmp_path / "cluster" / "agent.json").stat().st_mode & 0o77 == 0

    started.stop()
    until(lambda: started.status().state == "over")
    assert f"{TITLES[system]} job 101 has ended before the cluster was ready" in str(started.status().error)
    assert "0 what nobody else may read" in str(started.status().error)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_refusal_of_the_system_is_quoted(commands: Callable[[str], Path], tmp_path: Path, system: str) -> None:
    commands(system)
    with pytest.raises(ClusterError, match=f"{TITLES[system]} has refused the job") as caught:
        driver(system, tmp_path / "cluster", "-q", "no-such-queue").start("{}")
    assert caught.value.numbers == "no-such-queue: unknown queue"


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_short_outage_of_the_system_ends_nothing(
    commands: Callable[[str], Path], tmp_path: Path, system: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = commands(system)
    started = driver(system, tmp_path / "cluster")
    started.start("{}")
    try:
        assert started.status().state == "running"
        asked = folder / ("bjobs" if system == "lsf" else "qstat")
        there = asked.read_text()
        asked.write_text("#!/bin/sh\necho 'the server is away' >&2\nexit 1\n")
        assert started.status().state == "running"
        assert "the server is away" in capsys.readouterr().out
        asked.write_text(there)
    finally:
        started.stop()
    until(lambda: started.status().state == "over")


def test_a_job_of_grid_engine_in_an_error_state_will_not_start(commands: Callable[[str], Path], tmp_path: Path) -> None:
    folder = commands("sge")
    started = driver("sge", tmp_path / "cluster")
    started.start("{}")
    said = (folder / "qstat").read_text()
    (folder / "qstat").write_text(said.replace("state qw r", "state qw Eqw"))
    assert started.status().state == "over"
    started.stop()


def test_the_timeout_for_hosts_to_answer_does_not_run_while_a_job_waits(
    commands: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands("lsf")
    gathering = coordinator.Gathering(driver("lsf", tmp_path / "cluster"), coordinator.Places((1, 1)), 1)
    assert gathering.progress(LauncherStatus("running", "both run")).phase == "starting"
    monkeypatch.setattr(coordinator, "ANSWER_SECONDS", 0.0)
    assert gathering.progress(LauncherStatus("pending", "one waits")) == StartProgress("waiting", "one waits")
    with pytest.raises(ClusterError, match="2 of 2 hosts did not answer"):
        gathering.progress(LauncherStatus("running", "both run"))


def test_missing_commands_of_the_system_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="There is no bsub on this machine"):
        driver("lsf", tmp_path / "cluster")
