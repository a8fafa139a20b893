"""Run many cases in one set of rank processes, because starting the processes takes longer than most cases."""

from __future__ import annotations

import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from multiprocessing import parent_process
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from ranks import RankFailed, run_ranks

from verify.cases import Case
from verify.compare import Verdict, judged
from verify.training import Outcome, Truth, checked, train, train_by_hand, truth

Result = tuple[Case, list[Outcome] | str]
"""A case, and the outcome of each rank or the error that broke them."""


def trained(world: Any, cases: Sequence[Case]) -> list[Outcome]:
    """Train every case, on a rank."""
    return [train(case) for case in cases]


def looped(world: Any, cases: Sequence[Case]) -> list[list[float]]:
    """Return the losses of every case, on a rank, in a loop around `nbkit.prepare`."""
    return [train_by_hand(case) for case in cases]


def truths(
    cases: Iterable[Case], *, check: bool = False, timeout: float = 900, device: str = "cpu"
) -> dict[Case, Truth]:
    """Return `case.truth` -> the results of one process. They are computed in a new process, on `device`.

    check: also ask `nbkit.check` about the strategies of these cases.
    """
    wanted: dict[Case, list[str]] = {}
    for case in sorted(cases, key=str):
        wanted.setdefault(case.truth, []).extend(case.strategies if check else ())
    found: dict[Case, Truth] = run_ranks(_truths, 1, wanted, device, timeout=timeout, join=False)[0]
    return found


def _truths(rank: int, wanted: dict[Case, list[str]], device: str) -> dict[Case, Truth]:
    return {
        case: replace(truth(case, device=device), checks={each: checked(case, each) for each in dict.fromkeys(some)})
        for case, some in wanted.items()
    }


def verdicts(
    cases: Sequence[Case], *, lanes: int = 2, patience: int = 600, check: bool = False
) -> Iterator[tuple[Case, Verdict]]:
    """Yield each case and its verdict, in the order in which they end. See `in_lanes` and `truths`."""
    models: dict[Any, list[Case]] = {}
    for case in sorted(cases, key=str):  # roughly the order of the results
        models.setdefault(case.model, []).append(case)
    with ThreadPoolExecutor(1) as pool:
        known = {model: pool.submit(truths, some, check=check, timeout=3600) for model, some in models.items()}
        for case, found in in_lanes(cases, lanes, patience=patience):
            yield case, judged(case, found, known[case.model].result()[case.truth])


def in_lanes(cases: Sequence[Case], lanes: int = 2, *, patience: int = 600) -> Iterator[Result]:
    """Yield the `results` of all `cases`, from several sets of ranks at a time: while one waits, another computes.

    Cases with few ranks come first.
    """
    found: SimpleQueue[Result | BaseException | None] = SimpleQueue()

    def work(some: Sequence[Case]) -> None:
        try:
            for _, alike in groupby(some, key=lambda case: case.ranks):
                for result in results(list(alike), patience=patience):
                    found.put(result)
            found.put(None)
        except BaseException as error:  # raised below, in the thread that asked
            found.put(error)

    ordered = sorted(cases, key=lambda case: (case.ranks, str(case)))
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
    cases: Sequence[Case], *, patience: int = 600, train: Callable[[Case], Outcome] = train
) -> Iterator[Result]:
    """Yield the result of each of `cases` when it is ready. All need the same number of ranks.

    If a case breaks the ranks or does not end, the others run in new ranks. patience: limit in seconds of one case.
    """
    todo = list(cases)
    while todo:
        timeout = 60 + patience * len(todo)
        with tempfile.TemporaryDirectory(prefix="nbkit-verify-") as name, ThreadPoolExecutor(1) as pool:
            folder, done = Path(name), 0
            running = pool.submit(run_ranks, _noted, todo[0].ranks, todo, train, folder, patience, timeout=timeout)
            for number, case in enumerate(todo):
                files = [folder / f"{number}.{rank}" for rank in range(case.ranks)]
                while not all(file.exists() for file in files) and not running.done():
                    time.sleep(0.1)
                if not all(file.exists() for file in files):
                    break
                yield case, [pickle.loads(file.read_bytes()) for file in files]
                done += 1
            broken = running.exception()
        if broken is not None and not isinstance(broken, RankFailed):
            raise broken
        if done < len(todo):
            yield todo[done], f"broke, or took too long: {broken}"
        todo = todo[done + 1 :]


def _noted(world: Any, cases: Sequence[Case], train: Callable[[Case], Outcome], folder: Path, patience: int) -> None:
    for number, case in enumerate(cases):
        if (parent := parent_process()) is not None and not parent.is_alive():
            return  # the process that asked has been killed
        # Without a handler, the alarm ends this process wherever it is. The set of ranks ends with it.
        signal.alarm(patience)
        dist.barrier()  # a rank that breaks in this case must not end one that still writes the last result
        written = folder / f"{number}.{world.place.rank}.part"
        written.write_bytes(pickle.dumps(train(case)))
        written.rename(written.with_suffix(""))
    signal.alarm(0)
