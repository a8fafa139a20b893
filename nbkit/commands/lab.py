"""Write the lessons into a folder, and open the first one in JupyterLab."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from nbkit.errors import NbkitError
from nbkit.notebook.lessons import write_lessons
from nbkit.quoting import shell_words
from nbkit.wire.user_code import OWN_MODULES


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("nbkit-lessons"),
        metavar="FOLDER",
        help="folder to write (%(default)s)",
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address instead of opening a browser")
    parser.add_argument("--port", type=int, metavar="PORT", help="port of the server; default: JupyterLab chooses")
    parser.add_argument("--allow-root", action="store_true", help="allow root, which JupyterLab refuses by default")
    parser.epilog = "Lessons that are already in the folder do not change. More options: jupyter lab --help"


def run(arguments: argparse.Namespace) -> int:
    first, *others = write_lessons(arguments.folder)
    print(f"{len(others) + 1} notebooks in {arguments.folder}", flush=True)
    if importlib.util.find_spec("jupyterlab") is None:
        hint = f"{shell_words(sys.executable)} -m pip install 'nbkit-train[lab]'"
        raise NbkitError("JupyterLab is not installed.", numbers=f"{sys.executable} has none", hint=hint)
    # The lesson is not an argument, because the address that --no-browser prints would not open it.
    command = [sys.executable, *OWN_MODULES, "jupyterlab", f"--ServerApp.root_dir={arguments.folder.absolute()}"]
    command.append(f"--LabApp.default_url=/lab/tree/{first.name}")
    command += ["--no-browser"] * arguments.no_browser + ["--allow-root"] * arguments.allow_root
    command += [] if arguments.port is None else [f"--port={arguments.port}"]
    os.execv(sys.executable, command)  # JupyterLab gets Ctrl-C itself, and asks
