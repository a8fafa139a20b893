"""The options of every magic, defined once for parsing, for -h and for the magic's help text."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import Any, NoReturn

from nbkit.durations import seconds_of
from nbkit.errors import UsageError
from nbkit.notebook.cluster.hosts.start_options import add_place_options
from nbkit.notebook.export.sbatch_file import add_slurm_options
from nbkit.notebook.json_text import add_json_option, json_text

DETACHED = "handle"  # the notebook variable of a detached cell, unless --detach names another

_NOW_CALLED = {
    "--local": "--here",
    "--save": "--as NAME",
    "--pause": "%train pause",
    "--resume": "%train resume",
    "--checkpoint": "%train save",
    "'wait'": "%train wait",
}

EXAMPLES = {
    "%%rank": "%%rank 0",
    "%cluster attach": "%cluster list   has the names, as in   %cluster attach NAME",
    "%cluster resize": "%cluster resize 4",
    "%compare": "%compare zero3 tp",
    "%distributed": "%distributed on",
    "%nbkit plan": "%nbkit plan config --batch 512 --on '8 H100'",
    "%pull": "%pull history",
    "%push": "%push config",
    "%train lr": "%train lr 3e-4",
}
"""Magics that need arguments -> a line that has them. Nobody can type a usage line with its brackets and braces."""


class HelpShown(Exception):
    """Raised when -h was given and has been answered."""


class MagicParser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        renamed = (new for old, new in _NOW_CALLED.items() if old in message.split("(")[0].split())
        fits = next(renamed, None) or EXAMPLES.get(self.prog, f"{self.prog} -h")
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        # If the verb is missing, show the usage, because it lists the verbs.
        shows = self.prog in EXAMPLES or message.endswith(": verb")
        raise UsageError(f"{self.prog}: {message}", numbers=usage if shows else "", hint=fits)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown


def parse(parser: argparse.ArgumentParser, line: str) -> argparse.Namespace:
    """Return the options in `line`. Raises UsageError if they are wrong, HelpShown after -h."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{parser.prog}: {error}", numbers=line) from None
    options, left = parser.parse_known_args(words)
    if left:
        _of_verb(parser, words).error(f"unrecognized arguments: {' '.join(left)}")
    return options


def shown(value: Any, *, as_json: bool) -> Any:
    """Return the value that a magic displays. as_json: print it as JSON instead, and return None."""
    if not as_json:
        return value
    print(json_text(value))
    return None


