"""Remove files and processes that broken clusters of this machine have left, and forget jobs that have ended.

Running clusters and jobs are not touched.
"""

from __future__ import annotations

import argparse

from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.job import AttachedJob


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "The command ends only processes of nbkit's clusters. It compares the pid and start time of each."


def run(arguments: argparse.Namespace) -> int:
    print("\n".join([*registry.clean(), *AttachedJob.clean()]) or "Nothing to clean.")
    return 0
