"""Compare a training step in a cell with the same step under torchrun.

The step is DDP by hand, and nbkit's Trainer with default arguments. All jobs stay alive. Each is frozen (SIGSTOP) while
a block of another runs, so that not even its heartbeats are in the other's figures.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import psutil

from bench.rigs.kernel import Kernel, environment
from bench.rigs.peers import start_nbkit, stop_nbkit
from bench.settings import Settings, shuffled
from bench.stats import ratio
from bench.table import Row, compared

SOURCE = Path(__file__).parent / "workload.py"
SETTLE_SECONDS = 0.1
READY_SECONDS = 120.0
PLACE = """import json, os
with open(f"place-{rank}", "w") as file:
    json.dump([sorted(os.sched_getaffinity(0)), torch.get_num_threads()], file)
"""


@dataclass(frozen=True)
class Block:
    """The cost of a block, per step. seconds, cpu: on rank 0. whole_cpu: of all processes of the arm."""

    seconds: float
    cpu: float
    whole_cpu: float
    loss: float


class Frozen:
    """Processes that run only within `with`."""

    def __init__(self, roots: list[int]) -> None:
        found = [psutil.Process(pid) for pid in roots]
        children = [child for process in found for child in process.children(recursive=True)]
        self.processes = list({process.pid: process for process in [*found, *children]}.values())
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> Self:
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGSTOP)

    def cpu_seconds(self) -> float:
        """Return the CPU-seconds that all processes together have taken so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)


