"""Ranks in a Slurm job: the number of nodes, the job's script, and the job's state.

srun starts one task, the agent, on each node. The end of a rank or an agent does not end the job.

`scontrol show job` tells the state of a job, and when and why it will end. The job's environment has an end time too,
but it is from the start of the job, and a limit can be changed and a job can be preempted.

`AllocationLauncher` runs ranks in the Slurm allocation of the notebook itself: the agents are a step of that job.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts.launcher import Launcher, LauncherStatus, NodesRequest, StartRequest
from nbkit.notebook.cluster.hosts.network import address_towards
from nbkit.quoting import shell_words, slurm_file

_COMMAND_SECONDS = 30.0
_ENDS = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit",
    "PREEMPTED": "was preempted by another job",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "FAILED": "failed",
    "BOOT_FAIL": "lost a node that did not start",
    "DEADLINE": "was ended at its deadline",
    "REVOKED": "was moved to another cluster",
    "COMPLETED": "has ended",
}
_SLURM_ENDS = ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL")
"""End states that neither a user nor the job's program has caused."""
_ABSENT = ("", "None", "N/A", "Unknown", "(null)")


@dataclass(frozen=True)
class SlurmRequest(NodesRequest):
    """`n` ranks in a Slurm job. options: options of sbatch, passed unchanged.

    nodes: None: as few as possible. partition, time: "" leaves the choice to Slurm. save_before: a training is saved,
    and ends, this many seconds before the end of the job, but at most a quarter of the job's time before it. requeue:
    if Slurm takes the hosts away during a training, request others.
    """

    kind: ClassVar[str] = "slurm"

    n: int
    nodes: int | None = None
    partition: str = ""
    time: str = ""
    save_before: float = 120.0
    requeue: bool = False


@dataclass(frozen=True)
class AllocationRequest(StartRequest):
    """Ranks on the nodes of the running Slurm job. counts: number of ranks on each node."""

    kind: ClassVar[str] = "step"

    job: str
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "counts", tuple(self.counts))

    @property
    def ranks_of_hosts(self) -> tuple[int, ...]:
        return self.counts


@dataclass(frozen=True)
class JobState:
    """The state of a Slurm job.

    state: Slurm's name of the state. begins, ends, preempted_at: times as time.time(), None if Slurm does not tell.
    restarts: how often the job was requeued. nodes: its nodes, in Slurm's notation.
    """

    job: str
    state: str
    reason: str = "None"
    begins: float | None = None
    ends: float | None = None
    preempted_at: float | None = None
    restarts: int = 0
    nodes: str = ""

    @property
    def seconds(self) -> float:
        """Return the seconds from its start to its end; inf if it has no end."""
        if self.begins is None or self.ends is None:
            return float("inf")
        return self.ends - self.begins

    def seen(self, save_before: float) -> LauncherStatus:
        """Return the job's state as a LauncherStatus. save_before: see SlurmRequest."""
        name = f"job {self.job}"
        if self.state == "PENDING":
            expected = f", expected to start {moment(self.begins)}" if self.begins is not None else ""
            return LauncherStatus("pending", f"{name} is pending ({self.reason}){expected}")
        if self.state == "COMPLETING":  # the final state is not known yet
            return self._ended("ending", self._how_it_ends())
        if self.state not in _ENDS:  # RUNNING, or a temporary state: CONFIGURING, SIGNALING, SUSPENDED
            words = f"{name} runs on {self.nodes}"
            if self.ends is None:
                return LauncherStatus("running", words)
            if self.preempted_at:
                why = f"{name} is preempted by another job and ends {moment(self.ends)}"
                return LauncherStatus("running", words, 0.0, why, again=True)
            save_at = self.ends - min(save_before, self.seconds / 4)
            return LauncherStatus(
                "running", words, save_at, f"{name} reaches its time limit {moment(self.ends)}", again=True
            )
        if self.preempted_at and self.state == "COMPLETED":  # it ended in time before the preemption
            return self._ended("over", "PREEMPTED")
        return self._ended("over", self.state)

    def _ended(self, state: Literal["ending", "over"], how: str) -> LauncherStatus:
        return LauncherStatus(state, f"job {self.job} {_ENDS[how]}", again=how in _SLURM_ENDS)

    def _how_it_ends(self) -> str:
        if self.preempted_at:
            return "PREEMPTED"
        return "TIMEOUT" if self.reason == "TimeLimit" else "CANCELLED"


