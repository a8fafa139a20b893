"""Test the end of a Slurm job during a training: at its time limit, for another job, or because it is cancelled.

The training is saved before the hosts are lost, and the notebook gives the reason. Each test has its own cluster,
which ends with its job.
"""

from __future__ import annotations

import io
import os
import re
import signal
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from slurm_nodes import SlurmNodes
from waiting import until

from nbkit import Cluster
from nbkit.errors import ClusterNotFound, NbkitError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.hosts.launcher import LauncherStatus
from nbkit.notebook.cluster.hosts.launchers.slurm import SlurmRequest, moment, parsed
from nbkit.wire.messages import GetStatus

SETUP = """
import time
import torch
from torch import nn
from torch.nn import functional as F
import nbkit

def made(folder, pause, **more):
    torch.set_default_dtype(torch.float64)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return nbkit.Trainer(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), loss=F.mse_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=[(x[i], x[i].sum().tanh().reshape(1)) for i in range(64)], batch_size=8, strategy="zero1",
        callbacks=[lambda trainer, record: time.sleep(pause)], log_dir=None,
        checkpoints=nbkit.Checkpoints(path=folder, every=False), progress=False, **more,
    )
"""
PATIENCE = 120.0


def job_of(slurm: SlurmNodes, name: str) -> str:
    """Return the number of the job of cluster `name`."""
    return slurm.command("squeue", "-h", "-n", f"nbkit-{name}", "-o", "%i").strip()


def training(name: str, folder: Path, pause: float = 0.05, **options: Any) -> tuple[Cluster, Any]:
    """Start a rank on each of two nodes. Return the cluster, and the handle of a cell that is training."""
    cluster = Cluster.start(name=name, on=SlurmRequest(2, nodes=2, cpu=True, **options), ttl=600)
    cluster.run(SETUP)
    handle = cluster.run(f"trainer = made({str(folder)!r}, {pause})\ntrainer.fit(100_000)", detach=True)
    until(lambda: cluster.connection.client.ask([0], GetStatus()).get(0, {}).get("progress", {}).get("step", 0) > 2)
    return cluster, handle


def saved_step(said: str, folder: Path) -> int:
    """Return the step after which a training ended, from the error. Check that the checkpoint continues from there."""
    found = re.search(rf"has ended after step (\d+), saved to {folder}", said)
    assert found, said
    ((step, loaded, alone),) = run_ranks(gone_on, 1, str(folder))
    assert step == int(found[1])
    assert loaded == pytest.approx(alone, abs=1e-10)
    return step


def gone_on(world: Any, folder: str) -> tuple[int, list[float], list[float]]:
    """Return the step of the checkpoint, and the losses of two trainings: one continues from it, one is undisturbed."""
    names: dict[str, Any] = {}
    exec(SETUP, names)
    loaded, alone = names["made"](None, 0), names["made"](None, 0)
    loaded.load(folder)
    step = loaded.step
    for trainer in (loaded, alone):
        trainer.fit(until=step + 3)
    return step, *([record["loss"] for record in trainer.history] for trainer in (loaded, alone))


def left_alone(world: Any) -> list[float]:
    """Return the losses of an undisturbed training."""
    names: dict[str, Any] = {}
    exec(SETUP, names)
    return [record["loss"] for record in names["made"](None, 0).fit(STEPS)]


@pytest.mark.long
@pytest.mark.parametrize("whom", ["controller", "coordinator"])
def test_a_training_whose_controller_or_coordinator_is_killed_is_saved(
    slurm: SlurmNodes, tmp_path: Path, whom: str
) -> None:
    cluster, handle = training(whom, tmp_path / "saved")
    killed = cluster.entry.controller if whom == "controller" else cluster.entry.parent
    assert killed
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(NbkitError, match=f"the {whom} of the cluster has ended") as caught:
        handle.wait(timeout=PATIENCE)
    assert "died" not in str(caught.value)
    assert saved_step(str(caught.value), tmp_path / "saved") > 2
    until(lambda: not slurm.jobs())  # the ranks end by themselves
    with pytest.raises(NbkitError, match="has ended"):
        cluster.run("1")
    cluster.stop()
    assert not cluster.entry.left()


def assert_over(cluster: Cluster, slurm: SlurmNodes, words: str) -> None:
    """Check that a cell and an attach get the reason for the end of the job, and that nothing of it is left."""
    until(lambda: not cluster.entry.is_alive())
    with pytest.raises(NbkitError) as caught:
        cluster.run("1")
    log = (cluster.entry.folder / "logs" / "coordinator.log").read_text()
    assert re.search(f"(?s){words}.*has ended after step", str(caught.value)), log
    with pytest.raises(ClusterNotFound, match=f"has ended: {words}"):
        Cluster.attach(cluster.entry.name)
    cluster.stop()
    until(lambda: not slurm.jobs())
    assert registry.find(cluster.entry.name) is None