class CellArm:
    """A cluster that holds both loops. A block is a `%%distributed` cell."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.kernel = stack.enter_context(Kernel(self.folder))
            start_nbkit(self.kernel, self.ranks)
            stack.callback(stop_nbkit, self.kernel)
            self._prepare()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.frozen.thaw()
        self._stack.close()

    def _prepare(self) -> None:
        self.kernel.run(f"%%distributed\n{SOURCE.read_text()}")
        self.kernel.run("%%distributed\nby_hand = prepare_by_hand()\ntrainer = prepare_trainer()")
        self.kernel.run(f"%%distributed\n{PLACE}")
        places = [json.loads((self.folder / f"place-{rank}").read_text()) for rank in range(self.ranks)]
        self.cores, self.threads = [place[0] for place in places], places[0][1]
        entry = json.loads((self.folder / "clusters" / "bench" / "cluster.json").read_text())
        pids = [entry[role]["pid"] for role in ("controller", "parent")] + [rank["pid"] for rank in entry["ranks"]]
        self.frozen = Frozen([self.kernel.pid, *pids])

    def block(self, which: str, steps: int) -> Block:
        """Train `steps` steps and return their cost. which: `by_hand` or `trainer`."""
        record = self.folder / "record.jsonl"
        record.unlink(missing_ok=True)
        with self.frozen:
            before = self.frozen.cpu_seconds()
            self.kernel.run(f"%%distributed\ntimed_block({which}, {steps}, {str(record)!r})")
            spent = self.frozen.cpu_seconds() - before
        return Block(**json.loads(record.read_text()), whole_cpu=spent / steps)


class TorchrunArm:
    """A job under torchrun. Each rank waits for orders on a pipe."""

    def __init__(self, folder: Path, which: str, cores: list[list[int]], threads: int) -> None:
        self.folder, self.which, self.cores, self.threads = folder, which, cores, threads

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        ranks = range(len(self.cores))
        for name in [f"{kind}-{rank}" for rank in ranks for kind in ("orders", "done")]:
            os.mkfifo(self.folder / name)
        script = str(SOURCE.with_name("torchrun_worker.py"))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(ranks))]
        arguments = [script, str(self.folder), self.which, json.dumps(self.cores), str(self.threads)]
        with open(self.folder / "torchrun.log", "wb") as log:
            self.job = subprocess.Popen(
                [*launcher, *arguments], env=environment(self.folder), cwd=self.folder, stdout=log, stderr=log
            )
        # Opened for both directions, so that opening does not wait for the other end.
        self.orders = [self._pipe(f"orders-{rank}") for rank in ranks]
        self.done = [self._pipe(f"done-{rank}") for rank in ranks]
        try:
            self._order(1)
        except BaseException:
            self.__exit__()
            raise
        self.frozen = Frozen([self.job.pid])
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "frozen"):
            self.frozen.thaw()
        self.job.terminate()
        self.job.wait(30)
        for pipe in [*self.orders, *self.done]:
            pipe.close()

    def block(self, steps: int) -> Block:
        """Train `steps` steps and return their cost."""
        with self.frozen:
            before = self.frozen.cpu_seconds()
            taken = self._order(steps)
            spent = self.frozen.cpu_seconds() - before
        return Block(**taken, whole_cpu=spent / steps)

    def _order(self, steps: int) -> dict[str, float]:
        record = self.folder / "record.jsonl"
        record.unlink(missing_ok=True)
        for pipe in self.orders:
            pipe.write(json.dumps({"steps": steps, "record": str(record)}).encode() + b"\n")
        for pipe in self.done:
            self._await(pipe)
        taken: dict[str, float] = json.loads(record.read_text())
        return taken

    def _await(self, pipe: IO[bytes]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not select.select([pipe], [], [], 0.2)[0]:
            if self.job.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"torchrun: {(self.folder / 'torchrun.log').read_text()[-3000:]}")
        pipe.readline()

    def _pipe(self, name: str) -> IO[bytes]:
        return open(os.open(self.folder / name, os.O_RDWR), "r+b", buffering=0)


RANKS = 2
ROUNDS = 40
STEPS = 5  # in a block
BAR = 1.02
COMPARISONS = (
    ("DDP GPT step, by hand in a cell / under torchrun", "by hand, cell", "by hand, torchrun"),
    ("DDP GPT step, Trainer in a cell / under torchrun", "Trainer, cell", "Trainer, torchrun"),
    ("DDP GPT step, Trainer in a cell / by hand under torchrun", "Trainer, cell", "by hand, torchrun"),
)


def run(settings: Settings) -> list[Row]:
    """Return three rows."""
    folder = settings.folder
    with (
        CellArm(folder / "cell", RANKS) as cell,
        TorchrunArm(folder / "by-hand", "by_hand", cell.cores, cell.threads) as by_hand,
        TorchrunArm(folder / "trainer", "trainer", cell.cores, cell.threads) as trainer,
    ):
        arms = {
            "by hand, cell": lambda: cell.block("by_hand", STEPS),
            "by hand, cell again": lambda: cell.block("by_hand", STEPS),
            "by hand, torchrun": lambda: by_hand.block(STEPS),
            "Trainer, cell": lambda: cell.block("trainer", STEPS),
            "Trainer, cell again": lambda: cell.block("trainer", STEPS),
            "Trainer, torchrun": lambda: trainer.block(STEPS),
        }
        blocks: dict[str, list[Block]] = {arm: [] for arm in arms}
        for order in [list(arms), *shuffled(list(arms), settings.count(ROUNDS))]:
            for arm in order:
                blocks[arm].append(arms[arm]())
    # The first round was the warm-up.
    seconds = {arm: [block.seconds for block in of[1:]] for arm, of in blocks.items()}
    rows = []
    for what, ours, theirs in COMPARISONS:
        note = _cpu(blocks[ours][1:], blocks[theirs][1:])
        again = seconds[f"{ours} again"]
        rows.append(compared(what, seconds[ours], theirs, seconds[theirs], again, BAR, "ms", note=note))
    return rows


def _cpu(ours: list[Block], theirs: list[Block]) -> str:
    """Return a note with two ratios of CPU-seconds, which vary less than wall time.

    All processes are those of the ranks, the notebook, the controller and torchrun.
    """
    rank = ratio([block.cpu for block in ours], [block.cpu for block in theirs])
    whole = ratio([block.whole_cpu for block in ours], [block.whole_cpu for block in theirs])
    return (
        f"; CPU-seconds of rank 0: {rank.middle:.3f} x [{rank.low:.3f}, {rank.high:.3f}],"
        f" of all processes {whole.middle:.3f} x [{whole.low:.3f}, {whole.high:.3f}]"
    )
