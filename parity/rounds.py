"""Many cells in one set of rank processes, since to start them costs more than most cells do."""

from __future__ import annotations

import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from multiprocessing import parent_process
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from ranks import RankFailed, run_ranks

from nbkit.errors import NbkitError
from parity.cells import Cell
from parity.training import Outcome, Truth, by_hand, ours, truth

Result = tuple[Cell, list[Outcome] | str]
"""A cell and what each rank found, or why there is nothing."""


def trained(world: Any, cells: Sequence[Cell]) -> list[Outcome]:
    """Every cell, on a rank."""
    return [ours(cell) for cell in cells]


def looped(world: Any, cells: Sequence[Cell]) -> list[list[float]]:
    """Losses of every cell, on a rank, in a loop of its own."""
    return [by_hand(cell) for cell in cells]


def truths(cells: Iterable[Cell], *, timeout: float = 600, device: str = "cpu") -> dict[Cell, Truth]:
    """`cell.truth` -> what one process makes of it, computed in a process of its own on `device`."""
    wanted = sorted({cell.truth for cell in cells}, key=str)
    found: dict[Cell, Truth] = run_ranks(_truths, 1, wanted, device, timeout=timeout, join=False)[0]
    return found


def _truths(rank: int, cells: Sequence[Cell], device: str) -> dict[Cell, Truth]:
    return {cell: truth(cell, device=device) for cell in cells}


def in_lanes(
    cells: Sequence[Any], lanes: int = 2, *, train: Callable[[Any], Any] = ours, patience: int = 600
) -> Iterator[Any]:
    """`results` of all `cells`, in several sets of ranks at a time: while one waits for messages another computes.

    Cells of few ranks come first.
    """
    found: SimpleQueue[Result | BaseException | None] = SimpleQueue()

    def work(some: Sequence[Any]) -> None:
        try:
            for _, alike in groupby(some, key=lambda cell: cell.ranks):
                for result in results(list(alike), train=train, patience=patience):
                    found.put(result)
            found.put(None)
        except BaseException as error:
            found.put(error)

    ordered = sorted(cells, key=lambda cell: (cell.ranks, str(cell)))
    for i in range(lanes):
        threading.Thread(target=work, args=(ordered[i::lanes],), daemon=True).start()
    while lanes:
        result = found.get()
        if isinstance(result, BaseException):
            raise result
        lanes -= result is None
        if result is not None:
            yield result


def results(
    cells: Sequence[Any], *, train: Callable[[Any], Any] = ours, patience: int = 600
) -> Iterator[tuple[Any, list[Any] | str]]:
    """The result of each of `cells`, which need the same number of ranks, as soon as it is there.

    A cell that is refused, that breaks the ranks or does not end takes no other with it. train: what each rank does
    with a cell. patience: seconds that one may take.
    """
    todo = list(cells)
    while todo:
        timeout = 60 + patience * len(todo)
        with tempfile.TemporaryDirectory(prefix="nbkit-parity-") as name, ThreadPoolExecutor(1) as pool:
            folder, done = Path(name), 0
            running = pool.submit(run_ranks, _noted, todo[0].ranks, todo, train, folder, patience, timeout=timeout)
            for number, cell in enumerate(todo):
                files = [folder / f"{number}.{rank}" for rank in range(cell.ranks)]
                while not all(file.exists() for file in files) and not running.done():
                    time.sleep(0.1)
                if not all(file.exists() for file in files):
                    break
                found = [pickle.loads(file.read_bytes()) for file in files]
                refused = next((answer for answer in found if isinstance(answer, str)), None)
                yield cell, found if refused is None else refused
                done += 1
            broken = running.exception()
        if broken is not None and not isinstance(broken, RankFailed):
            raise broken
        if done < len(todo):
            yield todo[done], f"broke, or took too long: {broken}"
        todo = todo[done + 1 :]


def _noted(world: Any, cells: Sequence[Any], train: Callable[[Any], Any], folder: Path, patience: int) -> None:
    for number, cell in enumerate(cells):
        if (parent := parent_process()) is not None and not parent.is_alive():
            return  # whoever asked has been killed
        # Ends this process, wherever it stands, and with it the set.
        signal.alarm(patience)
        dist.barrier()  # who breaks in this one takes no rank along that is still at the last one
        try:
            found = train(cell)
        except NbkitError as error:  # the same on every rank, which go on
            found = f"refused: {type(error).__name__}: {error}"
        written = folder / f"{number}.{world.place.rank}.part"
        written.write_bytes(pickle.dumps(found))
        written.rename(written.with_suffix(""))
    signal.alarm(0)