def _of_verb(parser: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser:
    """Return the parser of the verb in `words`, or `parser` if there is none."""
    verbs = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((verb.choices[word] for verb in verbs for word in words if word in verb.choices), parser)


def _duration(text: str) -> float:
    try:
        return seconds_of(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(f"{error.what} Give {error.numbers}, for example {error.hint}") from None


def _variable(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not a name that a notebook variable can have")
    return text


def _cell_options(parser: MagicParser) -> None:
    parser.add_argument(
        "--timeout",
        type=_duration,
        metavar="TIME",
        help="stop the cell after this time: 30s, 10min; see docs/reference/cells.md",
    )
    parser.add_argument(
        "--detach",
        type=_variable,
        nargs="?",
        const=DETACHED,
        metavar="NAME",
        help=f"return the prompt at once; output still appears here; NAME is the variable for the handle ({DETACHED})",
    )
    parser.add_argument(
        "--at-step", action="store_true", help="run at the next step boundary of the running training (a live cell)"
    )
    parser.add_argument("--here", action="store_true", help="after the ranks, run the cell in the notebook too")
    parser.add_argument(
        "--as", dest="name", type=_variable, metavar="NAME", help="put the results into this variable of the notebook"
    )
    parser.add_argument(
        "--queue", action="store_true", help="if a cell is running, wait until it ends, and raise no error"
    )
    parser.add_argument("--tabs", action="store_true", help="show the output of each rank in its own tab")
    parser.add_argument(
        "--job", metavar="NAME", help="run the cell in this listening program, between two of its steps"
    )


def distributed_parser() -> MagicParser:
    parser = MagicParser(prog="%%distributed", description="Run the cell on every rank.")
    parser.add_argument("--ranks", metavar="0,2-3", help="run only on these ranks")
    _cell_options(parser)
    return parser


def distribution_parser() -> MagicParser:
    parser = MagicParser(prog="%distributed", description="Run each cell on every rank, as with %%distributed.")
    parser.add_argument(
        "cells", choices=("on", "off"), help="with on, run each cell on the ranks; with off, in the notebook again"
    )
    return parser


def rank_parser() -> MagicParser:
    parser = MagicParser(prog="%%rank", description="Run the cell on some ranks: %%rank 0 or %%rank 0,2-3.")
    parser.add_argument("ranks", metavar="0,2-3", help="ranks that run the cell")
    _cell_options(parser)
    return parser


def cluster_parser() -> MagicParser:
    parser = MagicParser(prog="%cluster", description="Start, find and end clusters.")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=MagicParser)
    start = verbs.add_parser(
        "start",
        help="start a cluster on this machine, or elsewhere: --hosts, --slurm, --mpi, --launcher",
        epilog="Words after -- are passed unchanged to sbatch, mpirun or the launcher.",
    )
    start.add_argument(
        "-n",
        type=int,
        metavar="N",
        help="number of ranks; default: one per idle GPU, one if others use GPUs, two without a GPU",
    )
    start.add_argument("--name", metavar="NAME", help="name of the cluster; default: a random one")
    start.add_argument("--gpus", metavar="2,3", help="use these GPUs, with one rank on each")
    add_place_options(start)
    start.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="keep N spare devices on each host; a rank whose device fails moves to a spare",
    )
    start.add_argument(
        "--ttl",
        type=_duration,
        metavar="TIME",
        help="end the cluster after this time without a notebook and without a running cell, such as 30min (2h)",
    )
    start.add_argument(
        "--detach",
        action="store_true",
        help="for --slurm, --launcher: return at once. %%cluster list shows the status, %%cluster attach waits",
    )
    start.add_argument(
        "--save-before",
        type=_duration,
        metavar="TIME",
        help="for --slurm: save and end a training this long before the time limit (2min, at most a quarter of --time)",
    )
    start.add_argument(
        "--requeue",
        action="store_true",
        help="for --slurm: if Slurm ends the job, submit a new one, run the cells again, and continue the training",
    )
    attach = verbs.add_parser("attach", help="connect this notebook to a running cluster")
    attach.add_argument("name", metavar="NAME")
    attach.add_argument("--take", action="store_true", help="connect even if another notebook uses the cluster")
    attach.add_argument("--job", action="store_true", help="NAME is a program that listens: see docs/how-to/attach.md")
    add_json_option(attach)
    add_json_option(verbs.add_parser("status", help="show a table of the ranks"))
    stop = verbs.add_parser("stop", help="end the cluster")
    stop.add_argument("name", nargs="?", metavar="NAME", help="name of the cluster; default: this notebook's")
    add_json_option(verbs.add_parser("restart", help="end all ranks and start new ones on the same devices"))
    resize = verbs.add_parser("resize", help="change the number of ranks, also while a Trainer trains")
    resize.add_argument(
        "n", type=int, metavar="N", help="new number of ranks; tp, pp and cp keep their degrees, and dp changes"
    )
    resize.add_argument("--strategy", nargs="+", default=[], metavar="WORD", help="new strategy: zero3, tp=2 pp=2")
    add_json_option(resize)
    sync = verbs.add_parser("sync", help="copy your files to hosts without a shared file system")
    sync.add_argument("path", nargs="?", default=".", metavar="PATH", help="a folder in the notebook's directory (.)")
    add_json_option(verbs.add_parser("list", help="show all your clusters"))
    verbs.add_parser("clean", help="remove files and processes that broken clusters have left")
    return parser


def strategy_parser() -> MagicParser:
    parser = MagicParser(
        prog="%strategy",
        description="Show the panel, or switch: %strategy zero3, %strategy pp=2 schedule=1f1b microbatches=8.",
    )
    parser.add_argument(
        "strategy", nargs="*", help="a preset or items key=value; without a strategy, the magic shows the panel"
    )
    parser.add_argument("--undo", action="store_true", help="go back to the strategy before the last switch")
    parser.add_argument(
        "--try", dest="steps", type=int, metavar="N", help="measure N steps under the strategy, then undo them"
    )
    add_json_option(parser)
    return parser


def compare_parser() -> MagicParser:
    parser = MagicParser(
        prog="%compare",
        description="Measure strategies and the current one in turns, from the same state and on the same batches. "
        "Then the training continues as if nothing had happened: %compare tp zero3 'dp=2 tp=2'.",
    )
    parser.add_argument(
        "strategies",
        nargs="+",
        metavar="strategy",
        help="a preset, or items key=value; put several items into quotation marks",
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="number of steps of each strategy (20)")
    add_json_option(parser)
    return parser


def train_parser() -> MagicParser:
    parser = MagicParser(prog="%train", description="Pause, steer, save or stop the running training.")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=MagicParser)
    verbs.add_parser("pause", help="pause the training after the current step")
    verbs.add_parser("resume", help="continue a paused training")
    rate = verbs.add_parser(
        "lr", help="set the learning rate after the current step; factors of lr_schedule apply to the new rate"
    )
    rate.add_argument(
        "value",
        type=float,
        metavar="RATE",
        help="rate of the first parameter group; the other groups change by the same ratio",
    )
    fit = verbs.add_parser("fit", help="continue with a setting that fits, after a step ran out of memory")
    fit.add_argument(
        "number", nargs="?", type=int, default=0, help="number of a setting in the table (the first that fits)"
    )
    save = verbs.add_parser("save", help="write a checkpoint after the current step")
    save.add_argument("path", nargs="?", default="", help="directory to write (checkpoint, in the run's directory)")
    verbs.add_parser("wait", help="wait until the detached cell has ended, so that Run All waits too")
    verbs.add_parser("stop", help="end the training after the current step")
    return parser


