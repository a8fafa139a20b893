"""The loops over `job.batches` in the cells of this rank: what runs one again after a death, see loop_statement.py.

Between two passes over the batches all ranks meet, in `go_on`; a new rank begins with the pass that comes then.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nbkit.bridge import calls
from nbkit.bridge.replacing.handing import broadcast, gathered
from nbkit.bridge.replacing.loop_names import LoopNames
from nbkit.bridge.replacing.loop_statement import LOOPS, LoopStatements
from nbkit.bridge.replacing.namespace import Names, equal_names, names_of, parts_of
from nbkit.bridge.runner import Runner
from nbkit.errors import NbkitError, TrainingError
from nbkit.rank.train.own_loop.own_loop import OwnLoop, Read, go_on
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.train.replace.pickle_by_value import dumps, loads


@dataclass(frozen=True)
class Told:
    """What a new rank gets of a loop: the batches that were read, pickled names, those of the job, and why it ends."""

    reads: list[Read]
    names: bytes
    bound: dict[str, str]
    ends: str


class OwnLoops:
    """One per rank. seat: see Survivor."""

    def __init__(self, runner: Runner, seat: Callable[[int | None], bool]) -> None:
        self._runner, self._seat = runner, seat
        self._statements = LoopStatements(self._begins)
        self._cell = ""
        self._number: int | None = None
        self._over = self._awaits_batches = False
        self._loop: OwnLoop | None = None
        self._joined: OwnLoop | None = None
        self._names: LoopNames | None = None
        runner.shell.ast_transformers.append(self._statements)
        setattr(builtins, LOOPS, self)

    def _begins(self) -> bool:
        running = self._runner.running
        if len(running) != 1 or running[0].request.id == self._cell:
            return False
        if self._cell:  # else it is the first of a new rank, which enters the loop that it has joined
            self._joined = None
        self._cell, self._number, self._loop = running[0].request.id, None, None
        return True

    # Called by a cell

    def again(self, number: int) -> bool:
        """Whether the statement is to be run: once, and after each death."""
        if self._number is None:
            self._number, self._over = number, False
            return True
        if self._over:
            self._number = None
        return not self._over

    def __enter__(self) -> None:
        self._awaits_batches = False

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        loop, at_end = self._loop, None
        if loop is not None and error is None:
            try:
                loop.arrive()
            except BaseException as another:
                error = at_end = another
        if loop is not None and isinstance(error, Exception) and loop.goes_on(error):
            try:
                go_on(loop, error)
            except BaseException as another:
                self._leave(loop, another)
                raise
            error.__traceback__ = None  # it holds what the frames of the body hold
            self._tell_left()
            return True
        self._over = True
        if loop is not None:
            self._leave(loop, error)
        if at_end is not None:
            raise at_end
        return False

    def items(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Its items, from the first for which no body was run."""
        self._awaits_batches = True
        loop, iterator = self._loop or self._joined, iter(iterable)
        for number in range(len(loop.reads) if loop is not None else 0):
            if next(iterator, self) is self:
                raise TrainingError(
                    "A rank died, and what the loop is over gives less than before.",
                    numbers=f"{number} items now",
                    hint="for batch in job.batches(loader)",
                )
        return iterator

    # Called by a job

    def loop_of(self, job: Any, loader: Any) -> OwnLoop | None:
        """The loop in which batches of this job are read from now on; None where no rank is replaced in it."""
        awaited, self._awaits_batches = self._awaits_batches, False
        if threading.current_thread() is not threading.main_thread() or job.own_loop.on_failure != "replace":
            return None
        if self._loop is not None:  # a further pass, or a loop within its body
            return self._loop if awaited and self._loop.job is job else None
        shell = self._runner.shell
        statement = self._statements.found[self._number] if awaited and self._number is not None else None
        if statement is None or shell.user_ns.get(statement.job) is not job or isinstance(loader, Iterator):
            return OwnLoop(job, enterable=False) if self._seat(None) else None
        loop, self._joined = self._joined, None
        if loop is None or loop.job is not job:
            loop = OwnLoop(job)
        assert self._number is not None
        if not self._seat(self._number):
            return None
        fixed = set(map(id, parts_of(loop).values()))
        self._names = LoopNames(shell.user_ns, statement.names(shell.user_ns), fixed)
        loop.take_names = self._names.take
        self._loop = loop
        return loop

    # Called when ranks meet

    def level(self, loop: OwnLoop, newcomers: Collection[int], *, new: bool) -> None:
        """Give new ranks what the loop's body uses, as it is at the boundary where all stand. Collective."""
        names, hidden, place = self._runner.shell.user_ns, self._runner.shell.user_ns_hidden, calls.place
        assert place is not None
        own, needed = None if new else Names({}, {}, ()), frozenset[str]()
        if not new and loop.enterable and self._number is not None:
            statement = self._statements.found[self._number]
            needed, used = statement.needed | statement.over, statement.names(names) | statement.over
            mine = {name: names[name] for name in used if name in names}
            own = names_of(mine, hidden, loop, linked=True, large=statement.over)
        everyone = gathered(own)
        equal, bound, lacks = equal_names([each for each in everyone if each is not None])
        giver, told = min(set(range(place.world_size)) - set(newcomers)), None
        if place.rank == giver:
            ends = loop.ends
            if not ends and (lacking := sorted(needed & lacks)):
                ends = f"it reads what differs between ranks, or cannot be given to a new one: {', '.join(lacking)}"
            parts = {id(part): name for name, part in parts_of(loop).items()}
            packed = dumps({name: names[name] for name in sorted(equal)}, classes=True, parts=parts)
            told = Told(loop.reads, packed, bound, ends)
        told = broadcast(told, giver)
        loop.ends = told.ends
        if new:
            parts_here = parts_of(loop)
            names.update(loads(told.names, parts_here))
            names.update({name: parts_here[part] for name, part in told.bound.items()})
            loop.reads, self._joined = list(told.reads), None if told.ends else loop

    def _leave(self, loop: OwnLoop, error: BaseException | None) -> None:
        self._loop = None
        why = ""
        try:
            loop.end(error)
        except BaseException as another:
            error = another
            raise
        finally:
            host, (path, step) = resume_fit.host, (loop.saves.last.path, loop.saves.last.step)
            assert host is not None
            if error is not None:
                why = f"{error.what} {error.numbers}" if isinstance(error, NbkitError) else f"{type(error).__name__}"
                if path is not None:
                    host.kept(str(path), step)
            host.leave(why)

    def _tell_left(self) -> None:
        """What the body may have changed, and nbkit has not taken back."""
        if self._names is None or self._number is None or calls.place is None or calls.place.rank != 0:
            return
        assigned = self._statements.found[self._number].assigned
        if left := ", ".join(f"{name} ({kind})" for name, kind in self._names.left.items() if name not in assigned):
            print(f"not taken back to that step: {left}", flush=True)
