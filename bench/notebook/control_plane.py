"""Measure a trivial cell on many engines that do nothing: CPU-seconds of the kernel and of the busiest controller
process, and wall seconds.

The CPU-seconds for each rank and cell hold for engines on other machines too. The wall seconds do not: here the engines
share the cores with everything else.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import traceback
from concurrent.futures import wait
from pathlib import Path
from unittest.mock import patch

import psutil

from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row, skipped
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.launch.launch import connect, controller_launcher, environment_of_ranks, make_folder
from nbkit.notebook.cluster.output.display import NoScreen
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.wire.cells import CellRequest
from nbkit.wire.processes import Process

ROUNDS = 40
SIZES = {"light": (16, 64, 256), "bare": (64, 256, 1024)}
"""Numbers of engines. "light": one process for each, without a world. "bare": only the sockets of an engine."""
WARM_UP = 5
CPU_BAR, WALL_BAR = 0.5e-3, 0.25
"""CPU-seconds for each rank and cell; wall seconds of a cell on 64 engines."""
START_SECONDS = 120.0  # to wait for the controller, and for each further engine
ENGINE_BYTES = {"light": 20 << 20, "bare": 1 << 20}  # memory of one engine, without what it shares with its parent
_LEFT_BYTES = 2 << 30  # memory of the machine that engines must leave free


def run(settings: Settings) -> list[Row]:
    """Return three rows for each number of engines, or one row that says why that number could not be measured."""
    rows: list[Row] = []
    with patch.dict(os.environ, NBKIT_HOME=str(settings.folder / "home")):
        for kind, sizes in SIZES.items():
            for n in settings.sizes(sizes):
                try:
                    rows += _at(kind, n, settings.count(ROUNDS))
                except Exception as error:  # keep the rows of fewer engines
                    traceback.print_exc()
                    why = f"{type(error).__name__}: {str(error).partition(os.linesep)[0]}"
                    rows.append(skipped(f"control plane, {n} {kind} engines", "failed", why))
    return rows


def _at(kind: str, n: int, rounds: int) -> list[Row]:
    free = psutil.virtual_memory().available
    if free < n * ENGINE_BYTES[kind] + _LEFT_BYTES:
        raise MemoryError(f"{n} engines take {n * ENGINE_BYTES[kind] >> 20} MB of the {free >> 20} MB that are free")
    name = f"{kind}{n}"
    folder = make_folder(name)
    controller = controller_launcher(folder, name)
    controller.start()
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-m", f"bench.rigs.{kind}_engine", str(folder), name, str(n), str(controller.pid)]
    environment = {**os.environ, **environment_of_ranks()}
    engines = subprocess.Popen(words, cwd=root, env=environment, stdin=subprocess.PIPE, start_new_session=True)
    try:
        entry = ClusterEntry(
            name, socket.gethostname(), n, "gloo", 3600.0, time.time(), Process.of(controller.pid),
            Process.of(engines.pid), Process.of(os.getpid()), ("",) * n, ("",) * n,
        )  # fmt: skip
        registry.save(entry)
        client = connect(entry, time.monotonic() + START_SECONDS)
        _await_engines(client, n)
        connection = Connection(entry, client)
        found = _measured(connection, kind, n, rounds)
        connection.close()
        return found
    finally:
        os.killpg(engines.pid, 9)
        engines.wait()
        psutil.Process(controller.pid).terminate()
        registry.forget(name)


def _await_engines(client: Client, n: int) -> None:
    """Wait until every engine has registered and answered a call.

    Raises TimeoutError if no further engine registers, or some do not answer, for START_SECONDS; MemoryError if the
    engines take too much memory.
    """
    began = moved = time.monotonic()
    registered = 0
    while not client.wait_for(n, 1.0):
        if len(client.ranks) > registered:
            registered, moved = len(client.ranks), time.monotonic()
        if time.monotonic() > moved + START_SECONDS:
            raise TimeoutError(f"{registered} of {n} engines have registered")
        if psutil.virtual_memory().available < _LEFT_BYTES:
            raise MemoryError(f"{registered} of {n} engines have taken all but {_LEFT_BYTES >> 20} MB")
    silent, moved = set(range(n)), time.monotonic()
    while silent:  # a call to an engine that has not connected is lost
        calls = client.call(silent, "nbkit.bridge.calls:hello")
        wait(calls.values(), 5.0)
        silent -= {rank for rank, call in calls.items() if call.done()}
        if time.monotonic() > moved + START_SECONDS:
            raise TimeoutError(f"{len(silent)} of {n} engines do not answer")
    print(f"{n} engines are there after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _measured(connection: Connection, kind: str, n: int, rounds: int) -> list[Row]:
    parent = psutil.Process(connection.entry.controller.pid)
    controllers = [parent, *parent.children(recursive=True)]
    walls, kernel, busiest = [], [], []
    for number in range(WARM_UP + rounds):
        before, began = [_cpu(one) for one in controllers], time.perf_counter()
        own = time.process_time()
        request = CellRequest(f"{n}-{number}", "x = 1", number, tuple(range(n)))
        connection.send(request, NoScreen()).done.result(60)
        if number >= WARM_UP:
            walls.append(time.perf_counter() - began)
            kernel.append((time.process_time() - own) / n)
            busiest.append([_cpu(one) - was for one, was in zip(controllers, before, strict=True)])
    # The CPU clock of another process ticks every 10 ms, so that only the sum over all rounds is exact enough.
    most = max(sum(each) for each in zip(*busiest, strict=True)) / rounds / n
    what, load = f"trivial cell, {n} {kind} engines", f"load {os.getloadavg()[0]:.1f}"
    return [
        _row(f"{what}: wall", walls, "ms", WALL_BAR if n == 64 else None, load),
        _row(f"{what}: CPU of the kernel, a rank", kernel, "ms", CPU_BAR, load),
        _row(f"{what}: CPU of the busiest controller process, a rank", [most], "ms", CPU_BAR, load),
    ]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _row(what: str, seconds: list[float], unit: str, bar: float | None, load: str) -> Row:
    middle = quantile(seconds).middle
    met = None if bar is None else middle <= bar
    return Row(
        what, f"{middle * 1e3:.3g} {unit}", load, "", "", f"≤ {bar * 1e3:g} ms" if bar else "", met, {"s": seconds}
    )