@pytest.mark.long
def test_a_training_in_a_cancelled_job_is_saved(slurm: SlurmNodes, tmp_path: Path) -> None:
    cluster, handle = training("cancelled", tmp_path / "saved")
    slurm.command("scancel", job_of(slurm, "cancelled"))
    with pytest.raises(NbkitError) as caught:
        handle.wait(timeout=PATIENCE)
    assert saved_step(str(caught.value), tmp_path / "saved") > 2
    assert "died" not in str(caught.value)
    assert_over(cluster, slurm, r"job \d+ was cancelled")


@pytest.mark.long
def test_a_training_of_a_requeued_job_continues_after_a_restart(slurm: SlurmNodes, tmp_path: Path) -> None:
    cluster, handle = training("again", tmp_path / "saved")
    slurm.command("scontrol", "requeue", job_of(slurm, "again"))
    with pytest.raises(NbkitError, match=r"job \d+ was put back in the queue") as caught:
        handle.wait(timeout=PATIENCE)
    step = saved_step(str(caught.value), tmp_path / "saved")
    until(lambda: not slurm.jobs())  # otherwise it would run again without the cells
    with pytest.raises(NbkitError, match="has ended after step") as caught:
        cluster.run("1")
    assert caught.value.hint.startswith("%cluster restart ")
    cluster.restart()
    cluster.run(SETUP)
    cluster.run(
        f"trainer = made({str(tmp_path / 'saved')!r}, 0)\nfrom_then = trainer.fit(until={step + 3}, resume='auto')"
    )
    assert cluster.run("len(from_then)").values == {0: 3, 1: 3}
    losses = cluster.run("[record['loss'] for record in trainer.history]").values[1]
    ((_, _, alone),) = run_ranks(gone_on, 1, str(tmp_path / "saved"))
    assert losses == pytest.approx(alone, abs=1e-10)
    cluster.stop()
    until(lambda: not slurm.jobs())


STEPS = 400
GOES_ON = f"""
import os
trainer = made(FOLDER, 0 if os.path.isdir(FOLDER) else 0.05)
trainer.fit(until={STEPS}, resume='auto')
"""


@pytest.mark.long
@pytest.mark.timeout(500)  # two starts under Slurm, and two trainings
def test_a_cluster_with_requeue_gets_new_hosts_and_continues_its_training(slurm: SlurmNodes, tmp_path: Path) -> None:
    shown = io.StringIO()
    with redirect_stdout(shown), redirect_stderr(shown):
        cluster = Cluster.start(name="returns", on=SlurmRequest(2, nodes=2, cpu=True, requeue=True), ttl=600)
        cluster.run(SETUP)
        cluster.push({"FOLDER": str(tmp_path / "saved")})
        cluster.run("print('said once'); WIDTH = 3")
        first, job = cluster.connection, job_of(slurm, "returns")
        handle = cluster.run(GOES_ON, detach=True)
        until(lambda: first.client.ask([0], GetStatus()).get(0, {}).get("progress", {}).get("step", 0) > 2)
        slurm.command("scontrol", "requeue", job)
        with pytest.raises(NbkitError, match=r"has ended after step"):
            handle.wait(timeout=PATIENCE)
        until(lambda: "and cell [" in shown.getvalue())
        cluster.wait(PATIENCE)
        seen = cluster.run("WIDTH, [record['loss'] for record in trainer.history]").values
    assert re.search(rf"job {job} was put back in the queue.*saved to {tmp_path}", shown.getvalue())
    assert shown.getvalue().count("said once") == 1
    (alone,) = run_ranks(left_alone, 1)
    for width, losses in seen.values():
        assert width == 3 and losses == pytest.approx(alone, abs=1e-10)
    new = job_of(slurm, "returns")
    assert slurm.jobs() == [f"{new} RUNNING"] and new != job
    cluster.stop()
    until(lambda: not slurm.jobs())


@pytest.mark.long
def test_a_training_is_saved_before_slurms_own_time_limit(slurm: SlurmNodes, tmp_path: Path) -> None:
    """Give the job two minutes, of which the last thirty seconds are for saving. The limit is not changed."""
    cluster, handle = training("timed", tmp_path / "saved", 0.5, time="2")
    with pytest.raises(NbkitError, match=r"job \d+ reaches its time limit at"):
        handle.wait(timeout=PATIENCE)
    assert_over(cluster, slurm, r"job \d+ reached its time limit")
    assert (tmp_path / "saved").is_dir()


@pytest.mark.long
def test_ranks_stay_until_the_time_limit_after_the_training_is_saved(slurm: SlurmNodes, tmp_path: Path) -> None:
    shown = io.StringIO()
    with redirect_stderr(shown):
        # A step takes longer than the interval in which the notebook reads the folder of the cluster.
        cluster, handle = training("limited", tmp_path / "saved", 1.5, time="30:00")
        job = job_of(slurm, "limited")
        slurm.command("scontrol", "update", f"JobId={job}", f"EndTime={in_seconds(60)}")
        with pytest.raises(NbkitError, match=rf"job {job} reaches its time limit at") as caught:
            handle.wait(timeout=PATIENCE)
    assert saved_step(str(caught.value), tmp_path / "saved") > 2
    assert f"job {job} reaches its time limit at" in shown.getvalue()
    assert "a training ends at its next step boundary, and is saved" in shown.getvalue()
    log = (cluster.entry.folder / "logs" / "coordinator.log").read_text()
    assert f"job {job} reaches its time limit at" in log
    assert slurm.jobs() == [f"{job} RUNNING"]  # the ranks and their variables exist until the limit
    assert set(cluster.run("trainer.step > 2").values.values()) == {True}
    assert_over(cluster, slurm, rf"job {job} reached its time limit")


