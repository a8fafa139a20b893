"""Train a GPT on real text in a notebook for about two minutes, and switch its strategy meanwhile."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from nbkit.errors import CellError, NbkitError, UsageError
from nbkit.notebook.cluster import site_settings
from nbkit.notebook.cluster.launch.pins import pins_within
from nbkit.notebook.cluster.machine.machine import read_machine
from nbkit.notebook.headless import Headless, read_notebook, shown_by, tagged
from nbkit.notebook.lessons import lesson
from nbkit.notebook.user_files import write_file

LESSON = "00_switch_live"
# If the demo is killed, its ranks release their devices after this time.
TTL_SECONDS = 60
CPU_RANKS, MOST_RANKS, BATCH = 4, 8, 16
# The largest difference at which the switched training still counts as equal to the one without switches.
APART = 1e-8
# A pause before each switch, so that the switches are apart on the curve.
PACE_SECONDS = 2.0
_PROGRESS = re.compile(r"step \d+[^\r\n]*")
_LABEL = re.compile(r"^\[[\d,-]+\] ?", re.MULTILINE)
_VERDICT = re.compile(r"never switched: ([\d.e+-]+)")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n",
        type=int,
        metavar="N",
        help=f"number of ranks: even, at most {MOST_RANKS}; default: one per idle GPU, or {CPU_RANKS} on the CPU",
    )
    parser.add_argument("--cpu", action="store_true", help="use CPU ranks, even if there are GPUs")
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="training steps (150)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo.ipynb"),
        metavar="FILE",
        help="where to write the executed notebook (%(default)s)",
    )
    parser.epilog = (
        "The exit status is 1 if a cell fails, or if the loss curve differs from a training without switches."
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.steps < 4:
        raise UsageError("A demo has at least 4 steps.", numbers=f"--steps {arguments.steps}", hint="--steps 150")
    notebook = read_notebook(lesson(LESSON))
    (parameters,) = tagged(notebook, "parameters")
    ranks, parameters["source"] = _settings(arguments)
    terminal = Terminal()
    if importlib.util.find_spec("matplotlib") is None:
        notebook["cells"] = [cell for cell in notebook["cells"] if "import matplotlib" not in "".join(cell["source"])]
    terminal.say(f"A GPT learns to write Python on {ranks}, and its strategy is switched while it trains.")
    terminal.say(f"The notebook: {LESSON}.ipynb, which `nbkit lab` opens\n")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    story = Story(notebook, terminal)
    # A closed terminal or a `kill` ends the demo like Ctrl-C, with everything that it started. SIGINT is in the list
    # because it is ignored in a process that a shell starts in the background.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with Headless(Path.cwd(), story.on_text) as kernel:
            kernel.run(notebook, on_cell=story.on_cell)
    except CellError as error:
        error.hint = f"the notebook, with what it did up to there: {arguments.output}"
        raise
    except KeyboardInterrupt:
        terminal.say("Stopped. Nothing is left running.")
        raise
    finally:
        terminal.clear()
        # Keep the executed part of the notebook, above all after a failure.
        write_file(arguments.output, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    story.tell()
    return _close(terminal, story, arguments.steps, arguments.output, time.monotonic() - began)


def _settings(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return (description of the ranks, parameters of the notebook)."""
    pins = pins_within(site_settings.read(), read_machine(), arguments.n, cpu=arguments.cpu).pins
    on_gpus = pins[0].kind == "gpu"
    n = arguments.n or (min(max(len(pins) // 2 * 2, 2), MOST_RANKS) if on_gpus else CPU_RANKS)
    if n % 2 or not 2 <= n <= MOST_RANKS:
        raise UsageError(
            f"The demo takes an even number of ranks, {MOST_RANKS} at most.", numbers=f"-n {n}", hint="-n 4"
        )
    options = f"-n {n} --ttl {TTL_SECONDS}" + (" --cpu" if arguments.cpu else "")
    parameters = f'CLUSTER = "{options}"\nSTEPS = {arguments.steps}\nBATCH = {BATCH}\nTEXT_BYTES = 1_000_000\n'
    return f"{n} {'GPU' if on_gpus else 'CPU'} ranks", parameters


class Terminal:
    """Output with a live line below the other lines. In a file, the live line becomes an ordinary line now and then."""

    def __init__(self) -> None:
        self.is_live = sys.stdout.isatty()
        self._drawn = 0
        self._last = time.monotonic()

    def live(self, text: str) -> None:
        """Show `text` in the live line."""
        if self.is_live:
            text = text[: shutil.get_terminal_size().columns - 1]
            sys.stdout.write(f"\r{text.ljust(self._drawn)}")
            self._drawn = len(text)
        elif time.monotonic() - self._last > 10:
            self._last = time.monotonic()
            print(text)
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """Print a line that stays. The live line disappears until it is drawn again."""
        self.clear()
        print(text, flush=True)

    def clear(self) -> None:
        """Erase the live line."""
        if self._drawn:
            sys.stdout.write(f"\r{' ' * self._drawn}\r")
            sys.stdout.flush()
            self._drawn = 0


class Story:
    """Shows parts of the notebook in the terminal: the start, each switch, the proof, a sample."""

    def __init__(self, notebook: dict[str, Any], terminal: Terminal) -> None:
        self.notebook, self.terminal = notebook, terminal
        self.code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        self._unreported = [
            (tag, cell) for tag in ("start", "switch", "proof", "sample") for cell in tagged(notebook, tag)
        ]
        self.apart: float | None = None

    def on_cell(self, cell: dict[str, Any]) -> None:
        """Show that `cell` is next, and report the finished cells before it."""
        self.tell()
        if "switch" in cell["metadata"].get("tags", []):
            time.sleep(PACE_SECONDS)
        number = self.code.index(cell) + 1
        lines = [line for line in "".join(cell["source"]).splitlines() if line and not line.startswith(("%%", "#"))]
        self.terminal.live(f"cell {number} of {len(self.code)}: {(lines or ['...'])[0]}")

    def on_text(self, cell: dict[str, Any], text: str) -> None:
        """Show the progress of a training, from the printed text of a cell."""
        if {"train", "again"} & set(cell["metadata"].get("tags", [])) and (found := _PROGRESS.findall(text)):
            self.terminal.live(f"training: {found[-1].rstrip()}")

    def tell(self) -> None:
        """Report the finished parts that have not been reported yet."""
        while self._unreported and self._unreported[0][1]["execution_count"] is not None:
            tag, cell = self._unreported.pop(0)
            text = _LABEL.sub("", shown_by(cell)).strip("\n")
            if tag == "start":
                self.terminal.say(text.partition("\n")[0])
            elif tag == "sample":
                self.terminal.say(f"\nIt writes, spread over the ranks:\n{_indented(text)}\n")
            else:
                self.terminal.say(text)
            if tag == "proof" and (found := _VERDICT.search(text)):
                self.apart = float(found[1])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _close(terminal: Terminal, story: Story, steps: int, output: Path, seconds: float) -> int:
    if story.apart is None:
        raise NbkitError("The notebook has not printed the difference of the curves.", hint=f"see {output}")
    same = story.apart <= APART
    curves = f"{_beside_python('tensorboard')} --logdir runs"
    if importlib.util.find_spec("tensorboard") is None:
        curves = "nbkit watch runs --once; in TensorBoard: pip install 'nbkit-train[board]'"
    verdict = "went on as if nothing had happened" if same else "is NOT that of a training without switches"
    terminal.say(
        f"The loss curve {verdict}: "
        f"largest difference {story.apart:.1e}.\n"
        f"{steps} steps, twice, and all the rest took {seconds:.0f} s.\n\n"
        f"  the notebook, with all its outputs   {output}\n"
        f"  the curves                           {curves}\n"
        f"  next: the same, by hand              {_beside_python('nbkit')} lab"
    )
    return 0 if same else 1


def _beside_python(command: str) -> str:
    path = os.path.join(os.path.dirname(sys.executable), command)
    return min(path, os.path.relpath(path), key=len)
