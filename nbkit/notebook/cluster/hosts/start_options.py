"""Turn the options of `%cluster start` into a request."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from typing import Any

from nbkit.errors import UsageError
from nbkit.notebook.cluster import site_settings
from nbkit.notebook.cluster.hosts.launcher import Launcher, StartRequest, built_in, launcher_class
from nbkit.notebook.cluster.hosts.launchers.slurm import AllocationRequest, SlurmRequest, allocation_here

# The options that not every launcher has, as they are typed: see `Launcher.own_options`.
_OWN = {
    "hosts": "--hosts",
    "nodes": "--nodes",
    "partition": "--partition",
    "time": "--time",
    "save_before": "--save-before",
    "detach": "--detach",
    "requeue": "--requeue",
    "rest": "What follows --",
}


def add_place_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `%cluster start` that say where ranks run, and how they get there."""
    parser.add_argument("--cpu", action="store_true", help="make CPU ranks, even if there are GPUs")
    parser.add_argument(
        "--hosts",
        default="",
        metavar="node1:4,node2:4",
        help="start ranks on these hosts over SSH; also a file with one host per line",
    )
    parser.add_argument(
        "--on",
        default="",
        metavar="NAME",
        help="use the options of this name in [clusters] of nbkit.toml; options typed here replace them",
    )
    parser.add_argument("--slurm", action="store_true", help="start ranks in a Slurm job; see docs/reference/slurm.md")
    parser.add_argument(
        "--mpi",
        action="store_true",
        help="start ranks with mpirun: on --hosts, on the hosts of a batch job, or on this machine",
    )
    parser.add_argument(
        "--launcher",
        default="",
        metavar="NAME",
        help="name of a launcher: lsf, pbs, sge, or your own; see docs/reference/launchers.md",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="number of hosts; default: with --slurm as few as possible, with --launcher one",
    )
    parser.add_argument(
        "--partition", default="", metavar="NAME", help="for --slurm: partition of the job; default: that of Slurm"
    )
    parser.add_argument("--time", default="", metavar="H:MM:SS", help="for --slurm: time limit of the job")
    parser.add_argument(
        "--python", default="", metavar="PATH", help="path of Python on the other hosts; default: the notebook's"
    )
    parser.add_argument(
        "--container",
        default="",
        metavar="WORDS",
        help="run ranks on other hosts in a container: 'apptainer exec --nv torch.sif'; see docs/reference/clusters.md",
    )


def with_kept_options(options: Any) -> None:
    """Set in `options` what the line `options.on` of nbkit.toml says and nobody has typed."""
    if not options.on:
        return
    parser = argparse.ArgumentParser(prog=f"--on {options.on}", add_help=False)
    parser.add_argument("-n", type=int)
    add_place_options(parser)
    kept, _, rest = site_settings.read().options_of(options.on).partition(" -- ")
    usual = parser.parse_args([])
    for key, value in vars(parser.parse_args(shlex.split(kept, comments=True))).items():
        if getattr(options, key) == getattr(usual, key):
            setattr(options, key, value)
    options.rest = (*shlex.split(rest, comments=True), *options.rest)


def requested(options: Any) -> StartRequest | None:
    """Return the request for other hosts; None for a cluster on this machine.

    Raises UsageError for options that do not fit together.
    """
    launcher = _chosen(options)
    _check_own_options(options, launcher)
    found: StartRequest | None = None
    if launcher is None:
        if options.n is None and not options.gpus:
            found = allocation_here(spares=options.spares)
    elif options.gpus:
        raise UsageError(
            "On other hosts GPUs are not listed: a rank takes one that is idle.",
            numbers=f"--gpus {options.gpus}",
            hint="-n 4 --slurm   or   --hosts node1:4,node2:4   or   --cpu",
        )
    else:
        found = launcher.request_of(options)
    if found is None:
        _check_here(options)
        return None
    if options.container.startswith("-") and not isinstance(found, SlurmRequest | AllocationRequest):
        raise UsageError(
            "These are options of srun, which does not start these ranks.",
            numbers=f"--container {options.container!r} without --slurm",
            hint="--container 'apptainer exec torch.sif'",
        )
    common = {key: getattr(options, key) for key in ("cpu", "python", "container", "spares")}
    return replace(found, options=options.rest, **common)


def _chosen(options: Any) -> type[Launcher] | None:
    """Return the launcher that the options name; None for this machine."""
    flags = {"--slurm": options.slurm and "slurm", "--mpi": options.mpi and "mpi", "--launcher": options.launcher}
    chosen = {flag: launcher_class(name) for flag, name in flags.items() if name}
    if options.hosts and not any("hosts" in kind.own_options for kind in chosen.values()):
        chosen["--hosts"] = launcher_class("ssh")
    if len(chosen) > 1:
        raise UsageError("One launcher starts the ranks.", numbers=" and ".join(chosen), hint="one of them")
    return next(iter(chosen.values()), None)


def _check_own_options(options: Any, launcher: type[Launcher] | None) -> None:
    """Raise UsageError for an option that the launcher does not have."""
    for key, typed in _OWN.items():
        if not getattr(options, key) or (launcher is not None and key in launcher.own_options):
            continue
        takers = [kind.flag for kind in built_in().values() if key in kind.own_options and kind.flag]
        takers += ["--launcher"] * (key in Launcher.own_options)
        what = f"{typed} is for {' or '.join(takers)}."
        if options.launcher:
            flag = f"--launcher {options.launcher}"
            raise UsageError(
                what,
                numbers=flag,
                hint=f"%cluster start {flag} -n 4 -- WORDS   hands the launcher words of its own",
            )
        raise UsageError(
            what,
            numbers=" ".join(options.rest) if key == "rest" else f"{typed} without it",
            hint=f"%cluster start {takers[0]} -n 4",
        )


def _check_here(options: Any) -> None:
    """Raise UsageError for options of other hosts, for ranks of this machine."""
    if options.python:
        raise UsageError(
            "--python is for other hosts.", numbers=f"--python {options.python}", hint="--hosts or --slurm"
        )
    if options.container:
        raise UsageError(
            "--container is for other hosts.",
            numbers=f"--container {options.container!r}, and ranks of this machine",
            hint="--slurm -n 4   or   --hosts node1:4   beside it",
        )
