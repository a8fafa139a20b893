"""Attach to unchanged programs of six libraries, and compare the parts of their steps with a reference.

The reference is nbkit's Trainer, if it does the same work. TRL also computes metrics, and FSDP2 waits where nbkit's
zero2 does not. There the reference is torch's profiler, for the same steps of the same program (profiled.py). It does
not know which part of the communication was a wait for a late rank, so the sum is compared.
The programs and the Trainer train the same model with the same data, over a loopback interface that `tc tbf` slows
down. The model and the loader sleep, so that load of the machine changes little (bench/telemetry/libraries.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from bench.rigs.kernel import environment
from bench.settings import Settings
from bench.slow.slow_link import limited
from bench.table import Row, absolute, skipped
from bench.telemetry.profiled import parts_of
from nbkit import job_folder
from nbkit.errors import UsageError
from nbkit.notebook.cluster.job import AttachedJob
from nbkit.notebook.run.reader import read_run
from nbkit.records.record_file import newest_run

PROGRAMS = {
    "ddp": ("plain DDP", ""),
    "fsdp2": ("FSDP2", ""),
    "accelerate": ("Accelerate", "accelerate"),
    "lightning": ("Lightning", "lightning"),
    "hf_trainer": ("Trainer of transformers", "transformers"),
    "trl": ("SFTTrainer of TRL", "trl"),
}
"""Function in libraries.py -> (its name in the table, the package that it needs)."""
PROFILED = ("fsdp2", "trl")
"""Programs that are compared with what torch's profiler says of them, not with the Trainer."""
PARTS = ("compute", "exposed", "waiting", "data")
RANKS = range(2)
STEPS = 30
"""The picture shows medians of 20 steps. The first steps are left out."""
ATTACHED, ATTACH_SECONDS = 5, 1.0
MBIT = 160  # a transfer must end within the 200 ms after which TCP sends again
_TCP = {"tcp_early_retrans": 3, "tcp_slow_start_after_idle": 0}
"""Without these, small messages between large ones wait for 200 ms on such a link."""
WITHIN, COUNTS = 0.1, 0.01
"""The allowed difference of a part from the same part of the reference. Parts of less than COUNTS seconds are not
compared."""
READY_SECONDS = 300.0

Parts = dict[tuple[int, str], float]  # (rank, part) -> seconds


def run(settings: Settings) -> list[Row]:
    """Return two rows for each program: how far its parts are off, and how long it takes to attach."""
    if settings.isolated:
        with limited(MBIT) as slow:
            if slow:
                for name, value in _TCP.items():
                    Path(f"/proc/sys/net/ipv4/{name}").write_text(str(value))
                return _rows(settings.folder)
    return [skipped("parts of a step, attached", "nbkit's Trainer", "no private network namespace here")]


def _rows(folder: Path) -> list[Row]:
    rows: list[Row] = []
    own = _of_trainer(folder / "nbkit_ddp", "nbkit_ddp")
    for program, (name, needs) in PROGRAMS.items():
        if needs and find_spec(needs) is None:
            rows.append(skipped(f"parts of a step, {name}, attached", "reference", f"no {needs} here"))
            continue
        parts, seconds = _of_program(folder / program, program)
        if program in PROFILED:
            peer = {
                (rank, part): seconds
                for rank in RANKS
                for part, seconds in parts_of(_trace(folder / program, rank)).items()
            }
            rows.append(_row(name, _summed(parts), "torch's profiler", peer))
        else:
            rows.append(_row(name, parts, "nbkit's Trainer", own))
        rows += [
            absolute(f"%cluster attach --job, {name}, with its table", seconds, ATTACH_SECONDS, "s"),
        ]
    return rows


def _of_trainer(folder: Path, program: str) -> Parts:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with _running(folder, program, *torchrun) as goes_on:
        while goes_on():
            if (found := newest_run(folder / "runs")) and (parts := _parts(found)):
                return parts
    raise AssertionError