def push_parser() -> MagicParser:
    parser = MagicParser(prog="%push", description="Copy variables of the notebook to the ranks.")
    parser.add_argument("names", nargs="+", metavar="name")
    parser.add_argument("--ranks", metavar="0,2-3", help="copy only to these ranks")
    parser.add_argument("--force", action="store_true", help="copy even values above 1 GB")
    parser.add_argument(
        "--queue", action="store_true", help="if a cell is running, wait until it ends, and raise no error"
    )
    return parser


def pull_parser() -> MagicParser:
    parser = MagicParser(prog="%pull", description="Copy variables of a rank into the notebook, under the same names.")
    parser.add_argument("names", nargs="+", metavar="name")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="copy from this rank (0)")
    parser.add_argument("--all", action="store_true", help="copy from all ranks, as a list")
    parser.add_argument("--force", action="store_true", help="copy even values above 1 GB")
    parser.add_argument(
        "--queue", action="store_true", help="if a cell is running, wait until it ends, and raise no error"
    )
    return parser


def board_parser() -> MagicParser:
    parser = MagicParser(prog="%board", description="Start TensorBoard, and show it in the notebook.")
    parser.add_argument("logdir", nargs="?", help="folder of the runs (runs, or the folder in nbkit.toml)")
    parser.add_argument("--height", type=int, default=700, metavar="PIXELS", help="height of the frame (700)")
    parser.add_argument("--stop", action="store_true", help="end TensorBoard")
    return parser


