"""Trainings that something happens to, beside one that was left alone: the curve goes on, or the end is in order.

python -m tests.support.chaos                   all of it, as make chaos
python -m tests.support.chaos faults N=20 SEED=3    20 runs from seed 3 on; others: kill, pairs
python -m tests.support.chaos kill N=2 zero3 "dp=2 pp=2"    in these strategies alone

kill    a rank is killed in each strategy: seconds to the first step after it, by part; steps lost; the curve.
faults  one of a list, at a random moment, under a random strategy, with a switch and saves on the way. Each run ends
        with its curve equal to that of one left alone, or in order: with its reason, and a checkpoint that goes on.
pairs   two of 4 and of 8 ranks at once, buddies of each other or not.

What is random is drawn from the number of the run: SEED=17 N=1 makes run 17 again.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbkit import Cluster
from nbkit.errors import NbkitError
from nbkit.notebook.cluster import registry

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp shard=2", "tp=4", "pp=4", "dp=2 tp=2", "dp=2 pp=2")
STEPS, SWITCHED, SAVED = 24, 9, 5
EQUAL = 1e-10
RUN_SECONDS = 240.0  # a run that takes longer hangs, on a busy machine too

SETUP = """
import os, signal, time
import torch
from torch.nn import functional as F
from nbkit.rank.models.gpt import GPT, Block, GPTConfig

torch.set_default_dtype(torch.float64)
at = {}    # step -> (rank, what happens in it)
happened = []

class Fails(torch.optim.AdamW):
    def step(self, closure=None):
        super().step()
        if training := globals().get("trainer"):
            stamps = globals().setdefault("stamps", [])
            stamps.append((training.step, time.time(), time.process_time()))
        happens("update")

def happens(place):
    training = globals().get("trainer")
    here = at.get(training.step if training is not None else -1)
    if here is None or here[0] != rank or here[2] != place or here in happened:
        return
    happened.append(here)
    if here[1] == "exception":
        raise ValueError("planted")
    if here[1] == "memory":
        raise torch.OutOfMemoryError("planted")
    os.kill(os.getpid(), getattr(signal, here[1]))

class Passing(Block):
    def forward(self, x):
        happens("forward")
        return super().forward(x)

def model(layers=4, width=16, vocab=24, block=8):
    made = GPT(GPTConfig(vocab=vocab, block=block, layers=layers, heads=4, width=width, dropout=0.1))
    for block in made.blocks:
        block.__class__ = Passing
    return made

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

draw = torch.Generator().manual_seed(5)
rows = [tuple(torch.randint(24, (2, 8), generator=draw)) for _ in range(36)]

def pace(trainer, record):
    time.sleep(PAUSE)

def make(strategy, folder=None, **options):
    at.clear()
    happened.clear()
    given = dict(model=model, batch_size=8, clip_norm=1.0, on_oom="fit", callbacks=[pace], backup_every=1)
    saves = dict(save_path=folder, save_every=SAVED) if folder else {}
    return nbkit.Trainer(loss=loss, optimizer=lambda m: Fails(m.parameters(), lr=0.01), data=rows, strategy=strategy,
                         log_dir=None, progress=False, **{**given, **saves, **options})

def marks():
    from nbkit.rank.train.replace import stages
    return [(mark.stage, mark.wall, mark.cpu) for mark in stages.marks]

def losses():
    return [record["loss"] for record in trainer.history]
