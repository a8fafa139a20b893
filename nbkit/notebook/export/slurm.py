"""The sbatch files: one for a script, with one task on each node and torchrun in it; one for a notebook."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass

from nbkit.errors import UsageError


def add_slurm_options(parser: argparse.ArgumentParser, slurm: str, *, nodes: bool) -> None:
    """The options of sbatch that are asked for by name. slurm: the help of --slurm."""
    parser.add_argument("--slurm", action="store_true", help=slurm)
    if nodes:
        parser.add_argument("--nodes", type=int, default=1, metavar="N", help="for --slurm: how many (1)")
    parser.add_argument("--partition", default="", metavar="NAME", help="for --slurm: default: the cluster's own")
    parser.add_argument("--time", default="", metavar="H:MM:SS", help="for --slurm: after so long the job is ended")
    parser.add_argument("--gpus", type=int, metavar="N", help="for --slurm: on each node")


@dataclass(frozen=True)
class SlurmOptions:
    """What sbatch is asked for. gpus: on each node; None: not said. partition, time: "" leaves it to the cluster."""

    nodes: int = 1
    partition: str = ""
    time: str = ""
    gpus: int | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise UsageError(f"{name} is at least 1.", numbers=f"--{name} {count}", hint="--nodes 2 --gpus 8")

    def lines(self, name: str, tasks: str) -> list[str]:
        """The head of the file. tasks: the lines of what each node runs."""
        asked = [
            ("job-name", name),
            ("nodes", str(self.nodes)),
            ("ntasks-per-node", "1"),
            ("partition", self.partition),
            ("time", self.time),
            ("gpus-per-node", str(self.gpus or "")),
        ]
        lines = ["#!/bin/bash", *(f"#SBATCH --{option}={value}" for option, value in asked if value)]
        return [*lines, *([tasks] if tasks else []), f"#SBATCH --output={name}-%j.log"]


def script_job(script: str, name: str, ranks: int, options: SlurmOptions, *, threads: int = 0) -> str:
    """Starts `script` with so many ranks on each node; what follows the file's name in sbatch are its arguments."""
    cores = f"#SBATCH --cpus-per-task={ranks * threads}" if threads and options.gpus is None else ""
    return "\n".join(
        [
            *options.lines(name, cores),
            "",
            "# One task on each node; torchrun starts the ranks of that node, and they meet on the first one.",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 20000))",
            f"srun {shlex.quote(sys.executable)} -m torch.distributed.run \\",
            f'    --nnodes "$SLURM_NNODES" --nproc-per-node {ranks} \\',
            '    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:$port" \\',
            f'    {shlex.quote(script)} "$@"',
            "",
        ]
    )
