"""Attach to a program that listens (nbkit/rank/listen.py): inspect its ranks, and run live cells in it.

    job = AttachedJob.attach("train-3f2a")     # %cluster attach --job train
    job                                        # breakdown of a step, traffic, memory, loss
    job.why()                                  # which rank waits for which
    job.run("optimizer.param_groups[0]['lr'] = 1e-4")      # after the same step on all ranks

Only ranks on this host are asked. Their measurements are read from the job's folder.
"""

from __future__ import annotations

import html
import math
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nbkit import job_folder
from nbkit.durations import text_of
from nbkit.errors import CellError, ClusterError, ClusterNotFound, NbkitError, UsageError
from nbkit.figures import html_table
from nbkit.figures import seconds as seconds_text
from nbkit.job_folder import ListeningRank
from nbkit.notebook.cluster.status import text_table
from nbkit.notebook.cluster.why import ANSWER_SECONDS, LATE_SECONDS, Why, activity_in, states_of, verdict
from nbkit.notebook.run.reader import read_run
from nbkit.wire import process_state
from nbkit.wire.cells import ranks_named
from nbkit.wire.link import SignedLink, key_of
from nbkit.wire.messages import Death, DecideJobCell, ForJob, GetActivity, GetJobState, JobAnswer, PlanJobCell

_NONCE = 33  # bytes of a rank's first line, the nonce
_AHEAD_SECONDS = 1.0  # a live cell runs at least this much later, so that all ranks know its step in time
_TRIES = 3
_COLUMNS = ("rank", "step", "takes", "compute", "comm.", "waits", "data", "optim.", "other", "memory", "loss")

T = TypeVar("T")


class JobLink:
    """A connection to one rank. Close it after use. If it has planned a live cell, closing it withdraws the cell."""

    def __init__(self, rank: ListeningRank, secret: str, *, seconds: float) -> None:
        self.rank = rank
        try:
            self._sock = socket.create_connection(("127.0.0.1", rank.port), timeout=seconds)
            nonce = b""
            while len(nonce) < _NONCE and (more := self._sock.recv(_NONCE - len(nonce))):
                nonce += more
        except OSError as error:
            raise self._silent(error) from None
        self._link: SignedLink[ForJob, JobAnswer] = SignedLink(
            self._sock, key_of(secret, nonce.decode(errors="replace").strip()), opened=True
        )

    def ask(self, request: ForJob, *, seconds: float) -> dict[str, Any]:
        """Send a request. Return the values of the answer. Raises ClusterError if none comes, UsageError if refused."""
        self._sock.settimeout(seconds)
        self._link.send(request)
        answers: list[JobAnswer] | None = []
        while answers is not None and not answers:
            answers = self._link.receive()
        if not answers:
            raise self._link.refused or self._silent(None)
        if answers[0].error:
            raise UsageError(f"Rank {self.rank.rank} refuses: {answers[0].error}")
        return answers[0].values

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _silent(self, error: Exception | None) -> ClusterError:
        return ClusterError(
            f"Rank {self.rank.rank} does not answer.",
            numbers=f"process {self.rank.process.pid}, port {self.rank.port}{f': {error}' if error else ''}",
            hint="nbkit why --job NAME",
        )


@dataclass(frozen=True)
class JobEntry:
    """A job in the list of `nbkit jobs`. state: "runs", "ended", or how many of its ranks run."""

    name: str
    ranks: int
    state: str
    begun: float
    host: str
    program: str
    folder: str


class JobList(tuple[JobEntry, ...]):
    """The jobs of this user, as a table."""

    def __repr__(self) -> str:
        if not self:
            return "No program listens. Start one:  nbkit run -n 2 train.py"
        rows = [
            (each.name, str(each.ranks), each.state, text_of(time.time() - each.begun), each.host, each.program)
            for each in self
        ]
        return text_table(("NAME", "RANKS", "STATE", "AGE", "HOST", "PROGRAM"), rows)


@dataclass(frozen=True)
class JobCell:
    """The result of a live cell on each rank of a program. step: the step after which it ran, on all ranks."""

    step: int
    output: Mapping[int, str]
    values: Mapping[int, str]

    def __repr__(self) -> str:
        texts: dict[str, list[int]] = {}
        for rank, output in self.output.items():
            texts.setdefault(f"{output}{self.values[rank]}".rstrip(), []).append(rank)
        shown = [f"{ranks_named(ranks).lower()}: {text}" for text, ranks in texts.items() if text]
        return "\n".join([f"after step {self.step}", *shown])


