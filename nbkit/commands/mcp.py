"""Let an agent on this machine use clusters and trainings, over the Model Context Protocol (stdio, no port).

The agent starts this command itself. See docs/agents.md for the line in its configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import BinaryIO

from nbkit.errors import UsageError
from nbkit.notebook.cluster import registry
from nbkit.quoting import user_path


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow",
        choices=("look", "steer", "code"),
        default="look",
        help="look: the agent may only read (default); steer: also switch, pause, save and stop; code: also run code",
    )
    parser.add_argument(
        "--dir", default=".", metavar="FOLDER", help="working directory, which has runs/ and scripts (.)"
    )
    parser.epilog = "The log is mcp.jsonl, in the folder of your clusters. It has each request and its result."


def run(arguments: argparse.Namespace) -> int:
    from nbkit.notebook.agent_server import AgentServer, AuditLog, tools_of
    from nbkit.notebook.agent_tools import AgentTools

    folder = user_path(arguments.dir)
    if not folder.is_dir():
        raise UsageError("There is no such folder.", numbers=str(folder), hint="nbkit mcp --dir FOLDER")
    os.chdir(folder)
    log = AuditLog(registry.check_home() / "mcp.jsonl")
    lines, out = _own_streams()
    AgentServer(tools_of(AgentTools()), arguments.allow, log, out).serve(lines)
    return 0


def _own_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return standard input and output, for the protocol alone. From now on, prints go to standard error."""
    lines, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), sys.stderr
    return lines, out
