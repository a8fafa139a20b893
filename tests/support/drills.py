"""Mistakes and failures in a real notebook: the answer that is shown, how long it takes, and what is left.

python -m tests.support.drills                    all of them
python -m tests.support.drills WORD ...           those with a word in their name
python -m tests.support.drills --out docs/evidence    all of them, and writes the pages of the manual

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

from drill_list import CELLS, COLLECTIVES, DEATHS, DRILLS, MAGICS, TRAININGS, TRANSFERS, Drill  # noqa: E402
from kernel_client import Cell, Kernel  # noqa: E402

from nbkit.notebook.cluster import registry  # noqa: E402

START = "%cluster start -n 2 --cpu"
HEALTHY = "%%distributed\nx = torch.ones(1); dist.all_reduce(x); int(x.item())"
GONE_SECONDS = 20.0  # until processes have ended, on a busy machine too
SHOWN_CHARACTERS = 220
ALL_FAILED = "CellError: Ranks 0-1 failed: "
_OF_SOURCE = re.compile(r"(-+> )?\d+ ")  # a line of code in a traceback

PAGES = {
    "drills-commands": {"Commands": MAGICS, "Push and pull": TRANSFERS},
    "drills-cells": {"Cells": CELLS},
    "drills-trainings": {"Collectives": COLLECTIVES, "Trainings": TRAININGS, "Ranks that die": DEATHS},
}
"""A page of the manual -> its headings, and the drills under each."""
SUBJECTS = {
    "drills-commands": "a wrong command, or a `%push` or `%pull` that fails",
    "drills-cells": "an error, a Stop or too much output in a cell",
    "drills-trainings": "a mistake in a training or a collective, or the death of a rank",
}


@dataclass(frozen=True)
class Outcome:
    """The answer to a drill. shown: its sentence. seconds: until it was complete. wrong: what is wrong, or ""."""

    drill: Drill
    shown: str
    seconds: float
    wrong: str = ""


def perform(kernel: Kernel, drill: Drill) -> Outcome:
    """Do what the drill says, read the output, and check that the next cells work as before."""
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
    return Outcome(drill, sentence(cell, drill.words), cell.seconds, "; ".join(wrong))


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


def sentence(cell: Cell, words: str) -> str:
    """Return the lines of a cell that say what is wrong and what to type.

    These are the lines of its error, else the first line with `words` and what to type, else its last lines.
    """
    errors = [content for _, kind, content in cell.messages if kind == "error"]
    text = "\n".join(errors[-1]["traceback"]) if errors else cell.text
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    hints = [line.strip() for line in cell.text.splitlines() if line.strip().startswith("→")]
    lines += [hint for hint in dict.fromkeys(hints[:1]) if hint not in lines]  # a rank's error
    found = [line for line in lines if words and words in line and not errors]
    if found:
        lines = list(dict.fromkeys([found[0], *hints[:1]]))
    elif not errors or len(lines) > 6:
        lines = [line for line in lines[-4:] if not (errors and _OF_SOURCE.match(line))]
    shown = re.sub(r"<[\w/|]+>", "", " ".join(lines))  # a kind of output, as Kernel writes it
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS - 1]}…"


def all_of(words: Sequence[str]) -> list[Drill]:
    """Return the drills that have one of `words` in their name, or all if there are no words."""
    return [drill for drill in DRILLS if not words or any(word in drill.name for word in words)]


def performed(drills: Sequence[Drill], home: Path) -> Iterator[Outcome]:
    """Yield the outcome of each drill, in one notebook. After the whole list, check that nothing is left running."""
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
    """Return the outcomes as lines of a Markdown table. ALL_FAILED and long runs of a character are left out."""
    lines = ["| mistake or failure | answer in the notebook | seconds |", "|---|---|---|"]
    for outcome in outcomes:
        shown = re.sub(r"(\w)\1{9,}…?", r"\1\1\1…", outcome.shown.removeprefix(ALL_FAILED)).replace("|", "\\|")
        shown = shown or "nothing: the cell ends well"
        answer = f"**{outcome.wrong}** {shown}" if outcome.wrong else shown
        lines.append(f"| {outcome.drill.name} | {answer} | {outcome.seconds:.2f} |")
    return lines


def summary(outcomes: Sequence[Outcome]) -> str:
    right = [each for each in outcomes if not each.wrong]
    seconds = sorted(each.seconds for each in outcomes)
    return (
        f"In {len(right)} of {len(outcomes)} drills, the notebook showed the expected answer. The median time until "
        f"the answer was complete is {statistics.median(seconds):.2f} s, and the longest is {seconds[-1]:.1f} s. After "
        "each drill on a cluster, the next cell ran on both ranks, and no additional process was left. After the end "
        "of the notebook, no process was left."
    )


def pages(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return the pages of the manual: their names and their text."""
    of = {outcome.drill: outcome for outcome in outcomes}
    what = (
        "A drill makes one mistake or failure in a real notebook. Some drills need no cluster; the others run on a "
        "cluster of two ranks. `make drills` runs all drills, and writes these pages.",
        summary(outcomes),
    )
    first = "On these pages you find what a notebook shows after each of {} mistakes and failures."
    rows = [f"| {subject} | [{_title(page)}]({page}.md) |" for page, subject in SUBJECTS.items()]
    lists = "\n".join(["| the notebook's answer to | page |", "|---|---|", *rows])
    lines = ["# Drills", first.format(len(outcomes)), *what, lists]
    written = {"drills": lines}
    for page, groups in PAGES.items():
        lines = [f"# {_title(page)}", f"On this page you find what a notebook shows after {SUBJECTS[page]}."]
        lines += [
            "In an error, the words after → are a hint, such as the next line to type. The last column has the seconds "
            f"until the answer is complete. Long answers are cut after {SHOWN_CHARACTERS} characters. "
            "[Drills](drills.md) says how these answers were made."
        ]
        if any(of[drill].shown.startswith(ALL_FAILED) for drills in groups.values() for drill in drills):
            lines[-1] += (
                f" This page leaves out the words `{ALL_FAILED.strip()}` at the beginning of an answer. They mean that "
                "all ranks failed."
            )
        if any("released at" in of[drill].shown for drills in groups.values() for drill in drills):
            lines[-1] += " *Released* means that a rank no longer waits for a rank that failed or died."
        for heading, drills in groups.items():
            lines += [f"## {heading}"] if len(groups) > 1 else []
            lines += ["\n".join(table([of[drill] for drill in drills]))]
        written[page] = lines
    return {page: "\n\n".join(lines) + "\n" for page, lines in written.items()}


def _title(page: str) -> str:
    return page.replace("-", ": ", 1).capitalize()


def main(arguments: Sequence[str], say: Callable[[str], None] = lambda text: print(text, flush=True)) -> int:
    """Return the exit status: 1 if the answer to a drill is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.drills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="word", help="only drills with one of these in their name")
    parser.add_argument("--out", type=Path, help="the folder for the pages of the manual; takes no words")
    asked = parser.parse_args(arguments)
    if asked.out is not None and asked.words:
        parser.error("--out needs all drills")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="drills") as home:
        for outcome in performed(all_of(asked.words), Path(home)):
            outcomes.append(outcome)
            mark = f"WRONG ({outcome.wrong})" if outcome.wrong else "right"
            say(f"{len(outcomes)} {outcome.drill.name}: {mark}, {outcome.seconds:.2f} s: {outcome.shown}")
    lines = [summary(outcomes), "", *table(outcomes)]
    say("\n".join(["", *lines]))
    if asked.out is not None:
        for page, text in pages(outcomes).items():
            (asked.out / f"{page}.md").write_text(text)
    return int(any(each.wrong for each in outcomes))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