class AttachedJob:
    """A program that listens. Create it with `attach`. ranks: rank number -> rank, when it was attached."""

    def __init__(self, name: str, folder: Path, secret: str, ranks: Mapping[int, ListeningRank]) -> None:
        self.name, self.folder, self._secret, self.ranks = name, folder, secret, ranks
        self.size = max(rank.world_size for rank in ranks.values())

    @classmethod
    def attach(cls, name: str | None = None) -> AttachedJob:
        """Return the job whose name is or begins with `name`. Without a name, return the only running job.

        Raises ClusterNotFound if none runs, UsageError if several do, ClusterError if its files are not private.
        """
        running = [each.name for each in cls.list() if each.state != "ended"]
        fits = [each for each in running if each == name] or [each for each in running if each.startswith(name or "")]
        if len(fits) > 1:
            raise UsageError(
                "Several programs that listen fit: say which.", numbers=", ".join(fits), hint=f"--job {fits[0]}"
            )
        if not fits:
            raise ClusterNotFound(
                f"No program called {name!r} listens." if name else "No program listens.",
                numbers=f"running: {', '.join(running) or 'none'}",
                hint="nbkit jobs" if running else "nbkit run -n 2 train.py",
            )
        folder = job_folder.folder_of(fits[0])
        job_folder.check_private(folder)
        return cls(fits[0], folder, job_folder.secret_of(folder), job_folder.ranks_in(folder))

    @classmethod
    def list(cls) -> JobList:
        """Return every job of this user that has a folder, even if it has ended."""
        found = []
        for name in job_folder.names():
            folder = job_folder.folder_of(name)
            ranks = job_folder.ranks_in(folder)
            if first := next(iter(ranks.values()), None):
                alive = sum(rank.is_alive() for rank in ranks.values())
                some = f"{alive} of {first.world_size} ranks run"
                state = "ended" if not alive else "runs" if alive == first.world_size else some
                hosts = ", ".join(dict.fromkeys(rank.host for rank in ranks.values()))
                found.append(JobEntry(name, first.world_size, state, first.begun, hosts, first.program, str(folder)))
        return JobList(found)

    @classmethod
    def clean(cls) -> tuple[str, ...]:
        """Remove the folders of ended jobs, with their records and audit logs. Return a line about each."""
        ended = [each for each in cls.list() if each.state == "ended"]
        for each in ended:
            shutil.rmtree(each.folder, ignore_errors=True)
        return tuple(f"{each.name}: a job that has ended" for each in ended)

    def why(self, *, stacks: bool = False) -> Why:
        """Return what each rank does, and a sentence about who waits for whom. stacks: include all threads' stacks."""
        began = time.monotonic()
        deaths = {r: Death(r, "its process has ended", 0.0) for r, one in self.ranks.items() if not one.is_alive()}
        asked = [rank for r, rank in self.ranks.items() if r not in deaths and rank.is_here]
        seconds = ANSWER_SECONDS + LATE_SECONDS
        answers = {}
        found = self._of_each(asked, lambda link: link.ask(GetActivity(stacks), seconds=seconds))
        for number, values in found.items():
            if not isinstance(values, Exception):
                answers[number] = activity_in(values)
        looks = {}
        for rank in asked:
            if rank.rank not in answers:
                # The program may use SIGUSR1 itself, so the rank is not signalled for its stack: pass a log that does
                # not exist.
                look = process_state.look(rank.process, self.folder / "no log")
                if look is not None:
                    looks[rank.rank] = look
        states = states_of(range(self.size), answers, looks, deaths, stacks=stacks)
        return Why(states, verdict(states), time.monotonic() - began)

    def state(self) -> dict[int, dict[str, Any]]:
        """Return {rank: {"step", "seconds" per step, "loss", "lr", "memory", "peak" (bytes)}} for ranks that answer."""
        here = [rank for rank in self.ranks.values() if rank.is_here and rank.is_alive()]
        found = self._of_each(here, lambda link: link.ask(GetJobState(), seconds=ANSWER_SECONDS))
        return {rank: values for rank, values in found.items() if not isinstance(values, Exception)}

    def picture(self) -> dict[str, Any]:
        """Return a step's time by activity, its traffic, and memory: see `nbkit.read_run(...).picture`.

        Return {} before the third step.
        """
        with suppress(UsageError):  # no records yet
            return read_run(self.folder).picture()
        return {}

    def run(self, source: str, *, timeout: float = 60.0) -> JobCell:
        """Run a cell on all ranks after the same step of the optimizer. Then the training goes on.

        The cell sees the names of the code that called `optimizer.step()`, and `optimizer`, `rank`, `world_size`. It
        can change objects, but it cannot rebind names of the program. Names that it defines are kept for later cells.

        Raises CellError if it fails on a rank, ClusterError if not all ranks can be asked, UsageError if the program
        runs no cells, or if no step ends within `timeout` seconds.
        """
        ranks = self._all_ranks()
        with ExitStack() as stack:
            links = []
            for rank in ranks:
                links.append(link := JobLink(rank, self._secret, seconds=ANSWER_SECONDS))
                stack.callback(link.close)
            step = _planned(links, source)
            decided = _of_links(links, lambda link: link.ask(DecideJobCell(True, timeout), seconds=timeout + 1.0))
        if missing := {rank: found for rank, found in decided.items() if isinstance(found, Exception)}:
            raise ClusterError(
                f"{ranks_named(list(missing))} gave no result of the live cell.",
                numbers="; ".join(str(error) for error in missing.values()),
                hint=f"nbkit why --job {self.name}",
            )
        results: dict[int, dict[str, Any]] = decided  # type: ignore[assignment]
        failed = {rank: found for rank, found in results.items() if found["outcome"].startswith("failed")}
        if failed:
            first = min(failed)
            raise CellError(
                f"{ranks_named(list(failed))} {failed[first]['outcome']}",
                rank=first, ranks=tuple(failed), traceback=failed[first]["output"],
            )  # fmt: skip
        if any(found["outcome"] != "ran" for found in results.values()):
            raise UsageError(
                "The live cell did not run on all ranks.",
                numbers="; ".join(f"rank {rank}: {found['outcome']}" for rank, found in results.items()),
                hint=f"nbkit why --job {self.name}",
            )
        outputs, values = ({rank: found[key] for rank, found in results.items()} for key in ("output", "value"))
        return JobCell(step, outputs, values)

    def as_json(self) -> dict[str, Any]:
        """Return {"name", "ranks", "state", "step"}. state: see `state`. step: see `picture`."""
        return {"name": self.name, "ranks": self.size, "state": self.state(), "step": self.picture()}

    def _all_ranks(self) -> Sequence[ListeningRank]:
        ranks = [self.ranks[rank] for rank in range(self.size) if rank in self.ranks]
        here = [rank for rank in ranks if rank.is_here and rank.is_alive()]
        if len(here) < self.size:
            raise ClusterError(
                "A live cell runs on all ranks, but some ranks cannot be reached.",
                numbers=f"{len(here)} of {self.size} ranks run and listen on this host",
                hint=f"nbkit why --job {self.name}",
            )
        return here

    def _of_each(self, ranks: Sequence[ListeningRank], ask: Callable[[JobLink], T]) -> dict[int, T | Exception]:
        def on(rank: ListeningRank) -> T | Exception:
            try:
                link = JobLink(rank, self._secret, seconds=ANSWER_SECONDS)
            except NbkitError as error:
                return error
            try:
                return ask(link)
            except NbkitError as error:
                return error
            finally:
                link.close()

        with ThreadPoolExecutor(max(len(ranks), 1)) as pool:
            return dict(zip((rank.rank for rank in ranks), pool.map(on, ranks), strict=True))

    def _table(self) -> tuple[str, Sequence[tuple[str, ...]]]:
        picture, state = self.picture(), self.state()
        parts = {row[0]: row for row in picture.get("ranks", ())}
        rows = []
        for rank in range(self.size):
            found, row = state.get(rank, {}), parts.get(rank)
            times = [seconds_text(row[i]) for i in (1, 2, 3, 4, 6, 7, 8)] if row else [""] * 7
            memory = f"{found['memory'] / 2**20:,.0f} MiB" if found else ""
            loss = f"{found['loss']:.4g}" if found.get("loss") is not None else ""
            rows.append((str(rank), str(found.get("step", "does not answer")), *times, memory, loss))
        return picture.get("reading", ""), rows

    def __repr__(self) -> str:
        reading, rows = self._table()
        more = f"nbkit why --job {self.name}   nbkit watch {self.name}"
        return "\n".join(
            part
            for part in (f"job {self.name}: {self.size} ranks. {reading}", text_table(_COLUMNS, rows), more)
            if part
        )

    def _repr_html_(self) -> str:
        reading, rows = self._table()
        title = html.escape(f"job {self.name}: {self.size} ranks. {reading}")
        return f"<b>{title}</b>{html_table(_COLUMNS, rows)}"