def read_job(job: str) -> JobState:
    """Return the state of `job`. A job that Slurm has forgotten has ended.

    Raises ClusterError if Slurm does not answer.
    """
    words = ("scontrol", "--oneliner", "show", "job", job)
    try:
        try:
            text = answer(*words)
        except ClusterError as error:
            if "Invalid job id" in error.numbers:
                raise
            time.sleep(0.2)  # a busy Slurm refuses connections for a moment
            text = answer(*words)
    except ClusterError as error:
        if "Invalid job id" not in error.numbers:
            raise
        return JobState(job, "COMPLETED")
    return parsed(job, text)


def parsed(job: str, text: str) -> JobState:
    """Return the state in one line of `scontrol --oneliner show job`."""
    fields: dict[str, str] = {}
    for name, value in re.findall(r"(\w+)=(\S*)", text):
        fields.setdefault(name, value)  # the first value counts: a comment, which comes later, may contain anything
    return JobState(
        job,
        fields.get("JobState", "COMPLETED"),
        fields.get("Reason", "None"),
        _seconds(fields.get("StartTime", "")),
        _seconds(fields.get("EndTime", "")),
        _seconds(fields.get("PreemptTime", "")),
        int(fields.get("Restarts", "0")),
        fields.get("NodeList", ""),
    )


def _seconds(text: str) -> float | None:
    return None if text in _ABSENT else time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def moment(seconds: float) -> str:
    """Return a time as text, with the day only if it is not today. seconds: as time.time()."""
    when = time.localtime(seconds)
    clock = time.strftime("%H:%M:%S", when)
    today = when[:3] == time.localtime()[:3]
    return f"at {clock}" if today else f"on {time.strftime('%Y-%m-%d', when)} at {clock}"


def answer(*words: str) -> str:
    """Return the output of a Slurm command. Raises ClusterError if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        done = subprocess.CompletedProcess(words, 1, "", str(error))
    if done.returncode:
        raise ClusterError(
            "Slurm does not answer.", numbers=f"{words[0]}: {' '.join(done.stderr.split())}", hint="sinfo"
        )
    return done.stdout


@dataclass(frozen=True)
class Node:
    """A node of a partition. address: the address that Slurm's own daemons use."""

    name: str
    partition: str
    is_default: bool
    cpus: int
    gpus: int
    address: str


@dataclass(frozen=True)
class Size:
    """The size of a job: `nodes`, each with the same number of ranks.

    cpus, gpus: number on each node, for ranks and spares.
    """

    nodes: int
    ranks: int
    cpus: int
    gpus: int


def read_nodes() -> list[Node]:
    """Return the nodes that `sinfo` lists. Raises UsageError without Slurm, ClusterError if it does not answer."""
    if not shutil.which("sbatch"):
        raise UsageError(
            "There is no sbatch on this machine.",
            numbers="none of Slurm's commands is in PATH",
            hint="%cluster start --slurm   on a login node;   %cluster start -n 2   here",
        )
    lines = answer("sinfo", "-h", "-N", "-o", "%N|%P|%c|%G|%o").splitlines()
    return [_node(line.strip()) for line in lines if line.strip()]


def _node(line: str) -> Node:
    name, partition, cpus, gres, address = line.split("|")
    return Node(name, partition.rstrip("*"), partition.endswith("*"), int(cpus.rstrip("+")), _gpus(gres), address)


def _gpus(gres: str) -> int:
    """Return the number of GPUs in "gpu:a100:4(S:0-1),shard:8"."""
    total = 0
    for one in gres.split(","):
        kind, *rest = one.split("(")[0].split(":")
        if kind == "gpu" and rest:
            total += int(rest[-1]) if rest[-1].isdigit() else 1
    return total


