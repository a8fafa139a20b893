"""Run a function in several real processes, one per rank, forked from a process that has imported all they need.

The test process itself may hold any threads and sockets; ranks never inherit them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

listeners: list[socket.socket] = []
"""On a rank: a bound, listening socket for each generation, at generation - 1. All ranks see the same ports."""


left_out: dict[str, Any] = {}
"""Analyses of a model that the ranks of this test skip: name of the function -> the answer to give instead.

See the fixture `known_to_be_right`."""


known_optimizers = ("SGD", "Adam", "AdamW", "Recording")
"""Names of optimizers, as a trial gives them. One with hooks or with a replaced step has another name."""


def link_of(n: int) -> Any:
    """Return the link speeds that n ranks of a test use. Measuring them would take most of the time of a small job.

    tests/rank/comm/test_link_probe.py does measure them.
    """
    from nbkit.planner.link_speed import OperationSpeed, WorldLinks

    ways = dict.fromkeys(
        ("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send"), OperationSpeed(3e-4, 5e8)
    )
    return WorldLinks(n, ways, None, None, 2e9, (0,) * n, True)


class RankFailed(AssertionError):
    """A rank raised or died; the message holds its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60.0,
    generations: int = 1,
    join: bool = True,
    dying: frozenset[int] = frozenset(),
) -> list[Any]:
    """Return `[fn(world, *args) of rank 0, of rank 1, ...]`. fn: a function of a module; its results can be pickled.

    With `join=False` the function gets its rank number instead of a World, and no group exists yet. dying: ranks whose
    processes end in fn; their results are None.
    Raises RankFailed with the traceback of the rank that failed first, or with the ranks that did not answer in time.
    All processes are gone when this returns.
    """
    context = _forking()
    with contextlib.ExitStack() as opened:
        bound = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(generations)]
        readers, processes = [], []
        until, ended = context.Pipe(duplex=False)
        for rank in range(n):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_be_rank,
                args=(fn, rank, n, bound, writer, until, join, args, left_out, _outputs),
                daemon=False,
            )
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        until.close()
    try:
        return _collect(readers, processes, timeout, dying)
    finally:
        ended.close()
        for process in processes:
            # Kill the whole process group, so that DataLoader workers of a rank end with it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def next_generation(world: Any, timeout_s: float = 20.0) -> None:
    """Form the world again on the next listening socket of this run (`generations=` is their number)."""
    generation = world.generation + 1
    listen = listeners[generation - 1]
    address, port = listen.getsockname()
    world.reform(generation, listen=listen, address=address, port=port, timeout_s=timeout_s)


def know_links(n: int) -> None:
    """Give a rank of n the link speeds of `link_of`."""
    from nbkit.rank.comm import link_probe

    link_probe._known = link_of(n)


def know_optimizers() -> None:
    """Prevent a rank from analysing the known optimizers, which takes a sixth of the time of a small job.

    tests/rank/train/step/test_optimizer_factory.py tries them; so do ranks that are started otherwise, as by torchrun.
    """
    from nbkit.rank.train.step.optimizer_trial import OptimizerTrial

    in_full = OptimizerTrial._tried

    def answer(trial: Any, kind: str) -> str:
        return "" if trial.name in known_optimizers else in_full(trial, kind)

    OptimizerTrial._tried = answer  # type: ignore[method-assign]


def leave_out(without: dict[str, Any]) -> None:
    """Replace functions on a rank: see `left_out`."""
    from nbkit.rank.data import first_batches
    from nbkit.rank.parallel import fact_finder
    from nbkit.rank.train import builder

    for name, answer in without.items():
        for module in (builder, fact_finder, first_batches):
            if hasattr(module, name):
                setattr(module, name, lambda *_, _answer=answer, **__: _answer)


_shared = False
_outputs: dict[int, str] = {}
"""The stdout and stderr of this process, as files, for ranks that are forked from a process of all workers."""


