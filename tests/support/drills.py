"""Mistakes and failures in a real notebook: the answer that is shown, how long it takes, and what is left.

python -m tests.support.drills                    all of them
python -m tests.support.drills WORD ...           those with a word in their name; --out FILE writes the table

All drills share a kernel and a cluster of two ranks. After each drill, the next cell must run a collective on both
ranks, and no new process may be left. After the last drill, no process at all may be left.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

_folder = Path(__file__).parent
if str(_folder) not in sys.path:
    sys.path.insert(0, str(_folder))

from drill_list import DRILLS, Drill  # noqa: E402
from kernel_client import Cell, Kernel  # noqa: E402

from nbkit.notebook.cluster import registry  # noqa: E402

START = "%cluster start -n 2 --cpu"
HEALTHY = "%%distributed\nx = torch.ones(1); dist.all_reduce(x); int(x.item())"
GONE_SECONDS = 20.0  # for processes that are being ended, on a busy machine too
SHOWN_CHARACTERS = 220


@dataclass(frozen=True)
class Outcome:
    """The answer to a drill. shown: its sentence. seconds: until it was complete. wrong: what is wrong, or ""."""

    drill: Drill
    shown: str
    seconds: float
    wrong: str = ""


def perform(kernel: Kernel, drill: Drill) -> Outcome:
    """Do what the drill says, look at what is shown, and make sure that all goes on as if nothing had been."""
    before = processes(kernel)
    for source in drill.first:
        kernel.run(source)
    cell = kernel.run(drill.cell, typed=drill.typed, at={drill.stop: kernel.interrupt} if drill.stop else None)
    wrong = [] if drill.words in cell.text else [f"{drill.words!r} is not shown"]
    if drill.fails == (cell.status == "ok"):
        wrong.append(f"the cell's status is {cell.status}")
    for source in drill.after:
        last = kernel.run(source)
        wrong += [f"{source!r}: {last.text[-200:]}"] if last.status != "ok" else []
    if drill.with_cluster:
        last = kernel.run(HEALTHY)
        wrong += [] if "Out[0-1]: 2" in last.text else [f"the next cell: {last.text[-200:]}"]
        if not drill.renews and (left := _new(kernel, before)):
            wrong.append(f"left running: {left}")
    return Outcome(drill, sentence(cell), cell.seconds, "; ".join(wrong))


def processes(kernel: Kernel) -> set[psutil.Process]:
    """Return every process of the kernel's clusters: found by its environment, or in the registry.

    A process that was forked from a process of the tests shows the environment of that process.
    """
    home = kernel.environment["NBKIT_HOME"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBKIT_HOME", home)
        registered = [
            process.pid for entry in registry.entries() for process in (entry.controller, entry.parent, *entry.ranks)
        ]
    found = set[psutil.Process]()
    for pid in registered:
        with suppress(psutil.Error):
            found |= {psutil.Process(pid), *psutil.Process(pid).children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("NBKIT_HOME") == home:
                found.add(process)
    return alive(found)


def alive(found: set[psutil.Process]) -> set[psutil.Process]:
    """Return the processes that have not ended."""
    left = set()
    for process in found:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.add(process)
    return left


def _new(kernel: Kernel, before: set[psutil.Process]) -> list[str]:
    deadline = time.monotonic() + GONE_SECONDS
    while (new := processes(kernel) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    words = []
    for process in new:
        with suppress(psutil.Error):
            words.append(" ".join(process.cmdline()[:4]))
    return words


def sentence(cell: Cell) -> str:
    """Return the lines of a cell that say what is wrong and what to type: those of its error, else its last lines."""
    errors = [content for _, kind, content in cell.messages if kind == "error"]
    text = "\n".join(errors[-1]["traceback"]) if errors else cell.text
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    hints = [line.strip() for line in cell.text.splitlines() if line.strip().startswith("→")]
    lines += [hint for hint in dict.fromkeys(hints[:1]) if hint not in lines]  # a rank's error
    shown = " ".join(lines[-4:] if not errors or len(lines) > 6 else lines)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS - 1]}…"


def all_of(words: Sequence[str]) -> list[Drill]:
    """Return the drills that have one of `words` in their name, or all if there are no words."""
    return [drill for drill in DRILLS if not words or any(word in drill.name for word in words)]


def performed(drills: Sequence[Drill], home: Path) -> Iterator[Outcome]:
    """Yield the outcome of each drill, in one notebook. After a whole list, check that nothing is left running."""
    with Kernel(home) as kernel:
        kernel.run("%load_ext nbkit")
        for drill in [each for each in drills if not each.with_cluster]:
            yield perform(kernel, drill)
        started = kernel.run(START)
        assert started.status == "ok", started.text
        kernel.run(HEALTHY)
        known = processes(kernel)
        for drill in [each for each in drills if each.with_cluster]:
            yield perform(kernel, drill)
            known |= processes(kernel)
        kernel.run("%cluster stop")
    deadline = time.monotonic() + GONE_SECONDS
    while (left := alive(known | processes(kernel))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"left running when the notebook had ended: {left}"


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the outcomes as lines of a Markdown table."""
    lines = ["| | what is done | what is then shown | seconds |", "|---|---|---|---|"]
    for number, outcome in enumerate(outcomes, 1):
        shown = outcome.shown.replace("|", "\\|")
        answer = f"**{outcome.wrong}** {shown}" if outcome.wrong else shown
        lines.append(f"| {number} | {outcome.drill.name} | {answer} | {outcome.seconds:.2f} |")
    return lines


def summary(outcomes: Sequence[Outcome]) -> str:
    right = [each for each in outcomes if not each.wrong]
    seconds = sorted(each.seconds for each in outcomes)
    return (
        f"In {len(right)} of {len(outcomes)} drills the notebook showed the right answer: after "
        f"{statistics.median(seconds):.2f} s in the median, and after {seconds[-1]:.1f} s at the latest. After each "
        "drill, the next cell ran on both ranks, and no additional process was left. After the end of the notebook, no "
        "process at all was left."
    )


def main(arguments: Sequence[str], say: Callable[[str], None] = lambda text: print(text, flush=True)) -> int:
    """Returns the exit status: 1 when a drill is not answered as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.drills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="word", help="only drills with one of these in their name")
    parser.add_argument("--out", type=Path, help="write the table there")
    asked = parser.parse_args(arguments)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="drills") as home:
        for outcome in performed(all_of(asked.words), Path(home)):
            outcomes.append(outcome)
            mark = f"WRONG ({outcome.wrong})" if outcome.wrong else "right"
            say(f"{len(outcomes)} {outcome.drill.name}: {mark}, {outcome.seconds:.2f} s: {outcome.shown}")
    lines = [summary(outcomes), "", *table(outcomes)]
    say("\n".join(["", *lines]))
    if asked.out is not None:
        does = "After this page you know what a notebook shows after a mistake or a failure. `make drills` makes each"
        does += " mistake or failure below in a real notebook with two ranks, and writes the table. "
        does += "Words after → say what to type next."
        head = ["# Drills", "", does, ""]
        asked.out.write_text("\n".join([*head, *lines]) + "\n")
    return int(any(each.wrong for each in outcomes))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