"""


@dataclass
class Run:
    """One training and what is to happen to it. after: finished steps; delay: seconds, to meet a step anywhere."""

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


class Wrong(Exception):
    """A run neither went on equal nor ended in order."""


class Bench:
    """The cluster that runs share until one of them ends it, and the curve of a training that is left alone."""

    def __init__(self, n: int = 4, pause: float = 0.02) -> None:
        self.n, self.pause = n, pause
        self._cluster: Cluster | None = None
        self.alone: list[float] = []

    @property
    def cluster(self) -> Cluster:
        """One that works."""
        if self._cluster is None:
            self._cluster = Cluster.start(self.n, cpu=True, name="chaos", ttl=600)
            self.set_up(self._cluster)
        return self._cluster

    def set_up(self, cluster: Cluster) -> None:
        cluster.run(f"PAUSE, SAVED = {self.pause}, {SAVED}\n{SETUP}", timeout=RUN_SECONDS)
        if not self.alone:
            cluster.run(f"trainer = make('ddp')\ntrainer.fit({STEPS})", timeout=RUN_SECONDS)
            self.alone = cluster.run("losses()").values[0]

    def take(self, name: str) -> Cluster:
        """The cluster that another process has started."""
        self.end()
        self._cluster = Cluster.attach(name)
        return self._cluster

    def end(self) -> None:
        """End the cluster; raises Wrong where something is left of it."""
        if (cluster := self._cluster) is None:
            return
        self._cluster = None
        entry = cluster.entry
        with contextlib.suppress(NbkitError):
            cluster.stop()
        registry.end(entry)
        if left := entry.left():
            raise Wrong(f"{len(left)} processes are left of the cluster")

    def check(self, values: dict[int, Any], steps: int = STEPS) -> None:
        """Every rank has the curve of the training that was left alone."""
        for rank in range(self.n):
            found = values.get(rank) or []
            if len(found) != steps:
                raise Wrong(f"rank {rank} has {len(found)} losses of {steps}")
            apart = max(abs(one - other) for one, other in zip(found, self.alone, strict=False))
            if apart > EQUAL:
                raise Wrong(f"rank {rank}: losses differ by {apart:.2g}")

    def reach(self, step: int) -> None:
        """Return when the training has made so many steps, or has ended."""
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            told = self.cluster.connection.client.ask(range(self.n), "status")
            steps = [each["progress"].get("step", 0) for each in told.values() if each["training"]]
            if max(steps, default=0) >= step or self.cluster.connection.busy() is None:
                return
            time.sleep(0.02)

    def goes_on(self, folder: Path) -> None:
        """A new cluster loads the checkpoint, and the curve goes on."""
        self.end()
        self.cluster.run(f"trainer = make('ddp', {str(folder)!r})\ntrainer.load({str(folder)!r})", timeout=RUN_SECONDS)
        self.cluster.run(f"trainer.fit(until={STEPS})", timeout=RUN_SECONDS)
        self.check(self.cluster.run("losses()").values)


# What happens: begin the run, let it happen, and say how it ended --------------------------------------------------


def killed(bench: Bench, run: Run) -> str:
    """From outside, at any moment."""
    number = random.Random(run.number).choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS))
    return _from_outside(bench, run, lambda: os.kill(bench.cluster.entry.ranks[run.rank].pid, number))


def stopped_by_the_system(bench: Bench, run: Run) -> str:
    """For a moment: everybody waits, and nobody is called dead."""

    def halt() -> None:
        pid = bench.cluster.entry.ranks[run.rank].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)

    return _from_outside(bench, run, halt)


def hung(bench: Bench, run: Run) -> str:
    """For good: the sentence names the rank, and who ends it has it replaced."""

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
            # It died again and again while the first one was being written: that is said, and there is no other.
            if run.after > SAVED + 1 or "TornCheckpoint" not in str(unread):
                raise
    elif run.after > SAVED + 1:
        raise Wrong(f"ended without a checkpoint: {error}")
    return f"ended: {error.what[:100]}"


def crashed(bench: Bench, run: Run) -> str:
    """The program itself ends a rank, at the same place on the new one: three times, and it is the program."""
    return _from_inside(bench, run, random.Random(run.number).choice(("SIGSEGV", "SIGKILL")))


def exception(bench: Bench, run: Run) -> str:
    """The cell ends with it; the same Trainer trains on in the next one."""
    return _from_inside(bench, run, "exception")


def out_of_memory(bench: Bench, run: Run) -> str:
    """On one rank, in its forward pass or its update."""
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
    """Nothing can be saved: that is said, and the training goes on."""
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
    """By force, or told to end."""
    number = random.Random(run.number).choice((signal.SIGKILL, signal.SIGTERM))
    return _cluster_gone(bench, run, lambda entry: os.kill(entry.parent.pid, number))


def controller_killed(bench: Bench, run: Run) -> str:
    """The way from the notebook to the ranks."""
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
    """The notebook's process, while the training is detached: another one attaches, and has the curve."""
    bench.end()
    code = (
        "import sys, time\nfrom tests.support import chaos\nbench = chaos.Bench()\nbench.alone = [0.0]\n"
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
    """Runs `first` and so on, each printed as it ends; those that went wrong."""
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


@contextlib.contextmanager
def home() -> Iterator[Path]:
    """Clusters started inside live in a folder of their own, and none survives it."""
    with tempfile.TemporaryDirectory(prefix="nbkit-chaos-") as folder:
        before, os.environ["NBKIT_HOME"] = os.environ.get("NBKIT_HOME"), folder
        try:
            yield Path(folder)
        finally:
            for entry in registry.entries():
                registry.end(entry)
            del os.environ["NBKIT_HOME"]
            if before is not None:
                os.environ["NBKIT_HOME"] = before


def main(words: Sequence[str]) -> int:
    strategies = [word for word in words if word in STRATEGIES]
    words = [word for word in words if word not in STRATEGIES]
    numbers = {name: int(value) for name, _, value in (word.partition("=") for word in words) if value}
    parts = [word for word in words if "=" not in word]
    wrong: list[str] = []
    with home() as folder:
        if not parts or "faults" in parts:
            bench = Bench()
            only = next((word for word in parts if word in FAULTS), "")
            wrong += faults(bench, folder, numbers.get("SEED", 0), numbers.get("N", 200), only)
            bench.end()
        from tests.support.chaos_kill import kill, pairs

        if not parts or "kill" in parts:
            bench = Bench()
            wrong += kill(bench, numbers.get("N", 10), strategies or STRATEGIES)
            bench.end()
        if not parts or "pairs" in parts:
            wrong += pairs((4, 8))
    for line in wrong:
        print(line)
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