def _forking() -> Any:
    """Return the multiprocessing context that forks ranks from a process that has imported `rank_preload`."""
    context = multiprocessing.get_context("forkserver")
    if _shared and not _outputs:
        _outputs.update((fd, f"/proc/{os.getpid()}/fd/{os.dup(fd)}") for fd in (1, 2))
    if not _shared:
        context.set_forkserver_preload(["rank_preload"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # because that process does not inherit sys.path
            forkserver.ensure_running()
    return context


def shared_server() -> dict[str, Any]:
    """Start one process for all workers from which ranks are forked, because its imports take seconds."""
    _forking()
    return {name: getattr(forkserver._forkserver, name, None) for name in _KNOWN_TO_WORKERS}


def use_server(told: dict[str, Any]) -> None:
    """Make a worker fork from the process of `shared_server`, which ends with the process that started it."""
    global _shared
    server: Any = forkserver._forkserver
    for name, value in told.items():
        setattr(server, name, value)
    server._forkserver_alive_fd = os.pipe()[1]  # each forked process gets one
    server.ensure_running = resource_tracker.ensure_running
    _shared = True


_KNOWN_TO_WORKERS = ("_forkserver_address", "_forkserver_authkey")


def print_to(outputs: dict[int, str]) -> None:
    """Send a rank's output to the files of its worker, so that the report of a test shows it."""
    for fd, path in outputs.items():
        with contextlib.suppress(OSError):  # a socket, with `-s`
            there = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(there, fd)
            os.close(there)


def _collect(readers: list[Connection], processes: list[Any], timeout: float, dying: frozenset[int]) -> list[Any]:
    results: dict[int, Any] = dict.fromkeys(dying)
    deadline = time.monotonic() + timeout
    while len(results) < len(readers):
        waiting = {reader: rank for rank, reader in enumerate(readers) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            _show_stacks(processes, sorted(waiting.values()))
            raise RankFailed(f"no answer within {timeout:.0f} s from ranks {sorted(waiting.values())}")
        answers = []
        for reader in ready:
            try:
                answers.append((waiting[reader], *pickle.loads(reader.recv_bytes())))
            except EOFError:
                answers.append((waiting[reader], "died", time.time(), "the process ended without an answer"))
        for rank, kind, _, value in sorted(answers, key=lambda answer: answer[2]):
            if kind != "value":
                _show_stacks(processes, sorted(set(waiting.values()) - {answered for answered, *_ in answers}))
                raise RankFailed(f"rank {rank} {kind}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(readers))]


def _show_stacks(processes: list[Any], ranks: list[int]) -> None:
    """Make the ranks that have not answered write their stacks to stderr."""
    for rank in ranks:
        print(f"stacks of rank {rank}:", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR2)
        time.sleep(0.2)  # one after the other, so that their lines do not mix


def _be_rank(
    fn: Callable[..., Any],
    rank: int,
    n: int,
    bound: list[socket.socket],
    writer: Connection,
    until: Connection,
    join: bool,
    args: Any,
    without: dict[str, Any],
    outputs: dict[int, str],
) -> None:
    import torch

    from nbkit.rank.world.world import RankPlace, World

    os.setpgid(0, 0)
    print_to(outputs)
    faulthandler.register(signal.SIGUSR2)
    # A shell makes background commands ignore it, but some tests interrupt ranks.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    listeners[:] = bound
    know_links(n)
    leave_out(without)
    know_optimizers()
    try:
        if join:
            address, port = bound[0].getsockname()
            backend = os.environ.get("NBKIT_CHECK_REAL_GPU", "")  # see docs/evidence/gpu-runs.md
            if backend:
                os.environ["NCCL_HOSTID"] = f"host-of-rank-{rank}"  # NCCL refuses two ranks of one host on one GPU
            place = RankPlace(rank, n, rank, n, "cuda" if backend else "cpu", backend or "gloo")
            who: Any = World.join(place, listen=bound[0], address=address, port=port)
        else:
            who = rank
        answer = ("value", time.time(), fn(who, *args))
    except BaseException:
        answer = ("raised", time.time(), traceback.format_exc())
    # Plain pickle copies tensors; multiprocessing would share their memory, which ends with this process.
    writer.send_bytes(pickle.dumps(answer))
    until.poll(None)  # others may still need this rank; the pipe closes when all have answered
    os._exit(0)  # no teardown: leftover groups of a finished rank must not become a failure
