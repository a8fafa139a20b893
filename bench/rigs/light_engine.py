"""Engines without torch and without a world that answer cells at once, so that only the control plane is measured.

python -m bench.rigs.light_engine FOLDER NAME N CONTROLLER      fork N engines of the cluster NAME, with files in FOLDER

CONTROLLER: the pid of the cluster's controller. It ends with the engines when the benchmark is killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipykernel.debugger  # noqa: F401  # imported once for all forks, as in the parent of ranks
import psutil
from ipyparallel.engine.app import IPEngine
from jupyter_client.session import Session

from nbkit.wire.cells import ENGINE_OPTIONS, CellRecord, CellRequest

STARTING = 8
"""Engines that start at the same time. More would be slow on a few cores, and the controller gives up a slow one."""


class LightEngine(IPEngine):  # type: ignore[misc]
    """An engine that writes a byte to a pipe when it has registered."""

    registered: int

    async def complete_registration(self, *args: Any, **kwargs: Any) -> None:
        await super().complete_registration(*args, **kwargs)
        os.write(self.registered, b".")


def main(folder: Path, name: str, n: int, controller: int) -> None:
    """Fork the engines and wait for them. All end when standard input ends, that is, with the benchmark."""
    threading.Thread(target=end_with_input, args=(psutil.Process(controller),), daemon=True).start()
    engine_file = await_engine_file(folder, name)
    gc.collect()
    gc.freeze()
    registered, LightEngine.registered = os.pipe()
    for rank in range(n):
        if rank >= STARTING:
            os.read(registered, 1)
        if os.fork() == 0:
            _engine(rank, engine_file)
    with contextlib.suppress(KeyboardInterrupt, ChildProcessError):
        while os.wait():
            pass


def await_engine_file(folder: Path, name: str) -> Path:
    """Wait for the file in which the controller writes how engines reach it, and return its path."""
    path = folder / "profile" / "security" / f"ipcontroller-{name}-engine.json"
    while not path.exists() or not path.stat().st_size:
        time.sleep(0.01)
    return path


def end_with_input(controller: psutil.Process) -> None:
    """End all processes of the rig and the controller's when standard input ends."""
    while os.read(0, 1):  # not sys.stdin: the forked engines would inherit its lock
        pass
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (*controller.children(recursive=True), controller):
            process.kill()
    os.killpg(0, signal.SIGKILL)


def _engine(rank: int, engine_file: Path) -> None:
    calls = types.ModuleType("nbkit.bridge.calls")  # the real one imports torch
    calls.run_cell = lambda request: answer(rank, request)  # type: ignore[attr-defined]
    calls.hello = lambda: rank  # type: ignore[attr-defined]
    sys.modules["nbkit.bridge.calls"] = calls
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # when memory runs out, the engines are to be killed first
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Session.send = _quiet(Session.send)  # type: ignore[method-assign]
    LightEngine.launch_instance(
        [f"--IPEngine.url_file={engine_file}", f"--IPEngine.id={rank}", *ENGINE_OPTIONS, "--log-level=40"]
    )
    os._exit(0)


def _quiet(send: Callable[..., Any]) -> Callable[..., Any]:
    """Return `send` without status messages. On a rank, nbkit's calls publish neither busy nor idle."""
    return lambda session, stream, kind, *rest, **options: (
        None if kind == "status" else send(session, stream, kind, *rest, **options)
    )


def answer(rank: int, request: CellRequest) -> CellRecord:
    """Return the answer of a rank to a cell that does nothing."""
    return CellRecord(request.id, rank, 1, "ok", 0.0, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