def _of_links(links: Sequence[JobLink], ask: Callable[[JobLink], T]) -> dict[int, T | Exception]:
    def on(link: JobLink) -> T | Exception:
        try:
            return ask(link)
        except NbkitError as error:
            return error

    with ThreadPoolExecutor(len(links)) as pool:
        return dict(zip((link.rank.rank for link in links), pool.map(on, links), strict=True))


def _planned(links: Sequence[JobLink], source: str) -> int:
    """Plan a cell for the same step on all ranks, and return the step. If a rank refuses, the cell runs on no rank."""
    ahead = 2
    for last in (False,) * (_TRIES - 1) + (True,):
        states = _of_links(links, lambda link: link.ask(GetJobState(), seconds=ANSWER_SECONDS))
        _raise_first(states)
        known: list[dict[str, Any]] = list(states.values())  # type: ignore[arg-type]
        each = max((found["seconds"] or 0.0) for found in known)
        step = max(found["step"] for found in known) + max(ahead, math.ceil(_AHEAD_SECONDS / each) if each else 0)
        plan = PlanJobCell(source, step)
        planned = _of_links(links, lambda link, plan=plan: link.ask(plan, seconds=ANSWER_SECONDS))  # type: ignore[misc]
        refused = [found for found in planned.values() if isinstance(found, Exception)]
        if not refused:
            return int(step)
        for link in links:
            if not isinstance(planned[link.rank.rank], Exception):
                link.ask(DecideJobCell(False), seconds=ANSWER_SECONDS)
        if last or not all("The step is over" in str(error) for error in refused):
            raise refused[0]
        ahead *= 8
    raise AssertionError


def _raise_first(found: Mapping[int, Any]) -> None:
    for value in found.values():
        if isinstance(value, Exception):
            raise value
