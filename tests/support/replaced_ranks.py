"""Ranks of which some kill themselves: the others are told, stop waiting, and a new rank is forked.

This does the work of a cluster's parent and engines, without a notebook. See ranks.py for the processes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import ranks


@dataclass
class Seat:
    """A rank's place in a world that is formed again after each death. replaced: the new ranks of this generation."""

    world: Any
    new: bool
    replaced: Sequence[int]
    told: queue.SimpleQueue[tuple[int, Sequence[int]]]

    @property
    def deaths(self) -> int:
        """The number of times that the world was formed again."""
        return int(self.world.generation) - 1

    def form_again(self, timeout_s: float = 30.0) -> Sequence[int]:
        """After a failed collective, wait for the message that ranks died. Form the next world with new ranks."""
        generation, self.replaced = self.told.get(timeout=timeout_s)
        listen = ranks.listeners[generation - 1]
        address, port = listen.getsockname()
        self.world.reform(generation, listen=listen, address=address, port=port, timeout_s=timeout_s)
        return self.replaced


def run_replaced(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    deaths: int,
    together: int = 1,
    timeout: float = 60.0,
    place: Callable[[int, int], Any] | None = None,
    late_s: float = 0.0,
) -> list[Any]:
    """Return `[fn(seat, *args) of rank 0, ...]` of the processes that have the seats at the end.

    deaths: how many times ranks die. together: how many at once. place: (rank, ranks) -> its RankPlace, before it joins
    the world; default a CPU rank over gloo. late_s: seconds until the others are told of a death; they continue
    until they wait for the dead rank.
    """
    context = ranks._forking()
    with contextlib.ExitStack() as opened:
        bound = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(deaths + 1)]
        until, ended = context.Pipe(duplex=False)
        seats: list[tuple[Any, Connection, Connection]] = []
        every: list[Any] = []

        def fork(rank: int, generation: int, replaced: Sequence[int]) -> tuple[Any, Connection, Connection]:
            reader, writer = context.Pipe(duplex=False)
            listen, tell = context.Pipe(duplex=False)
            how = (fn, rank, n, bound, writer, until, listen, generation, replaced, place, late_s, args, ranks.left_out)
            process = context.Process(target=_sit, args=(*how, ranks._outputs), daemon=False)
            process.start()
            writer.close()
            every.append(process)
            return process, reader, tell

        try:
            seats = [fork(rank, 1, ()) for rank in range(n)]
            return _collect(seats, fork, deaths, together, timeout)
        finally:
            ended.close()
            for process in every:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _collect(seats: list[Any], fork: Callable[..., Any], deaths: int, together: int, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline, generation = time.monotonic() + timeout, 1
    while len(results) < len(seats):
        waiting = {reader: rank for rank, (_, reader, _) in enumerate(seats) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ranks.RankFailed(f"no answer within {timeout:.0f} s from ranks {sorted(waiting.values())}")
        dead = []
        for reader in ready:
            rank = waiting[reader]
            try:
                kind, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                dead.append(rank)
                continue
            if kind != "value":
                raise ranks.RankFailed(f"rank {rank} {kind}:\n{value}")
            results[rank] = value
        if dead:
            if generation > deaths:
                raise ranks.RankFailed(f"ranks {dead} died")
            while len(dead) < together:  # they end one after the other
                late = wait([seat[1] for rank, seat in enumerate(seats) if rank not in dead], timeout=5.0)
                dead += [rank for rank, seat in enumerate(seats) if seat[1] in late and rank not in dead]
            generation += 1
            for rank in range(len(seats)):
                if rank not in dead:
                    seats[rank][2].send((generation, dead))
            for rank in dead:
                seats[rank] = fork(rank, generation, dead)
    return [results[rank] for rank in range(len(seats))]


def _sit(
    fn: Callable[..., Any],
    rank: int,
    n: int,
    bound: list[socket.socket],
    writer: Connection,
    until: Connection,
    listen: Connection,
    generation: int,
    replaced: Sequence[int],
    place_of: Callable[[int, int], Any] | None,
    late_s: float,
    args: Any,
    without: dict[str, Any],
    outputs: dict[int, str],
) -> None:
    import torch

    from nbkit.rank.world.world import RankPlace, World

    os.setpgid(0, 0)
    ranks.print_to(outputs)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    ranks.listeners[:] = bound
    ranks.know_links(n)
    ranks.leave_out(without)
    told: queue.SimpleQueue[tuple[int, Sequence[int]]] = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(listen, told, late_s), daemon=True).start()
    try:
        address, port = bound[generation - 1].getsockname()
        place = place_of(rank, n) if place_of is not None else RankPlace(rank, n, rank, n, "cpu", "gloo")
        joined = bound[generation - 1]
        world = World.join(place, listen=joined, address=address, port=port, generation=generation)
        answer = ("value", fn(Seat(world, generation > 1, replaced, told), *args))
    except BaseException:
        answer = ("raised", traceback.format_exc())
    writer.send_bytes(pickle.dumps(answer))
    until.poll(None)
    os._exit(0)


def _hear(listen: Connection, told: queue.SimpleQueue[tuple[int, Sequence[int]]], late_s: float) -> None:
    from nbkit.rank.world.failure_alarm import break_out

    with contextlib.suppress(EOFError, OSError):
        while True:
            message = listen.recv()
            time.sleep(late_s)
            break_out(f"ranks {message[1]} died")
            told.put(message)
