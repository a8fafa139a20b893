"""The options of every magic, each built once: for parsing, for -h and for the magic's own help text."""

from __future__ import annotations

import argparse
import shlex
from typing import NoReturn

from nbkit.errors import UsageError


class HelpShown(Exception):
    """-h was given and has been answered."""


class MagicParser(argparse.ArgumentParser):
    """Raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", hint=self.format_usage().strip().removeprefix("usage: "))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown


def parse(parser: argparse.ArgumentParser, line: str) -> argparse.Namespace:
    """The options in `line`. Raises UsageError, or HelpShown."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{parser.prog}: {error}", numbers=line) from None
    return parser.parse_args(words)


def _cell_options(parser: MagicParser) -> None:
    parser.add_argument("--timeout", type=float, metavar="S", help="stop the cell after S seconds; see Stop in docs/cells.md")
    parser.add_argument("--detach", action="store_true", help="give the prompt back at once; the output stays here")
    parser.add_argument(
        "--at-step", action="store_true", help="run at the next step boundary of the running training (a live cell)"
    )
    parser.add_argument("--local", action="store_true", help="run it in the notebook too, after the ranks")
    parser.add_argument("--save", metavar="NAME", help="put the Results (or the handle) into this notebook variable")
    parser.add_argument("--queue", action="store_true", help="wait for a cell that runs, instead of refusing")


def distributed_parser() -> MagicParser:
    parser = MagicParser(prog="%%distributed", description="Run the cell on every rank.")
    parser.add_argument("--ranks", metavar="0,2-3", help="only on these ranks")
    _cell_options(parser)
    return parser


def rank_parser() -> MagicParser:
    parser = MagicParser(prog="%%rank", description="Run the cell on some ranks: %%%%rank 0 or %%%%rank 0,2-3.")
    parser.add_argument("ranks", metavar="0,2-3", help="the ranks")
    _cell_options(parser)
    return parser


def cluster_parser() -> MagicParser:
    parser = MagicParser(prog="%cluster", description="Start, find and end clusters.")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=MagicParser)
    start = verbs.add_parser("start", help="start a cluster on this machine")
    start.add_argument("-n", type=int, metavar="N", help="ranks; default: one per idle GPU, else two")
    start.add_argument("--name", help="what to call it; default: a name is made up")
    start.add_argument("--gpus", metavar="2,3", help="these GPUs, one rank each")
    start.add_argument("--cpu", action="store_true", help="CPU ranks, whatever GPUs there are")
    start.add_argument(
        "--ttl", type=float, default=7200, metavar="S", help="let go after S seconds without notebook and cell (7200)"
    )
    attach = verbs.add_parser("attach", help="take up a cluster that runs")
    attach.add_argument("name")
    attach.add_argument("--take", action="store_true", help="even from another notebook that uses it")
    verbs.add_parser("status", help="a table of the ranks")
    verbs.add_parser("wait", help="wait for the detached cell, so that Run All does")
    stop = verbs.add_parser("stop", help="end the cluster")
    stop.add_argument("name", nargs="?", help="another one than this notebook's")
    verbs.add_parser("restart", help="end all ranks and start again: same pins, same ids")
    verbs.add_parser("list", help="all clusters of this user")
    verbs.add_parser("clean", help="end what half-dead clusters have left")
    return parser


def strategy_parser() -> MagicParser:
    parser = MagicParser(
        prog="%strategy",
        description="Show the panel, or switch: %%strategy zero3, %%strategy pp=2 schedule=1f1b microbatches=8.",
    )
    parser.add_argument("strategy", nargs="*", help="a preset, or key=value; without: the panel")
    parser.add_argument("--undo", action="store_true", help="go back to the strategy before the last switch")
    parser.add_argument("--try", dest="steps", type=int, metavar="N", help="measure it for N steps, then go back")
    parser.add_argument("--pause", action="store_true", help="hold the training at its next step boundary")
    parser.add_argument("--resume", action="store_true", help="go on after --pause")
    parser.add_argument("--checkpoint", action="store_true", help="save at the next step boundary")
    return parser


def push_parser() -> MagicParser:
    parser = MagicParser(prog="%push", description="Assign notebook variables on the ranks.")
    parser.add_argument("names", nargs="+", metavar="name")
    parser.add_argument("--ranks", metavar="0,2-3", help="only on these ranks")
    parser.add_argument("--force", action="store_true", help="also above 1 GB")
    parser.add_argument("--queue", action="store_true", help="wait for a cell that runs, instead of refusing")
    return parser


def pull_parser() -> MagicParser:
    parser = MagicParser(prog="%pull", description="Fetch a variable of a rank into the notebook, under its own name.")
    parser.add_argument("name")
    parser.add_argument("--rank", type=int, default=0, help="of this rank (0)")
    parser.add_argument("--all", action="store_true", help="of all ranks, as a list")
    parser.add_argument("--force", action="store_true", help="also above 1 GB")
    parser.add_argument("--queue", action="store_true", help="wait for a cell that runs, instead of refusing")
    return parser


def board_parser() -> MagicParser:
    parser = MagicParser(prog="%board", description="Start TensorBoard beside the notebook and show it here.")
    parser.add_argument("logdir", nargs="?", default="runs", help="folder with the runs (runs)")
    parser.add_argument("--height", type=int, default=700, help="of the frame, in pixels (700)")
    parser.add_argument("--stop", action="store_true", help="end it")
    return parser
