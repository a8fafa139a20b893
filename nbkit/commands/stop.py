"""Stop a cluster: end its ranks with their variables, and free its devices."""

from __future__ import annotations

import argparse

from nbkit.errors import ClusterNotFound
from nbkit.notebook.cluster import registry


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the cluster, as `nbkit list` shows it")


def run(arguments: argparse.Namespace) -> int:
    try:
        entry = registry.running(arguments.name)
    except ClusterNotFound as error:  # the hint of this error is for a notebook
        raise ClusterNotFound(error.what, numbers=error.numbers, hint="nbkit list") from None
    registry.end(entry)
    print(f"{entry.name}: stopped, {entry.n} {'rank' if entry.n == 1 else 'ranks'} ended")
    return 0
