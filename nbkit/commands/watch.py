"""Watch a training from a terminal: loss, the parts of a step on each rank, traffic, memory."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

from nbkit import job_folder
from nbkit.notebook.cluster import registry, site_settings
from nbkit.notebook.cluster.job import AttachedJob
from nbkit.notebook.cluster.newest_run import recorded_by
from nbkit.notebook.json_text import json_text
from nbkit.notebook.run.reader import RunReader, no_run, read_run
from nbkit.notebook.widgets.dashboard.text_view import lines_of, plain
from nbkit.quoting import shell_words, user_path
from nbkit.records.record_file import check_format, newest_run

_EVERY_S = 1.0
_STYLES = {
    "compute": "blue",
    "exposed": "red",
    "waiting": "yellow",
    "bubble": "bright_black",
    "data": "cyan",
    "optimizer": "magenta",
    "other": "white",
    "strong": "bold",
    "faint": "dim",
}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        help="a cluster, a job of nbkit jobs, a run or a folder of runs; default: runs, or the folder in nbkit.toml",
    )
    parser.add_argument("--once", action="store_true", help="print the state once and end")
    parser.add_argument(
        "--json", action="store_true", help="print the state once as JSON: see nbkit.read_run(...).snapshot"
    )
    parser.epilog = (
        "The command reads the records in the run's directory. Ctrl-C ends only the command, not the training."
    )


def run(arguments: argparse.Namespace) -> int:
    what = arguments.what or str(site_settings.read().runs)
    run = read_run(_run_of(what))
    if arguments.json:
        print(json_text(run.snapshot()))
        return 0
    if arguments.once:
        print(plain(lines_of(run.snapshot(), _width())))
        return 0
    try:
        from rich.live import Live
    except ImportError:
        return _without_rich(what, run)
    with Live(_drawn(run), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_EVERY_S)
            run = _newest(what, run)
            live.update(_drawn(run), refresh=True)


def _without_rich(what: str, run: RunReader) -> int:
    while True:
        print("\033[H\033[J" + plain(lines_of(run.snapshot(), _width())), flush=True)
        time.sleep(_EVERY_S)
        run = _newest(what, run)


def _drawn(run: RunReader) -> Any:
    from rich.text import Text

    drawn = Text(no_wrap=True)
    for line in lines_of(run.snapshot(), _width()):
        for piece in line:
            drawn.append(piece.text, style=_STYLES.get(piece.style, ""))
        drawn.append("\n")
    return drawn


def _newest(what: str, run: RunReader) -> RunReader:
    """Return the reader of a newer run if one has begun, else `run`."""
    folder = _run_of(what)
    return run if folder == run.run_dir else read_run(folder)


def _run_of(what: str) -> Path:
    """Return the directory of the run to watch. Raises UsageError if there is none."""
    folder = user_path(what).absolute()
    entry = next((one for one in registry.entries() if one.name == what), None)
    # As with --job, `what` is the name of a job, or the beginning of a name that only one running job has.
    begun = [job.name for job in AttachedJob.list() if job.name.startswith(what) and job.state != "ended"]
    job = what if what in job_folder.names() else begun[0] if len(begun) == 1 else None
    if folder.is_dir() or (entry is None and job is None):
        found = newest_run(folder)
    else:
        found = recorded_by(entry) if entry is not None else newest_run(job_folder.folder_of(str(job)))
    if found is None:
        raise no_run(what, lambda run: shell_words("nbkit", "watch", run))
    check_format(found)
    return found


def _width() -> int:
    return max(40, shutil.get_terminal_size((100, 40)).columns)