def _of_program(folder: Path, program: str) -> tuple[Parts, list[float]]:
    """Return the parts of its steps, and the seconds of each time that a notebook attaches to it."""
    os.environ["NBKIT_HOME"] = str(folder / "home")
    with _running(folder, program, sys.executable, "-m", "nbkit", "run", "-n", "2") as goes_on:
        while goes_on():
            if not (names := job_folder.names()) or not (parts := _parts(job_folder.folder_of(names[0]))):
                continue
            if program in PROFILED and not all(_trace(folder, rank).exists() for rank in RANKS):
                continue
            seconds = []
            for _ in range(ATTACHED):
                began = time.perf_counter()
                job = AttachedJob.attach()
                repr(job)
                seconds.append(time.perf_counter() - began)
            return parts, seconds
    raise AssertionError


@contextmanager
def _running(folder: Path, name: str, *command: str) -> Iterator[Callable[[], bool]]:
    """Run a program. Yield a function that waits a moment and returns True, or raises RuntimeError if it has ended."""
    folder.mkdir()
    script = Path(__file__).with_name("libraries.py")
    with open(folder / "log", "wb") as log:
        env = environment(folder) | {"OMP_NUM_THREADS": "1", "NBKIT_HOME": str(folder / "home")}
        program = [str(script), name, *["profiled"] * (name in PROFILED)]
        started = subprocess.Popen(
            [*command, *program], cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + READY_SECONDS

    def goes_on() -> bool:
        time.sleep(0.5)
        if started.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{name}: {(folder / 'log').read_text()[-3000:]}")
        return True

    try:
        yield goes_on
    finally:
        # torchrun starts its workers in their own sessions. A leftover worker would use the link of the next program.
        workers: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            workers = psutil.Process(started.pid).children(recursive=True)
        for process in (started, *workers):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        started.wait()


def _parts(run: Path) -> Parts:
    """Return the medians of a run's newest steps, or {} if there are not enough of them yet."""
    try:
        picture = read_run(run).picture()
    except UsageError:
        return {}
    if picture.get("step", 0) < STEPS or len(picture["ranks"]) < 2:
        return {}
    names = ("compute", "exposed", "waiting", "bubble", "data", "optimizer", "other")
    return {
        (rank, name): seconds
        for rank, _, *parts in picture["ranks"]
        for name, seconds in zip(names, parts, strict=True)
        if name in PARTS
    }


def _trace(folder: Path, rank: int) -> Path:
    return folder / f"trace{rank}.json"


def _summed(parts: Parts) -> Parts:
    """Return the parts, summed into those that the profiler has."""
    found: Parts = {}
    for rank in RANKS:
        found[rank, "compute"] = parts[rank, "compute"]
        found[rank, "communication"] = parts[rank, "exposed"] + parts[rank, "waiting"]
        found[rank, "data"] = parts[rank, "data"]
    return found


def _row(name: str, parts: Parts, peer: str, own: Parts) -> Row:
    off = {at: parts[at] / seconds - 1 for at, seconds in own.items() if seconds >= COUNTS}
    rank, part = worst = max(off, key=lambda at: abs(off[at]))
    return Row(
        f"parts of a step, {name}, attached",
        f"{_spoken(parts)}; {part} of rank {rank} is off by {off[worst]:+.1%}",
        f"{peer} {_spoken(own)}",
        f"{1 + off[worst]:.3f}",
        "",
        f"each part within {WITHIN:.0%}",
        abs(off[worst]) <= WITHIN,
        {"nbkit": list(parts.values()), peer: [own[at] for at in parts]},
    )


def _spoken(parts: Parts) -> str:
    """Return the parts of each rank in ms, as text."""
    ranks = [[f"{1e3 * seconds:.0f}" for (at, _), seconds in parts.items() if at == rank] for rank in RANKS]
    return "; ".join(map(" ".join, ranks)) + " ms"