@pytest.mark.long
def test_a_training_in_a_preempted_job_is_saved(slurm: SlurmNodes, tmp_path: Path) -> None:
    cluster, handle = training("low", tmp_path / "saved", partition="low", options=("--cpus-per-task=2",))
    other = slurm.command("sbatch", "--parsable", "-phigh", "-N2", "-c2", "-t1", "-o/dev/null", "--wrap=sleep 60")
    with pytest.raises(NbkitError) as caught:
        handle.wait(timeout=PATIENCE)
    assert saved_step(str(caught.value), tmp_path / "saved") > 2
    until(lambda: f"{other.strip()} RUNNING" in slurm.jobs())
    slurm.command("scancel", other.strip())
    assert_over(cluster, slurm, r"job \d+ (was|is) preempted by another job")


@pytest.mark.long
def test_a_training_goes_on_if_the_time_limit_is_extended(slurm: SlurmNodes, tmp_path: Path) -> None:
    cluster = Cluster.start(name="longer", on=SlurmRequest(2, nodes=2, cpu=True, time="30:00"), ttl=600)
    try:
        cluster.run(SETUP)
        job = job_of(slurm, "longer")
        log = cluster.entry.folder / "logs" / "coordinator.log"
        slurm.command("scontrol", "update", f"JobId={job}", f"EndTime={in_seconds(90)}")
        until(lambda: "reaches its time limit" in log.read_text())
        with pytest.raises(NbkitError, match="reaches its time limit"):
            cluster.run(f"trainer = made({str(tmp_path)!r}, 0)\ntrainer.fit(5)")
        slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=60")
        until(lambda: "there is time again" in log.read_text())
        assert cluster.run("trainer.fit(5); trainer.step").values == {0: 6, 1: 6}
    finally:
        cluster.stop()


def in_seconds(seconds: float) -> str:
    """Return the time `seconds` from now, in the form for scontrol."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def line(**changes: str) -> str:
    """Return scontrol's line about a job, with `changes` in its fields."""
    fields = {
        "JobId": "7",
        "JobName": "nbkit-demo",
        "JobState": "RUNNING",
        "Reason": "None",
        "Restarts": "0",
        "StartTime": "2026-03-02T10:00:00",
        "EndTime": "2026-03-02T14:00:00",
        "PreemptTime": "None",
        "NodeList": "n[1-2]",
        "Comment": "JobState=PENDING",
    }
    return " ".join(f"{name}={value}" for name, value in (fields | changes).items())


def test_the_reasons_for_the_end_of_a_job_are_distinguished() -> None:
    ends = time.mktime(time.strptime("2026-03-02T14:00:00", "%Y-%m-%dT%H:%M:%S"))
    limit = f"job 7 reaches its time limit {moment(ends)}"
    assert parsed("7", line()).seen(120) == LauncherStatus(
        "running", "job 7 runs on n[1-2]", ends - 120, limit, again=True
    )
    assert parsed("7", line()).seen(86400).save_at == ends - 3600  # a quarter of its time
    making_way = parsed("7", line(PreemptTime="2026-03-02T11:00:00")).seen(120)
    assert making_way.again and making_way.save_at == 0 and "is preempted by another job and ends" in making_way.why
    assert parsed("7", line(EndTime="Unknown")).seen(120).save_at == float("inf")
    ending = {
        "was cancelled": {},
        "reached its time limit": {"Reason": "TimeLimit"},
        "was preempted by another job": {"PreemptTime": "2026-03-02T11:00:00"},
    }
    for words, changes in ending.items():
        again = words != "was cancelled"  # a cancelled job must not start again
        seen = parsed("7", line(JobState="COMPLETING", **changes)).seen(120)
        assert seen == LauncherStatus("ending", f"job 7 {words}", again=again)
    over = {"CANCELLED": "was cancelled", "TIMEOUT": "reached its time limit", "PREEMPTED": "was preempted"}
    for state, words in over.items():
        seen = parsed("7", line(JobState=state)).seen(120)
        assert seen.state == "over" and words in seen.words and seen.again == (state != "CANCELLED")
    assert parsed("7", line(JobState="SIGNALING")).seen(120).state == "running"
    waits = parsed("7", line(JobState="PENDING", Reason="Resources", StartTime="Unknown")).seen(120)
    assert waits == LauncherStatus("pending", "job 7 is pending (Resources)")
