"""Are the hosts of a cluster alike enough? Asked before any rank is forked."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

import nbkit
from nbkit.errors import ClusterError
from nbkit.notebook.cluster.launch.platform_check import torch_version

_PARTS = {"Python": 2, "torch": 9, "nbkit": 9, "ipyparallel": 2}  # how many numbers of a version have to agree
_OF_NOTEBOOK = ("Python", "nbkit", "ipyparallel")  # cells, results and engines come from or go to its process

CLOCK_SECONDS = 0.5
"""What clocks may differ: a message of a busy host takes some tenths of a second."""


def versions_here() -> dict[str, str]:
    """What is installed where this process runs."""
    return {
        "Python": platform.python_version(),
        "torch": torch_version(),
        "nbkit": nbkit.__version__,
        "ipyparallel": metadata.version("ipyparallel"),
    }


def check_versions(hosts: Mapping[str, Mapping[str, str]]) -> None:
    """hosts: name -> what is installed there, by name. Raises ClusterError, naming hosts, where they differ."""
    here = versions_here()
    for name in _PARTS:
        found = {host: versions[name] for host, versions in hosts.items()}
        if name in _OF_NOTEBOOK:
            found = {"this notebook": here[name], **found}
        if len({_compared(name, version) for version in found.values()}) > 1:
            with_it: dict[str, list[str]] = {}
            for host, version in found.items():
                with_it.setdefault(version, []).append(host)
            raise ClusterError(
                f"The hosts have different versions of {name}.",
                numbers="; ".join(f"{version} on {', '.join(each)}" for version, each in with_it.items()),
                hint="use one environment everywhere: --python PATH names the one on the hosts",
            )


def notes_on(drivers: Mapping[str, str], clocks: Mapping[str, float]) -> tuple[str, ...]:
    """What differs between hosts, while a cluster can run. drivers: host -> version of NVIDIA's, "" without GPUs.

    clocks: host -> seconds that its clock is ahead of the coordinator's, whose message took a little of it.
    """
    notes = []
    if len({driver for driver in drivers.values() if driver}) > 1:
        each = ", ".join(f"{driver or 'none'} on {host}" for host, driver in drivers.items())
        notes.append(f"the hosts have different versions of NVIDIA's driver: {each}")
    if max(clocks.values()) - min(clocks.values()) > CLOCK_SECONDS:
        each = ", ".join(f"{ahead - min(clocks.values()):.1f} s on {host}" for host, ahead in clocks.items())
        notes.append(
            f"the clocks of the hosts differ, so times of their ranks in dashboard and traces do too: ahead by {each}"
        )
    return tuple(notes)


def _compared(name: str, version: str) -> str:
    return ".".join(version.split(".")[: _PARTS[name]])
