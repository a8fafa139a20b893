"""End the processes that a broken cluster has left on this machine, delete its files, and forget jobs that have ended.

A cluster is broken if its controller or the parent of its ranks has died. Running clusters and jobs are not touched.
"""

from __future__ import annotations

import argparse

from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.job import AttachedJob


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The command ends only processes that nbkit has started. Before it ends a process, it checks its ID and its "
        "start time."
    )


def run(arguments: argparse.Namespace) -> int:
    print("\n".join([*registry.clean(), *AttachedJob.clean()]) or "Nothing to clean.")
    return 0