def dashboard_parser() -> MagicParser:
    parser = MagicParser(prog="%dashboard", description="Show the training live: loss, steps, traffic, memory.")
    parser.add_argument("run", nargs="?", help="folder of a recorded run (the newest training of the cluster)")
    parser.add_argument("--beside", metavar="RUN", help="also draw the curve of the run in this folder")
    parser.add_argument("--pin", action="store_true", help="keep showing this run when another training begins")
    parser.add_argument(
        "--steps", type=_steps, metavar="FIRST-LAST", help="show these steps, and keep showing this run"
    )
    return parser


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range of steps. Type the first and the last, for example 100-200"
        )
    return int(first), int(last)


def nbkit_parser() -> MagicParser:
    parser = MagicParser(prog="%nbkit", description="Plan, export, report, trace or examine a training.")
    commands = parser.add_subparsers(dest="verb", required=True)
    plan = commands.add_parser("plan", help="predict memory and time of each strategy for a model on some hardware")
    plan.add_argument(
        "model",
        nargs="?",
        metavar="NAME",
        help="variable with a GPTConfig, a module or a callable that builds one; default: the running training",
    )
    plan.add_argument("--batch", type=int, metavar="ROWS", help="rows of a global batch; required with NAME")
    plan.add_argument(
        "--on", metavar="HARDWARE", help="required with NAME: '128 x 8 H100' (128 nodes of 8 GPUs), '8 A100' (one node)"
    )
    plan.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16", help="as for a Trainer (bf16)")
    plan.add_argument(
        "--example", metavar="NAME", help="variable with a batch to run the module on, or a callable that makes one"
    )
    plan.add_argument("--loss", metavar="NAME", help="variable with the loss, as for a Trainer")
    plan.add_argument("--optimizer", metavar="NAME", help="variable with a function that builds the optimizer (AdamW)")
    plan.add_argument("--why", nargs=2, metavar=("A", "B"), help="explain the difference between two strategies")
    script = commands.add_parser("export", help="write the cells that the ranks have run as a script for torchrun")
    script.add_argument("path", nargs="?", default="train.py", help="script to write (train.py)")
    add_slurm_options(script, "also write an sbatch file beside the script", nodes=True)
    report = commands.add_parser("report", help="write one page with every chart")
    report.add_argument("path", nargs="?", default="run.html", help="file to write (run.html)")
    report.add_argument("--run", metavar="DIR", help="folder of a recorded run (the newest training of the cluster)")
    trace = commands.add_parser("trace", help="write the next steps of all ranks to one file for Perfetto")
    trace.add_argument("steps", nargs="?", type=int, default=3, help="number of steps (3)")
    trace.add_argument("path", nargs="?", help="file to write (trace-RUN-FIRST-LAST.json.gz)")
    why = commands.add_parser("why", help="say which rank is stuck, where, and what every rank does")
    why.add_argument("--stacks", action="store_true", help="also show the stack of every thread")
    why.add_argument("--job", metavar="NAME", help="name of a listening program")
    add_json_option(plan)
    add_json_option(why)
    debug = commands.add_parser("debug", help="open pdb on a rank: at its breakpoint(), or where the last cell failed")
    debug.add_argument(
        "rank",
        nargs="?",
        type=int,
        metavar="RANK",
        help="rank to debug; default: the rank at a breakpoint, or the rank that failed first",
    )
    return parser


PARSERS: dict[str, Callable[[], MagicParser]] = {
    "%%distributed": distributed_parser,
    "%%rank": rank_parser,
    "%distributed": distribution_parser,
    "%board": board_parser,
    "%cluster": cluster_parser,
    "%dashboard": dashboard_parser,
    "%nbkit": nbkit_parser,
    "%pull": pull_parser,
    "%push": push_parser,
    "%strategy": strategy_parser,
    "%compare": compare_parser,
    "%train": train_parser,
}
"""Magic -> the function that makes its parser."""
