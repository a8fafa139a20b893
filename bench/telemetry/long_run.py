"""Measure the memory of a long training's processes.

Two ranks make steps of a tiny model as fast as they can, with records, output and a dashboard in a real kernel. The
memory of the kernel, the ranks, their parent and the controller at the end is compared with that after a third of the
steps. This shows anything that grows with every step.

This takes some minutes. The history on the ranks keeps a hundredth of what it usually keeps, so that it is full before
the measurement begins. With `--steps 1000000` the training runs until so many steps are made, with the usual
history. That takes hours on two ranks, which mostly wait for each other. One rank (`--ranks 1`) sends as many records
and lines, and takes half an hour of a core.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.rigs.kernel import Kernel
from bench.settings import Settings
from bench.table import Row, absolute

SECONDS, QUICK_SECONDS, EVERY_S = 170.0, 20.0, 1.0
SAID_EVERY = 60  # samples between two lines that print the memory
RANKS = 2
FEWEST, STUCK_S = 9, 180.0  # samples; seconds without a step until NoStep is raised
FLAT = 1.05

_START = """
import json, os
import nbkit
cluster = nbkit.Cluster.start({ranks}, cpu=True, name="long-run")
pids = cluster.run("import os; (os.getpid(), os.getppid())").values
"""
_SHORT_HISTORY = """
from nbkit.rank.train.step import history
history.KEPT = 100
"""
_TRAIN = """
x = [(torch.randn(1), torch.randn(1)) for _ in range(4096)]
def note(trainer, record):
    if rank == 0 and record["step"] % 50 == 0:
        print("step", record["step"], "loss", record["loss"])
        with open({folder!r} + "/step.new", "w") as file:
            file.write(str(record["step"]))
        os.replace({folder!r} + "/step.new", {folder!r} + "/step")
trainer = nbkit.Trainer(
    model=lambda: torch.nn.Linear(1, 1), loss=torch.nn.functional.mse_loss, data=x, batch_size=world_size,
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01), log_dir={folder!r} + "/runs", callbacks=[note],
    checkpoints=nbkit.Checkpoints(every=False), progress=False)
"""


def run(settings: Settings) -> list[Row]:
    """Return one row for each kind of process."""
    seconds = QUICK_SECONDS if settings.quick or settings.rounds else SECONDS
    enough = _Enough(seconds=0.0 if settings.steps else seconds, steps=settings.steps or 0)
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    train = "import os\n" + ("" if settings.steps else _SHORT_HISTORY) + _TRAIN.format(folder=str(folder))
    ranks = min(settings.ranks or (RANKS,))
    with Kernel(folder / "kernel") as kernel:
        try:
            kernel.run(_START.format(ranks=ranks))
            pids = json.loads(kernel.run("print(json.dumps(sorted(pids.items())))").text)
            kernel.run(f"cluster.run({train!r})")
            kernel.run("handle = cluster.run('trainer.fit(10**9)', detach=True)\ndashboard = nbkit.Dashboard()")
            parent = psutil.Process(pids[0][1][1])
            ranks = [psutil.Process(pid) for _, (pid, _) in pids]
            others = [each for each in psutil.process_iter() if _is_controller(each, kernel.pid)]
            kinds = {"kernel": [psutil.Process(kernel.pid)], "ranks": ranks, "parent": [parent], "controller": others}
            steps, seen = _sampled(kinds, folder / "step", enough)
        finally:
            kernel.run("cluster.stop()", may_fail=True)
    first, last = (bisect_left(steps, steps[-1] * share / 3) for share in (1, 2))
    rows = []
    for kind, memory in seen.items():
        grown = max(one[-1] / one[first] for one in memory)
        added = max(one[-1] - one[last] for one in memory) / 1e6
        what = f"memory of a long training, {kind}: after {steps[-1]:,.0f} steps / after a third of them"
        later = f"{max(one[-1] for one in memory) / 1e6:.0f} MB, {added:+.2f} MB in the last third"
        rows.append(absolute(what, [grown], FLAT, "x", peer=later))
    return rows


def _is_controller(process: psutil.Process, kernel: int) -> bool:
    try:
        line = " ".join(process.cmdline())
        return "controller" in line and any(each.pid == kernel for each in process.parents())
    except psutil.Error:
        return False


@dataclass(frozen=True)
class _Enough:
    """The end of sampling: when both `seconds` since the first step and `steps` steps have passed."""

    seconds: float
    steps: int


def _sampled(
    kinds: dict[str, list[psutil.Process]], step: Path, enough: _Enough
) -> tuple[list[float], dict[str, list[list[float]]]]:
    """Return steps, and the bytes of each process of each kind then. Raises NoStep if none is made for a while."""
    steps: list[float] = []
    seen: dict[str, list[list[float]]] = {
        kind: [[] for _ in processes] for kind, processes in kinds.items() if processes
    }
    began = newest = time.monotonic()
    while time.monotonic() < began + enough.seconds or len(steps) < FEWEST or steps[-1] < enough.steps:
        time.sleep(EVERY_S)
        now = float(step.read_text()) if step.exists() else 0.0
        if now > (steps[-1] if steps else 0.0):
            newest = time.monotonic()
        elif time.monotonic() > newest + STUCK_S:
            raise NoStep(f"no step behind step {now:.0f} in {STUCK_S:.0f} s")
        if not steps:
            began = time.monotonic()
        if now:
            steps.append(now)
            for kind, memory in seen.items():
                for process, values in zip(kinds[kind], memory, strict=True):
                    values.append(float(process.memory_info().rss))
            if not len(steps) % SAID_EVERY:
                newest_mb = (f"{kind} {max(one[-1] for one in memory) / 1e6:.1f}" for kind, memory in seen.items())
                print(f"step {now:,.0f}: {', '.join(newest_mb)} MB", file=sys.stderr, flush=True)
    return steps, seen


class NoStep(Exception):
    """Raised when the training makes no step for STUCK_S seconds."""
