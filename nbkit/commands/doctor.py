"""Show the devices of this machine, what nbkit would use, and what is missing."""

from __future__ import annotations

import argparse

from nbkit.notebook.bug_report import bug_report
from nbkit.notebook.doctor import doctor
from nbkit.notebook.json_text import add_json_option, json_text


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report",
        action="store_true",
        help="print Markdown for a bug report: versions, but no secrets, user names, host names or home paths",
    )
    add_json_option(parser)
    parser.epilog = "The exit status is 1 if something required is missing."


def run(arguments: argparse.Namespace) -> int:
    found = doctor()
    if arguments.report:
        print(bug_report(found))
    else:
        print(json_text(found) if arguments.json else found)
    return 0 if found.ok else 1
