"""What the options of `%cluster start` ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbkit.errors import UsageError
from nbkit.notebook.cluster.hosts.allocation import allocation_here
from nbkit.notebook.cluster.hosts.request import Request, SlurmRequest, SshRequest
from nbkit.notebook.cluster.hosts.ssh import read_hosts


def requested(options: Any) -> Request | None:
    """The request for other hosts; None for a cluster on this machine. Raises UsageError for what does not fit."""
    of_slurm = {"--nodes": options.nodes, "--partition": options.partition, "--time": options.time}
    of_slurm["what follows --"] = options.rest
    if options.slurm and options.hosts:
        raise UsageError("Either Slurm or SSH starts the ranks.", numbers="--slurm and --hosts", hint="one of the two")
    for idle, value in of_slurm.items():
        if value and not options.slurm:
            raise UsageError(
                f"{idle} is for --slurm.", numbers=f"{idle} without it", hint="%cluster start --slurm -n 4"
            )
    if not options.slurm and not options.hosts and options.n is None and not options.gpus:
        if found := allocation_here():
            return replace(found, cpu=options.cpu, python=options.python)
    if not options.slurm and not options.hosts:
        if options.python:
            raise UsageError(
                "--python is for other hosts.", numbers=f"--python {options.python}", hint="--hosts or --slurm"
            )
        return None
    if options.gpus:
        raise UsageError(
            "On other hosts GPUs are not listed: a rank takes one that is idle.",
            numbers=f"--gpus {options.gpus}",
            hint="-n 4 --slurm   or   --hosts node1:4,node2:4   or   --cpu",
        )
    if options.hosts:
        hosts = read_hosts(options.hosts)
        total = sum(count for _, count in hosts)
        if options.n not in (None, total):
            raise UsageError(
                "--hosts says how many ranks there are.", numbers=f"-n {options.n}, --hosts {total}", hint="without -n"
            )
        return SshRequest(hosts, options.cpu, options.python)
    if options.n is None:
        raise UsageError("How many ranks shall Slurm start?", numbers="no -n", hint="%cluster start --slurm -n 4")
    return SlurmRequest(
        options.n, options.nodes, options.partition, options.time, options.cpu, options.rest, options.python
    )
