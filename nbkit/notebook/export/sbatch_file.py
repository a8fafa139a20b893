"""Write sbatch files. A script gets one task on each node, which runs torchrun. A notebook runs on one node.

With --requeue, Slurm signals the shell of the file before the time limit. The shell tells the ranks to save and end,
and requeues its job. Without the shell, Slurm would signal every process, and the signal kills most of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbkit.errors import ClusterError, UsageError
from nbkit.quoting import file_word, path_part, sbatch_option, shell_words
from nbkit.wire.cluster_end import END_SIGNALS
from nbkit.wire.user_code import OWN_MODULES

SIGNAL, SAVE_BEFORE = "USR2", 120
"""The signal that Slurm sends before the time limit, and how many seconds before. Ranks already use USR1."""
# The current interpreter, because a job's PATH may lead to another.
_PYTHON = shell_words(sys.executable)
OWN = " ".join(OWN_MODULES)


def add_slurm_options(parser: argparse.ArgumentParser, slurm: str, *, nodes: bool) -> None:
    """Add nbkit's options for sbatch to `parser`. slurm: the help text of --slurm."""
    parser.add_argument("--slurm", action="store_true", help=slurm)
    if nodes:
        parser.add_argument(
            "--nodes",
            type=int,
            metavar="N",
            help="for --slurm: number of nodes; default: as many as the notebook had hosts",
        )
        parser.add_argument(
            "-n",
            type=int,
            metavar="N",
            help="for --slurm: number of ranks on all nodes; default: each node has as many as a host of the notebook",
        )
    parser.add_argument(
        "--partition", default="", metavar="NAME", help="for --slurm: partition of the job; default: that of Slurm"
    )
    parser.add_argument("--time", default="", metavar="H:MM:SS", help="for --slurm: time limit of the job")
    parser.add_argument("--gpus", type=int, metavar="N", help="for --slurm: GPUs on each node")
    parser.add_argument("--cpus", type=int, metavar="N", help="for --slurm: cores on each node")
    parser.add_argument(
        "--requeue",
        action="store_true",
        help="for --slurm: if Slurm ends the job early, save the training and put the job back in the queue",
    )


@dataclass(frozen=True)
class SlurmOptions:
    """Options for sbatch. None and "" leave the choice to the cluster.

    gpus, cpus: number on each node. requeue: the job runs again later if its time limit or another job ends it.
    """

    nodes: int = 1
    partition: str = ""
    time: str = ""
    gpus: int | None = None
    cpus: int | None = None
    requeue: bool = False

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "cpus"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise UsageError(f"{name} is at least 1.", numbers=f"--{name} {count}", hint="--nodes 2 --gpus 8")

    def head(self, name: str) -> list[str]:
        """Return the first lines of the file of a job called `name`."""
        asked = {
            "job-name": path_part(name),
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self.cpus,
            "gpus-per-node": self.gpus,
            "partition": self.partition,
            "time": self.time,
            "output": log_of(name, "%j"),
        }
        lines = [sbatch_option(option, value) for option, value in asked.items() if value]
        if self.requeue:
            lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append", f"#SBATCH --signal=B:{SIGNAL}@{SAVE_BEFORE}"]
        return ["#!/bin/bash", *lines, ""]

    def step(self, command: Sequence[str]) -> list[str]:
        """Return the lines that run `command` on each node: its first words, then the rest on separate lines."""
        if not self.requeue:
            return _joined(["srun", *command])
        ignoring = f'srun bash -c \'trap "" {SIGNAL}; exec "$@"\' -'
        return [
            "# Slurm tells this script when its time is nearly over, and the script the ranks: they save, and end.",
            f"export {END_SIGNALS}={SIGNAL},TERM",
            "again=",
            f"trap 'again=yes; scancel --signal={SIGNAL} \"$SLURM_JOB_ID\"' {SIGNAL}",
            *_joined([ignoring, *command[:-1], f"{command[-1]} &"]),
            "while true; do wait $!; code=$?; kill -0 $! 2>/dev/null || break; done",
            'if scontrol show job "$SLURM_JOB_ID" | grep -q "PreemptTime=[0-9]"; then again=yes; fi',
            'if [ $code -ne 0 ] && [ -n "$again" ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            "exit $code",
        ]


def log_of(name: str, job: str) -> str:
    """Return the path of the output of a job called `name`."""
    return f"{path_part(name)}-{job}.log"


def _joined(words: Sequence[str]) -> list[str]:
    first, *rest = words
    head = [f"{first} {rest[0]}", *(f"    {line}" for line in rest[1:])]
    return [f"{line} \\" for line in head[:-1]] + head[-1:]


def check_resumes(source: str, options: SlurmOptions) -> None:
    """Raise UsageError if a job is to be requeued but nothing in its `source` resumes a training."""
    if options.requeue and "resume=" not in source:
        raise UsageError(
            "When the job runs again, no cell loads its checkpoint.",
            numbers="--requeue, and no fit(resume=...) in a cell",
            hint='trainer.fit(until=1000, resume="auto")',
        )


def script_job(script: str, name: str, ranks: int, options: SlurmOptions) -> str:
    """Return a job that starts `script` with `ranks` ranks per node. Words after the file's name go to the script."""
    return "\n".join(
        [
            *options.head(name),
            "# One task on each node; torchrun starts the ranks of that node, and they meet on the first one.",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 20000))",
            *options.step(
                [
                    f"{_PYTHON} {OWN} torch.distributed.run",
                    f'--nnodes "$SLURM_NNODES" --nproc-per-node {ranks}',
                    '--rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:$port"',
                    f'{shell_words(file_word(script))} "$@"',
                ]
            ),
            "",
        ]
    )


def notebook_job(notebook: str, name: str, arguments: Sequence[str], options: SlurmOptions) -> str:
    """Return a job that runs a notebook and its cluster on one node.

    arguments: of `nbkit submit`. They may use $SLURM_JOB_ID.
    """
    words = " ".join([shell_words(file_word(notebook)), *arguments])
    return "\n".join([*options.head(name), *options.step([f"{_PYTHON} {OWN} nbkit submit {words}"]), ""])


def submit_job(file: Path) -> str:
    """Pass `file` to sbatch and return the job's number.

    Raises UsageError without sbatch, ClusterError if it refuses.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable", file_word(file)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError(
            "There is no sbatch on this machine.",
            numbers=f"{file} is written",
            hint="nbkit submit notebook.ipynb   here, or with --slurm where Slurm is",
        ) from None
    if done.returncode:
        raise ClusterError("Slurm has refused the job.", numbers=done.stderr.strip(), hint="sinfo, and --partition")
    return done.stdout.strip().partition(";")[0]
