"""Test the parts that only Slurm has: the queue and requests that Slurm refuses. No job is left in the queue."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from slurm_nodes import SlurmNodes
from waiting import until

from nbkit import Cluster, job_folder
from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.hosts import progress
from nbkit.notebook.cluster.hosts.launchers.slurm import (
    AllocationRequest,
    Node,
    SlurmRequest,
    allocation_here,
    counts_of,
    size_of,
)

GPU_NODES = [Node(f"g{i}", "gpu", True, 32, 4, "10.0.0.1") for i in range(3)]


@dataclass
class Starting:
    """A start in a thread, because it waits in the queue."""

    request: SlurmRequest
    raised: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        try:
            Cluster.start(name="queued", on=self.request)
        except BaseException as error:
            self.raised.append(error)


@pytest.mark.long
def test_stop_leaves_no_job_in_the_queue(slurm: SlurmNodes) -> None:
    cluster = Cluster.start(name="short", on=SlurmRequest(1, partition="small", cpu=True, options=("--comment=mine",)))
    assert cluster.run("dist.get_world_size()").values == {0: 1}
    assert slurm.command("squeue", "-h", "-o", "%j %P %D %C").split("\n")[0] == "nbkit-short small 1 1"
    cluster.stop()
    until(lambda: not slurm.jobs(), 10)
    assert registry.find("short") is None


@pytest.mark.long
def test_a_waiting_job_says_why_and_its_cancellation_is_an_error(slurm: SlurmNodes, nbkit_home: Path) -> None:
    other = slurm.command(
        "sbatch", "--parsable", "-N2", "-c2", "--time=1", "--output=/dev/null", "--wrap=sleep 60"
    ).strip()
    starting = Starting(SlurmRequest(2, nodes=2, cpu=True))
    thread = threading.Thread(target=starting.run)
    thread.start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = progress.read(nbkit_home / "queued")
        if state and re.search(r"is pending \((Resources|Priority)\), expected to start (at|on)", state.words):
            break
        time.sleep(0.05)
    assert state is not None
    assert "expected to start" in state.words
    slurm.command("scancel", state.words.split()[1])
    thread.join(30)
    assert isinstance(starting.raised[0], ClusterError)
    assert "was cancelled before the cluster was ready" in str(starting.raised[0])
    assert registry.find("queued") is None
    slurm.command("scancel", other)


@pytest.mark.long
def test_a_waiting_job_is_cancelled_when_its_notebook_ends(slurm: SlurmNodes, nbkit_home: Path) -> None:
    slurm.command("sbatch", "-N2", "-c2", "--time=1", "--output=/dev/null", "--wrap=sleep 60")
    start = "Cluster.start(name='orphan', on=SlurmRequest(2, nodes=2, cpu=True))"
    source = "from nbkit import Cluster\nfrom nbkit.notebook.cluster.hosts.launchers.slurm import SlurmRequest\n"
    notebook = subprocess.Popen([sys.executable, "-c", source + start], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    mine = ("squeue", "-h", "-n", "nbkit-orphan", "-o", "%T")
    while not slurm.command(*mine) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert slurm.command(*mine) == "PENDING\n"
    entry = registry.find("orphan")
    assert entry is not None
    notebook.kill()
    notebook.wait()
    while (slurm.command(*mine) or entry.left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert slurm.command(*mine) == ""
    assert entry.left() == []
    registry.end(entry)
    slurm.command("scancel", "-u", "root")
    while slurm.jobs() and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.long
def test_a_notebook_uses_the_nodes_of_its_allocation_and_does_not_end_them(slurm: SlurmNodes) -> None:
    job = slurm.command("sbatch", "--parsable", "-N2", "-n2", "-c1", "--output=/dev/null", "--wrap=sleep 300").strip()
    while slurm.jobs() != [f"{job} RUNNING"]:
        time.sleep(0.1)
    found = allocation_here({"SLURM_JOB_ID": job, "SLURM_TASKS_PER_NODE": "1(x2)"})
    assert found is not None
    cluster = Cluster.start(name="step", on=replace(found, cpu=True))
    cell = "import os\nx = torch.ones(1); dist.all_reduce(x); [int(x), os.environ['SLURMD_NODENAME']]"
    assert cluster.run(cell).values == {0: [2, "n1"], 1: [2, "n2"]}
    cluster.stop()
    assert slurm.jobs() == [f"{job} RUNNING"]
    slurm.command("scancel", job)


UNDER_SRUN = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
rank, size, stop = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]), pathlib.Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=rank, world_size=size)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
while rank == 1 and not stop.exists():
    time.sleep(0.02)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.long
def test_a_program_under_srun_listens_and_answers_on_its_node(slurm: SlurmNodes, tmp_path: Path) -> None:
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(UNDER_SRUN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nbkit = (sys.executable, "-m", "nbkit")
    srun = ("srun", "-N1", "-n2", "--job-name=listens", sys.executable, str(script), str(port), str(stop))
    program = subprocess.Popen([*nbkit, "run", "--job", "mine", *srun])
    try:
        until(lambda: len(job_folder.ranks_in(job_folder.folder_of("mine"))) == 2, 60)
        job, node = slurm.command("squeue", "-h", "-n", "listens", "-o", "%i %N").split()

        def asked(*words: str) -> str:
            return slurm.command("srun", "--overlap", f"--jobid={job}", f"--nodelist={node}", "-n1", *nbkit, *words)

        line = next(number for number, text in enumerate(UNDER_SRUN.splitlines(), 1) if "sleep(" in text)
        stands = f"rank 1 is in time.sleep, train.py line {line}"
        until(
            lambda: re.search(rf"Rank 0 waits in all_reduce #\d+ on world .*{stands}", asked("why", "--job", "mine")),
            60,
        )
        assert "step 10" in asked("watch", "mine", "--once")
    finally:
        stop.touch()
        assert program.wait(60) == 0
    assert slurm.jobs() == []


def test_the_tasks_of_an_allocation_are_its_ranks() -> None:
    assert counts_of("4(x2),2") == (4, 4, 2)
    of_one_node = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "4"}
    assert allocation_here(of_one_node) is None  # ranks on one node start as on any machine
    one_task = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "4"}
    assert allocation_here(one_task) == AllocationRequest("7", (4, 4))
    assert allocation_here(one_task, 1) == AllocationRequest("7", (3, 3))
    with pytest.raises(UsageError, match="Too few devices for the ranks and their spares") as caught:
        allocation_here(one_task, 4)
    assert caught.value.hint == "--spares 3"


def test_a_refusal_of_sbatch_is_quoted(slurm: SlurmNodes) -> None:
    with pytest.raises(ClusterError, match="Slurm has refused the job") as caught:
        Cluster.start(name="refused", on=SlurmRequest(1, cpu=True, options=("--account", "x", "--no-such-option")))
    assert "no-such-option" in caught.value.numbers
    assert registry.find("refused") is None


def test_an_unknown_partition_and_too_many_ranks_name_what_exists(slurm: SlurmNodes) -> None:
    with pytest.raises(UsageError, match="no partition called 'gpus'") as caught:
        Cluster.start(on=SlurmRequest(2, partition="gpus"))
    assert caught.value.numbers == "partitions: debug, gpu, high, low, small, wide"
    with pytest.raises(UsageError, match="fewer than 4 CPUs") as caught:
        Cluster.start(on=SlurmRequest(4, nodes=1))
    assert caught.value.numbers == "-n 4 on 1 node; debug has 2 nodes of 2 CPUs"
    assert caught.value.hint == "-n 4 --nodes 2"
    with pytest.raises(UsageError, match="debug is too small for 16 ranks") as caught:
        Cluster.start(on=SlurmRequest(16))
    assert caught.value.hint == "-n 4 --nodes 2"


def test_missing_slurm_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no sbatch on this machine"):
        Cluster.start(on=SlurmRequest(2))


def test_a_rank_gets_a_gpu_and_its_share_of_the_cpus() -> None:
    size, _ = size_of(SlurmRequest(8), GPU_NODES)
    assert (size.nodes, size.ranks, size.gpus, size.cpus) == (2, 4, 4, 32)
    size, _ = size_of(SlurmRequest(6, nodes=3, cpu=True), GPU_NODES)
    assert (size.nodes, size.ranks, size.gpus, size.cpus) == (3, 2, 0, 2)


def test_spares_of_a_node_are_requested_with_its_ranks() -> None:
    size, _ = size_of(SlurmRequest(6, spares=1), GPU_NODES)
    assert (size.nodes, size.ranks, size.gpus, size.cpus) == (2, 3, 4, 32)
    with pytest.raises(UsageError, match="fewer than 4 GPUs") as caught:
        size_of(SlurmRequest(4, nodes=1, spares=1), GPU_NODES)
    assert "4 GPUs, 1 of each spare" in caught.value.numbers
    assert caught.value.hint.startswith("-n 4 --nodes 2 --spares 1")
    with pytest.raises(UsageError, match="Too few devices for the ranks and their spares") as caught:
        size_of(SlurmRequest(4, spares=4), GPU_NODES)
    assert caught.value.hint == "--spares 3"
