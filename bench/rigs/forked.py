"""Ranks for benchmarks that need no notebook. They are forked from a process that has imported torch.

with Ranks("steps.wire", 4, width=384) as ranks:
    answers = ranks.ask("step", strategy="zero3")       # Worker.step(strategy=...) on every rank, answers by rank
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "nbkit.rank.train.trainer",
]
ANSWER_SECONDS = 600.0

Place = Callable[[int], Mapping[str, str]]


class Ranks:
    """Ranks as processes. Each has a Worker of the module `bench.<module>` and the environment variables of torchrun.

    place: called in each process with its rank, before torch opens a socket; returns more environment variables.
    """

    def __init__(self, module: str, num: int, *, folder: Path, place: Place | None = None, **setup: Any) -> None:
        self._module, self._num, self._folder, self._place, self._setup = module, num, folder, place, setup

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(self._num):
            ours, theirs = context.Pipe()
            told = (self._module, rank, self._num, port, str(self._folder), self._place, self._setup, theirs)
            process = context.Process(target=_be, args=told, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._answers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()

    @property
    def pids(self) -> list[int]:
        """Return the process ids, by rank."""
        return [process.pid or 0 for process in self._processes]

    def ask(self, what: str, **order: Any) -> list[Any]:
        """Call a method of every rank's Worker and return the answers, by rank.

        Raises RuntimeError with the traceback of the rank that failed first.
        """
        for pipe in self._pipes:
            pipe.send((what, order))
        return self._answers()

    def _answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(found) < self._num:
            missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = wait(list(missing), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                raise RuntimeError(f"no answer from ranks {sorted(missing.values())} in {ANSWER_SECONDS:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "error", "the process ended"
                if kind == "error":
                    raise RuntimeError(f"rank {missing[pipe]} of {self._module}: {value}")
                found[missing[pipe]] = value
        return [found[rank] for rank in range(self._num)]


def _be(
    module: str,
    rank: int,
    num: int,
    port: int,
    folder: str,
    place: Place | None,
    setup: dict[str, Any],
    pipe: Connection,
) -> None:
    import torch

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.chdir(folder)
    gc.freeze()  # as on the ranks of a cluster: collections skip what was imported before
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        try:
            os.environ.update(place(rank) if place is not None else {})
            worker = importlib.import_module(f"bench.{module}").Worker(**setup)
            pipe.send(("value", None))
            while True:
                what, order = pipe.recv()
                pipe.send(("value", getattr(worker, what)(**order)))
        except EOFError:
            pass
        except BaseException as error:
            last = f"{type(error).__name__}: {error}".splitlines()[0]
            pipe.send(("error", f"{last}\n{traceback.format_exc()}"))
    os._exit(0)  # without closing the groups, because nobody uses them any more
