"""List your listening programs: those that nbkit can examine."""

from __future__ import annotations

import argparse

from nbkit.notebook.cluster.job import AttachedJob
from nbkit.notebook.json_text import add_json_option, json_text


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    parser.epilog = "A program listens if it was started with `nbkit run`, or if it calls nbkit.listen()."


def run(arguments: argparse.Namespace) -> int:
    found = AttachedJob.list()
    print(json_text(found) if arguments.json else found)
    return 0
