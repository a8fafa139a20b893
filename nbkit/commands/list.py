"""List your clusters, with their ranks, devices and notebooks."""

from __future__ import annotations

import argparse
import time

from nbkit.durations import text_of
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.notebook.cluster.status import ClusterList, text_table
from nbkit.notebook.json_text import add_json_option, json_text

_HEAD = ("NAME", "RANKS", "BACKEND", "STATE", "AGE", "HOST", "DEVICES")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    parser.epilog = "A cluster ends if it has had no notebook and no running cell for its time to live (--ttl)."


def run(arguments: argparse.Namespace) -> int:
    entries, unreadable = registry.entries(), registry.unreadable()
    if arguments.json:
        print(json_text(ClusterList(entries, unreadable)))
        return 0
    if entries:
        print(text_table(_HEAD, [_row(entry) for entry in entries]))
    for said in unreadable:
        print(said)
    if not entries and not unreadable:
        print("No cluster. In a notebook: %load_ext nbkit, then %cluster start")
    return 0


def _row(entry: ClusterEntry) -> tuple[str, ...]:
    state = entry.state if entry.is_alive() else "ended: nbkit clean"
    if entry.ranks and state == "no notebook":
        state = f"no notebook, ttl {text_of(entry.ttl)}"
    devices = ", ".join(dict.fromkeys(entry.labels))
    return (entry.name, str(entry.n), entry.backend, state, text_of(time.time() - entry.born), entry.host, devices)
