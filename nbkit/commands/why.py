"""Say which rank is stuck, where, and what every rank does. It works while a cell blocks the notebook."""

from __future__ import annotations

import argparse

from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.job import AttachedJob
from nbkit.notebook.cluster.launch.launch import connect
from nbkit.notebook.cluster.output.root_cause import deaths_in
from nbkit.notebook.cluster.why import ask_why
from nbkit.notebook.json_text import add_json_option, json_text


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the cluster; default: the running one, if there is only one"
    )
    parser.add_argument(
        "--job", nargs="?", const="", metavar="NAME", help="name of a listening program: see nbkit jobs"
    )
    parser.add_argument("--stacks", action="store_true", help="also show the stack of every thread")
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.job is not None:
        seen = AttachedJob.attach(arguments.job or None).why(stacks=arguments.stacks)
        print(json_text(seen) if arguments.json else seen)
        return 0
    entry = registry.running(arguments.name) if arguments.name else registry.the_only_one()
    client = connect(entry)
    try:
        client.wait_for(entry.n, 1.0)
        deaths = {death.rank: death for death in deaths_in(entry.folder)}
        found = ask_why(entry, client, deaths, stacks=arguments.stacks)
        print(json_text(found) if arguments.json else found)
    finally:
        client.close()
    return 0
