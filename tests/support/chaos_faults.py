"""The faults of `make chaos`. A training must survive each with an equal curve, or end in order."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbkit.errors import NbkitError
from tests.support.chaos_bench import RUN_SECONDS, SAVED, STEPS, STRATEGIES, SWITCHED, Bench, Wrong


@dataclass
class Run:
    """A training and its fault. after: finished steps; delay: more seconds, so that it happens anywhere in a step."""

    number: int
    fault: str
    strategy: str
    other: str
    rank: int
    after: int
    delay: float
    place: str
    folder: Path

    @classmethod
    def drawn(cls, number: int, folder: Path) -> Run:
        draw = random.Random(number)
        fault = draw.choice(sorted(FAULTS))
        one, other = draw.sample(STRATEGIES, 2)
        if draw.random() < 0.5:
            other = ""
        moment = draw.randrange(1, STEPS - 3), draw.random() * 0.2, draw.choice(("forward", "update"))
        return cls(number, fault, one, other, draw.randrange(4), *moment, folder / f"saved{number}")

    @property
    def begin(self) -> str:
        switches = f", switches={{{SWITCHED}: {self.other!r}}}" if self.other else ""
        return f"trainer = make({self.strategy!r}, {str(self.folder)!r}{switches})"

    def __str__(self) -> str:
        way = f"{self.strategy}{f' -> {self.other}' if self.other else ''}"
        return f"run {self.number}: {self.fault}, rank {self.rank}, after step {self.after} + {self.delay:.2f} s, {way}"


def killed(bench: Bench, run: Run) -> str:
    """Kill a rank by a signal from outside, at any moment."""
    number = random.Random(run.number).choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS))
    return _from_outside(bench, run, lambda: os.kill(bench.cluster.entry.ranks[run.rank].pid, number))


def stopped_by_the_system(bench: Bench, run: Run) -> str:
    """Stop a rank for one second: the others wait, and no rank is taken for dead."""

    def halt() -> None:
        pid = bench.cluster.entry.ranks[run.rank].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)

    return _from_outside(bench, run, halt)


def hung(bench: Bench, run: Run) -> str:
    """Stop a rank, so that it hangs: `why` must name it. Then kill it, so that it is replaced."""

    def halt() -> None:
        pid = bench.cluster.entry.ranks[run.rank].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        said = str(bench.cluster.why())
        os.kill(pid, signal.SIGKILL)
        if f"ank {run.rank} " not in said:
            raise Wrong(f"why does not name rank {run.rank}: {said}")

    return _from_outside(bench, run, halt)


def _from_outside(bench: Bench, run: Run, act: Callable[[], None]) -> str:
    bench.cluster.run(run.begin, timeout=RUN_SECONDS)
    handle = bench.cluster.run(f"trainer.fit({STEPS})\nlosses()", detach=True)
    bench.reach(run.after)
    time.sleep(run.delay)
    act()
    try:
        values = handle.wait(timeout=RUN_SECONDS).values
    except NbkitError as error:
        return _ended_in_order(bench, run, error)
    bench.check(values)
    return "equal"


def _ended_in_order(bench: Bench, run: Run, error: NbkitError) -> str:
    if not error.hint and "trainer.load(" not in getattr(error, "traceback", ""):
        raise Wrong(f"ended without a word of what to do: {error}")
    if run.folder.exists():
        try:
            bench.goes_on(run.folder)
        except NbkitError as unread:
            # It died each time the first checkpoint was written, so there is no checkpoint, and the error says so.
            if run.after > SAVED + 1 or "TornCheckpoint" not in str(unread):
                raise
    elif run.after > SAVED + 1:
        raise Wrong(f"ended without a checkpoint: {error}")
    else:
        bench.end()  # one of its ranks may be dead, and no other cluster was started
    return f"ended: {error.what[:100]}"


def crashed(bench: Bench, run: Run) -> str:
    """Let the program end a rank, and each new rank at the same place: after three times nbkit blames the program."""
    return _from_inside(bench, run, random.Random(run.number).choice(("SIGSEGV", "SIGKILL")))


def exception(bench: Bench, run: Run) -> str:
    """Raise an exception, which ends the cell. The same Trainer trains on in the next one."""
    return _from_inside(bench, run, "exception")


def out_of_memory(bench: Bench, run: Run) -> str:
    """Let a rank run out of memory in its forward pass or its update."""
    return _from_inside(bench, run, "memory")


def _from_inside(bench: Bench, run: Run, what: str) -> str:
    bench.cluster.run(f"{run.begin}\nat[{run.after}] = {run.rank}, {what!r}, {run.place!r}", timeout=RUN_SECONDS)
    try:
        values = bench.cluster.run(f"trainer.fit({STEPS})\nlosses()", timeout=RUN_SECONDS).values
    except NbkitError as error:
        if "was stopped after" in str(error):
            raise Wrong(f"it hangs: {error}") from error
        if what == "exception" and "planted" not in str(error):
            raise Wrong(f"the cause is not named: {error}") from error
        if what.startswith("SIG"):
            if "it is the program" not in str(error):
                raise Wrong(f"it is not said that it is the program: {error}") from error
            return _ended_in_order(bench, run, error)
        try:
            values = bench.cluster.run(f"trainer.fit(until={STEPS})\nlosses()", timeout=RUN_SECONDS).values
        except NbkitError as another:
            return _ended_in_order(bench, run, another)
        bench.check(values)
        return f"ended, and trained on: {error.what[:60]}"
    bench.check(values)
    return "equal"


def disk_full(bench: Bench, run: Run) -> str:
    """Fill the disk: nothing can be saved. The user is told, and the training goes on."""
    run.folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", run.folder], check=True)
    try:
        bench.cluster.run(run.begin.replace(str(run.folder), str(run.folder / "saved")), timeout=RUN_SECONDS)
        results = bench.cluster.run(f"trainer.fit({STEPS})\nlosses()", timeout=RUN_SECONDS)
    finally:
        subprocess.run(["umount", run.folder], check=True)
    bench.check(results.values)
    if "not saved at step" not in "".join(results.output.values()):
        raise Wrong("nobody was told that nothing was saved")
    return "equal, not saved"


def parent_killed(bench: Bench, run: Run) -> str:
    """Kill the parent of the ranks, or tell it to end."""
    number = random.Random(run.number).choice((signal.SIGKILL, signal.SIGTERM))
    return _cluster_gone(bench, run, lambda entry: os.kill(entry.parent.pid, number))


def controller_killed(bench: Bench, run: Run) -> str:
    """Kill the controller, which connects the notebook with the ranks."""
    return _cluster_gone(bench, run, lambda entry: os.kill(entry.controller.pid, signal.SIGKILL))


def _cluster_gone(bench: Bench, run: Run, act: Callable[[Any], None]) -> str:
    bench.cluster.run(run.begin, timeout=RUN_SECONDS)
    handle = bench.cluster.run(f"trainer.fit({100 * STEPS})", detach=True)
    bench.reach(run.after)
    time.sleep(run.delay)
    act(bench.cluster.entry)
    try:
        handle.wait(timeout=RUN_SECONDS)
    except NbkitError as error:
        if "saved to" not in str(error):
            raise Wrong(f"ended without a checkpoint: {error}") from error
        ended = f"ended: {error.what[:60]}"
    else:
        raise Wrong("the training has gone on to its end")
    bench.end()
    load = f"trainer = make('ddp')\ntrainer.load({str(run.folder)!r})\nstep = trainer.step"
    bench.cluster.run(load, timeout=RUN_SECONDS)
    values = bench.cluster.run("trainer.fit(2)\nlosses()", timeout=RUN_SECONDS).values
    alone = "trainer = make('ddp')\ntrainer.fit(until=step + 2)\nlosses()"
    kept, bench.alone = bench.alone, bench.cluster.run(alone, timeout=RUN_SECONDS).values[0]
    try:
        bench.check(values, steps=len(bench.alone))
    finally:
        bench.alone = kept
    return ended


def kernel_killed(bench: Bench, run: Run) -> str:
    """Kill the notebook's process while the training is detached: another one attaches, and gets the curve."""
    _ = bench.cluster.entry  # the first use also trains the undisturbed curve
    bench.end()
    code = (
        "import sys, time\nfrom tests.support.chaos_bench import Bench\nbench = Bench()\nbench.alone = [0.0]\n"
        f"bench.cluster.run({run.begin!r})\n"
        f"bench.cluster.run('trainer.fit({STEPS})\\nlosses()', detach=True)\nbench.reach({run.after})\n"
        "print('there', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as kernel:
        assert kernel.stdout is not None
        there = any("there" in line for line in kernel.stdout)
        time.sleep(run.delay)
        kernel.kill()
    if not there:
        raise Wrong("the other notebook did not come to train")
    cluster = bench.take("chaos")
    if (held := cluster.connection.latest) is not None:
        held.done.result(RUN_SECONDS)
    bench.check(cluster.run("losses()", timeout=RUN_SECONDS).values)
    return "equal, attached"


FAULTS: dict[str, Callable[[Bench, Run], str]] = {
    function.__name__.replace("_", " "): function
    for function in (
        *(killed, stopped_by_the_system, hung, crashed, exception, out_of_memory),
        *(disk_full, parent_killed, controller_killed, kernel_killed),
    )
}


def faults(bench: Bench, folder: Path, first: int, number: int, only: str = "") -> list[str]:
    """Make `number` runs from `first` on, and print each as it ends. Return those that went wrong."""
    wrong, outcomes = [], Counter[str]()
    for seed in range(first, first + number):
        run = Run.drawn(seed, folder)
        run.fault = only or run.fault
        try:
            outcome = FAULTS[run.fault](bench, run)
        except Exception as error:
            outcome = f"WRONG: {type(error).__name__}: {error}"
            wrong.append(f"{run}: {outcome}")
            with contextlib.suppress(Exception):
                bench.end()
        outcomes[outcome.partition(":")[0]] += 1
        print(f"{run}: {outcome}", flush=True)
        shutil.rmtree(run.folder, ignore_errors=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()), f"of {number}", flush=True)
    return wrong
