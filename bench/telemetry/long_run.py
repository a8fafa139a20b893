"""Memory of a long training's processes: steps of a tiny model, as fast as they go, on two ranks, with records, output
and a dashboard in a real kernel. What the kernel, the ranks, their parent and the controller take in the end, beside
what they took after a third of the steps: what grows with every step shows there, long before a million of them.

The history on the ranks keeps a hundredth of what it keeps elsewhere, so that it is full before the measuring begins.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil

from bench.rigs.kernel import Kernel
from bench.settings import Settings
from bench.table import Row, absolute

SECONDS, QUICK_SECONDS, EVERY_S = 170.0, 20.0, 1.0
FLAT = 1.05

_START = """
import json, os
import nbkit
cluster = nbkit.Cluster.start(2, cpu=True, name="long-run")
pids = cluster.run("import os; (os.getpid(), os.getppid())").values
"""
_TRAIN = """
from nbkit.rank.train.step import history
history.KEPT = 100
x = [(torch.randn(4), torch.randn(4)) for _ in range(64)]
def note(trainer, record):
    if rank == 0 and record["step"] % 50 == 0:
        print("step", record["step"], "loss", record["loss"])
        with open({folder!r} + "/step.new", "w") as file:
            file.write(str(record["step"]))
        os.replace({folder!r} + "/step.new", {folder!r} + "/step")
trainer = nbkit.Trainer(model=lambda: torch.nn.Linear(4, 4), loss=torch.nn.functional.mse_loss, data=x, batch_size=8,
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01), log_dir={folder!r} + "/runs", callbacks=[note],
    save_every=False, progress=False)
"""


def run(settings: Settings) -> list[Row]:
    """A row for each kind of process."""
    seconds = QUICK_SECONDS if settings.quick or settings.rounds else SECONDS
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    train = "import os\n" + _TRAIN.format(folder=str(folder))
    with Kernel(folder / "kernel") as kernel:
        try:
            kernel.run(_START)
            pids = json.loads(kernel.run("print(json.dumps(sorted(pids.items())))").text)
            kernel.run(f"cluster.run({train!r})")
            kernel.run("handle = cluster.run('trainer.fit(10**9)', detach=True)\ndashboard = nbkit.Dashboard()")
            parent = psutil.Process(pids[0][1][1])
            ranks = [psutil.Process(pid) for _, (pid, _) in pids]
            others = [each for each in psutil.process_iter() if _is_controller(each, kernel.pid)]
            kinds = {"kernel": [psutil.Process(kernel.pid)], "ranks": ranks, "parent": [parent], "controller": others}
            steps, seen = _sampled(kinds, folder / "step", seconds)
        finally:
            kernel.run("cluster.stop()", may_fail=True)
    third, rows = len(steps) // 3, []
    for kind, memory in seen.items():
        grown = max(one[-1] / one[third] for one in memory)
        added = max(one[-1] - one[-third] for one in memory) / 1e6
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


def _sampled(
    kinds: dict[str, list[psutil.Process]], step: Path, seconds: float
) -> tuple[list[float], dict[str, list[list[float]]]]:
    """Steps, and the bytes of each process of each kind, sampled until so many seconds after the first step."""
    steps: list[float] = []
    seen: dict[str, list[list[float]]] = {
        kind: [[] for _ in processes] for kind, processes in kinds.items() if processes
    }
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(steps) < 9:
        time.sleep(EVERY_S)
        if not step.exists():
            deadline += EVERY_S * (not steps)
            continue
        steps.append(float(step.read_text()))
        for kind, memory in seen.items():
            for process, values in zip(kinds[kind], memory, strict=True):
                values.append(float(process.memory_info().rss))
    return steps, seen
