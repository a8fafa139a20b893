"""Show what this machine offers, what nbkit would use of it, and what is missing."""

from __future__ import annotations

import argparse

from nbkit.notebook.doctor import doctor


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status 1 when something required is missing."


def run(arguments: argparse.Namespace) -> int:
    report = doctor()
    print(report)
    return 0 if report.ok else 1
