"""Ranks on the nodes of the Slurm allocation that the notebook itself runs in: agents are a step of that job."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts.launchers.agents_command import AgentsCommand
from nbkit.notebook.cluster.hosts.launchers.slurm_job_state import read_job
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.notebook.cluster.hosts.progress import Seen
from nbkit.notebook.cluster.hosts.start_request import AllocationRequest, SlurmRequest, agent_command


def allocation_here(environment: Mapping[str, str] = os.environ, spares: int = 0) -> AllocationRequest | None:
    """The allocation of several nodes that this process runs in: as many ranks on each as it has tasks there, or GPUs.

    spares: GPUs of each node that are left to no rank. None outside of one: on one node a notebook needs no launcher.
    Raises UsageError where spares leave no GPU.
    """
    job, tasks = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_TASKS_PER_NODE", "")
    counts = counts_of(tasks)
    if not job or len(counts) < 2:
        return None
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdigit() and int(gpus) and set(counts) == {1}:  # one task on each node: a job for a launcher like ours
        counts = (int(gpus),) * len(counts)
    if gpus.isdigit() and int(gpus) and spares:
        if spares >= int(gpus):
            raise UsageError(
                "Too few devices for the ranks and their spares.",
                numbers=f"--spares {spares}, {gpus} GPUs on each node of job {job}",
                hint=f"--spares {int(gpus) - 1}" if int(gpus) > 1 else "without --spares",
            )
        counts = tuple(min(count, int(gpus) - spares) for count in counts)
    return AllocationRequest(job, counts)


def counts_of(tasks: str) -> tuple[int, ...]:
    """The numbers in SLURM_TASKS_PER_NODE, "4(x2),2" being 4, 4 and 2."""
    found: list[int] = []
    for part in filter(None, tasks.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError("Slurm's tasks on each node cannot be read.", numbers=f"SLURM_TASKS_PER_NODE={tasks}")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


class AllocatedNodes(AgentsCommand):
    """The step of one cluster. A starter, see `request.Starter`."""

    def __init__(self, request: AllocationRequest, folder: Path) -> None:
        super().__init__(folder, "step.log")
        self.request, self.cpu, self.counts = request, request.cpu, request.counts
        self.address = address_towards(_node_addresses(request.job))

    def start(self, payload: str) -> None:
        """Start the step: it shares the nodes with whatever else of the job runs there. To end it leaves the job."""
        nodes = len(self.counts)
        asked = (f"--jobid={self.request.job}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}")
        kept = ("--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL")
        self.run(["srun", *asked, *kept, *agent_command(self.request)], payload)

    def look(self) -> Seen:
        """Whether the step runs."""
        if self.has_ended():
            return Seen("over", f"the step in job {self.request.job} has ended")
        running = Seen("running", f"in job {self.request.job}, which this notebook runs in")
        with suppress(ClusterError):  # Slurm itself is away for a moment
            job = read_job(self.request.job).seen(SlurmRequest.save_before)
            return job if job.state == "ending" else replace(running, save_at=job.save_at, why=job.why)
        return running


def _node_addresses(job: str) -> list[str]:
    try:
        nodes = _lines("squeue", "-h", "-j", job, "-o", "%N")
        return _lines("sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%o")
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f"Slurm does not say on which nodes job {job} runs.", numbers=str(error), hint="squeue   (in a terminal)"
        ) from None


def _lines(*words: str) -> list[str]:
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    return list(dict.fromkeys(done.stdout.split()))
