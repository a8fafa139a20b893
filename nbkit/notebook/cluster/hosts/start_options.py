"""Turn the options of `%cluster start` into a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbkit.errors import UsageError
from nbkit.notebook.cluster.hosts.launchers.mpi import nodes_of_job
from nbkit.notebook.cluster.hosts.launchers.slurm import allocation_here
from nbkit.notebook.cluster.hosts.launchers.ssh import read_hosts
from nbkit.notebook.cluster.hosts.start_request import (
    AllocationRequest,
    MpiRequest,
    PluginRequest,
    Request,
    SlurmRequest,
    SshRequest,
    with_spares,
)


def requested(options: Any) -> Request | None:
    """Return the request for other hosts; None for a cluster on this machine.

    Raises UsageError for options that do not fit together.
    """
    found = _requested(options)
    if found is not None:
        found = with_spares(found, options.spares)
    if not options.container:
        return found
    if found is None:
        raise UsageError(
            "--container is for other hosts.",
            numbers=f"--container {options.container!r}, and ranks of this machine",
            hint="--slurm -n 4   or   --hosts node1:4   beside it",
        )
    if options.container.startswith("-") and not isinstance(found, SlurmRequest | AllocationRequest):
        raise UsageError(
            "These are options of srun's, which starts nothing here.",
            numbers=f"--container {options.container!r} without --slurm",
            hint="--container 'apptainer exec torch.sif'",
        )
    return replace(found, container=options.container)


def _requested(options: Any) -> Request | None:
    of_slurm = {
        "--nodes": options.nodes,
        "--partition": options.partition,
        "--time": options.time,
        "--save-before": options.save_before,
        "--detach": options.detach,
        "--requeue": options.requeue,
    }
    if options.launcher:
        return _by_plugin(options, of_slurm)
    if options.slurm and (options.hosts or options.mpi):
        other = "--hosts" if options.hosts else "--mpi"
        raise UsageError(
            "Either Slurm or another starts the ranks.", numbers=f"--slurm and {other}", hint="one of them"
        )
    if options.rest and not options.slurm and not options.mpi:
        raise UsageError(
            "What follows -- is for --slurm, --mpi or --launcher.",
            numbers=" ".join(options.rest),
            hint="%cluster start --slurm -n 4   before it",
        )
    for idle, value in of_slurm.items():
        if value and not options.slurm:
            raise UsageError(
                f"{idle} is for --slurm.", numbers=f"{idle} without it", hint="%cluster start --slurm -n 4"
            )
    here = not (options.slurm or options.hosts or options.mpi)
    if here and options.n is None and not options.gpus:
        if found := allocation_here(spares=options.spares):
            return replace(found, cpu=options.cpu, python=options.python)
    if here:
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
    if options.mpi:
        return _over_mpi(options)
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
    asked = SlurmRequest(
        options.n, options.nodes, options.partition, options.time, options.cpu, options.rest, options.python,
        requeue=options.requeue,
    )  # fmt: skip
    return asked if options.save_before is None else replace(asked, save_before=options.save_before)


def _by_plugin(options: Any, of_slurm: dict[str, Any]) -> PluginRequest:
    """Return the request for a launcher from another package."""
    others = [name for name in ("slurm", "hosts", "mpi", "gpus") if getattr(options, name)]
    others += [name.removeprefix("--") for name, value in of_slurm.items() if value and name != "--nodes"]
    if others:
        raise UsageError(
            f"--{others[0]} is not for --launcher.",
            numbers=f"--launcher {options.launcher} and --{others[0]}",
            hint=f"%cluster start --launcher {options.launcher} -n 4 -- WORDS   hands the launcher words of its own",
        )
    if options.n is None:
        raise UsageError(
            f"How many ranks shall {options.launcher} start?",
            numbers="no -n",
            hint=f"%cluster start --launcher {options.launcher} -n 4",
        )
    return PluginRequest(options.launcher, options.n, options.nodes, options.cpu, tuple(options.rest), options.python)


def _over_mpi(options: Any) -> MpiRequest:
    """Return the request for mpirun, on the hosts of --hosts, of the surrounding batch job, or on this machine."""
    hosts = read_hosts(options.hosts) if options.hosts else nodes_of_job()
    total = sum(count for _, count in hosts)
    if not hosts and options.n is None:
        raise UsageError("How many ranks shall mpirun start?", numbers="no -n", hint="%cluster start --mpi -n 4")
    if hosts and options.n not in (None, total):
        if options.hosts or options.n % len(hosts):
            raise UsageError(
                "The hosts say how many ranks there are.",
                numbers=f"-n {options.n}; {', '.join(f'{name}:{count}' for name, count in hosts)}",
                hint="without -n",
            )
        hosts = tuple((name, options.n // len(hosts)) for name, _ in hosts)
    return MpiRequest(hosts or (("localhost", options.n),), options.cpu, options.rest, options.python)
