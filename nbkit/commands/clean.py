"""End what half-dead clusters of this machine have left behind; running clusters are not touched."""

from __future__ import annotations

import argparse

from nbkit.notebook.cluster import registry


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Only processes that the registry names are ended, each checked by pid and start time."


def run(arguments: argparse.Namespace) -> int:
    print("\n".join(registry.clean()) or "Nothing to clean.")
    return 0