def size_of(request: SlurmRequest, nodes: Sequence[Node]) -> tuple[Size, list[Node]]:
    """Return the size of the request's job, and the nodes that exist.

    Raises UsageError, with a request that would fit, if the partition does not exist or is too small.
    """
    default = {node.partition for node in nodes if node.is_default}
    named = request.partition or next(iter(default), "")
    there = [node for node in nodes if node.partition == named]
    if not there:
        known = sorted({node.partition for node in nodes}, key=lambda name: (name not in default, name))
        raise UsageError(
            f"Slurm has no partition called {named!r}." if named else "Slurm has no default partition.",
            numbers=f"partitions: {', '.join(known) or 'none'}",
            hint=f"--partition {known[0]}" if known else "sinfo   (in a terminal)",
        )
    unit = "CPU" if request.cpu or not any(node.gpus for node in there) else "GPU"
    sizes = sorted((_room(node, unit) - request.spares for node in there), reverse=True)
    count = request.nodes if request.nodes is not None else _fewest(request.n, sizes)
    if count is None or count > len(sizes) or request.n > count * sizes[count - 1] or request.n % count:
        raise _too_large(request, named, unit, sizes, count)
    ranks = request.n // count
    devices = ranks + request.spares
    able = [node for node in there if _room(node, unit) >= devices]
    share = min(node.cpus // node.gpus for node in able) if unit == "GPU" else 1
    return Size(count, ranks, devices * max(1, share), devices if unit == "GPU" else 0), able


def _room(node: Node, unit: str) -> int:
    return node.cpus if unit == "CPU" else node.gpus


def _fewest(n: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest number of nodes for `n` ranks, with the same number on each."""
    return next((k for k in range(1, len(sizes) + 1) if n % k == 0 and n // k <= sizes[k - 1]), None)


def _too_large(request: SlurmRequest, named: str, unit: str, sizes: Sequence[int], count: int | None) -> UsageError:
    """Return the error for a request that does not fit. sizes: ranks that fit on each node beside the spares."""
    spares = request.spares
    if sizes[0] < 1:
        return UsageError(
            "Too few devices for the ranks and their spares.",
            numbers=f"--spares {spares} on each node; the nodes of {named} have at most {sizes[0] + spares} {unit}s",
            hint=f"--spares {sizes[0] + spares - 1}" if sizes[0] + spares > 1 else "without --spares",
        )
    if count is not None and count <= len(sizes) and request.n % count:
        what = f"{request.n} ranks cannot be spread evenly over {count} nodes."
    elif count is None or count > len(sizes):
        what = f"The partition {named} is too small for {request.n} ranks."
    else:
        what = f"The nodes of the partition {named} have fewer than {request.n // count} {unit}s."
    most = max(k * sizes[k - 1] for k in range(1, len(sizes) + 1))
    fits = [k for k in range(1, len(sizes) + 1) if request.n % k == 0 and request.n // k <= sizes[k - 1]]
    on = "" if request.nodes is None else f" on {request.nodes} node{'s' * (request.nodes > 1)}"
    kept = f" --spares {spares}" * (spares > 0)
    ways = [f"-n {request.n} --nodes {fits[0]}{kept}"] if fits else []
    ways += [f"-n {most} --nodes {next(k for k in range(1, len(sizes) + 1) if k * sizes[k - 1] == most)}{kept}"]
    return UsageError(
        what,
        numbers=f"-n {request.n}{on}; {named} has {len(sizes)} node{'s' * (len(sizes) != 1)} of {sizes[-1] + spares}"
        + (f" to {sizes[0] + spares}" if sizes[0] > sizes[-1] else "")
        + f" {unit}s"
        + (f", {spares} of each spare" if spares else ""),
        hint="   or   ".join(dict.fromkeys(ways)),
    )


class SlurmLauncher(Launcher):
    """Submits a Slurm job with one task, the agent, on each node."""

    name, flag, request_type = "slurm", "--slurm", SlurmRequest
    own_options = ("nodes", "partition", "time", "save_before", "detach", "requeue", "rest")
    request: SlurmRequest

    def __init__(self, request: SlurmRequest, folder: Path) -> None:
        super().__init__(request, folder)
        self.job, self._is_over = "", False
        self.size, self._nodes = size_of(request, read_nodes())
        self._restarts: int | None = None  # at its first run

    @classmethod
    def request_of(cls, options: Any) -> SlurmRequest:
        if options.n is None:
            raise UsageError("How many ranks shall Slurm start?", numbers="no -n", hint="%cluster start --slurm -n 4")
        more = {} if options.save_before is None else {"save_before": options.save_before}
        return SlurmRequest(options.n, options.nodes, options.partition, options.time, requeue=options.requeue, **more)

    @property
    def ranks_of_hosts(self) -> tuple[int, ...]:
        return (self.size.ranks,) * self.size.nodes

    def address(self) -> str:
        return address_towards([node.address for node in self._nodes][: self.size.nodes])

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Submit the job. Raises ClusterError, with sbatch's message, if it is refused."""
        done = subprocess.run(
            ["sbatch", "--parsable", *self._words(), *self.options],
            input=_script(command),
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ClusterError(
                "Slurm has refused the job.",
                numbers=" ".join(done.stderr.split()),
                hint="sinfo   in a terminal lists the partitions; options of sbatch come last, after   --",
            )
        self.job = done.stdout.strip().partition(";")[0]

    def _words(self) -> list[str]:
        asked = {
            "job-name": f"nbkit-{self.folder.name}",
            "nodes": self.size.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self.size.cpus,
            "gpus-per-node": self.size.gpus,
            "partition": self.request.partition,
            "time": self.request.time,
            "output": slurm_file(self.folder / "logs" / "launcher.log"),
            "export": "ALL",
        }
        return [f"--{option}={value}" for option, value in asked.items() if value]

    def poll(self) -> LauncherStatus:
        """Return the state of the job. Raises ClusterError if Slurm does not answer."""
        state = read_job(self.job)
        status = state.seen(self.request.save_before)
        if self._restarts is None and status.state == "running":
            self._restarts = state.restarts
        elif self._restarts is not None and state.restarts > self._restarts:
            # The ranks of a requeued job have not run this cluster's cells.
            self.stop()
            status = LauncherStatus("over", f"job {self.job} was put back in the queue", again=True)
        self._is_over = status.state == "over"
        return status

    def stop(self) -> None:
        if self.job and not self._is_over:
            with suppress(ClusterError):
                answer("scancel", self.job)


def _script(command: Sequence[str]) -> str:
    # In some releases srun does not use the job's --cpus-per-task.
    return (
        "#!/bin/sh\n"
        'exec srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" '
        f"{shell_words(*command)}\n"
    )


def allocation_here(environment: Mapping[str, str] = os.environ, spares: int = 0) -> AllocationRequest | None:
    """Return the allocation of several nodes that this process runs in, or None.

    Each node gets a rank for each task of the allocation there, or for each GPU. spares: number of GPUs on each node
    without a rank. For a single node return None, because no launcher is needed. Raises UsageError if spares leave no
    GPU.
    """
    job, tasks = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_TASKS_PER_NODE", "")
    counts = counts_of(tasks)
    if not job or len(counts) < 2:
        return None
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdigit() and int(gpus) and set(counts) == {1}:  # one task on each node, as for a launcher
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
    """Return the numbers in SLURM_TASKS_PER_NODE: "4(x2),2" -> (4, 4, 2)."""
    found: list[int] = []
    for part in filter(None, tasks.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError("Slurm's tasks on each node cannot be read.", numbers=f"SLURM_TASKS_PER_NODE={tasks}")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


class AllocationLauncher(Launcher):
    """Starts the agents as a step of the Slurm job in which the notebook runs. It never ends the job."""

    name, own_options, request_type = "step", (), AllocationRequest
    request: AllocationRequest

    @classmethod
    def request_of(cls, options: Any) -> AllocationRequest:
        if (found := allocation_here(spares=options.spares)) is None:
            raise UsageError(
                "This notebook does not run in a Slurm allocation of several nodes.",
                numbers=f"SLURM_JOB_ID={os.environ.get('SLURM_JOB_ID', '')}",
                hint="%cluster start --slurm -n 4",
            )
        return found

    def address(self) -> str:
        return address_towards(_node_addresses(self.request.job))

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        asked = (f"--jobid={self.request.job}", "--overlap", f"--nodes={self.nodes}", f"--ntasks={self.nodes}")
        kept = ("--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL")
        self.run(["srun", *asked, *kept, *command], environment)

    def poll(self) -> LauncherStatus:
        """Return the state of the step, and when its job ends."""
        if super().poll():
            return LauncherStatus("over", f"the step in job {self.request.job} has ended")
        running = LauncherStatus("running", f"in job {self.request.job}, which this notebook runs in")
        with suppress(ClusterError):  # Slurm does not answer for a moment
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
