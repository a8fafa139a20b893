"""A cell on its way: what has come back from each rank, what is on screen, and how it ends.

Everything here happens on the wire's thread, as answers arrive; `done` is the one thing others wait for.
A rank's part is over when its record is here and as many outputs as the record counts; the cell is over when
all parts are and the screen has everything. The first failure is shown the moment it is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from nbkit.errors import CellError
from nbkit.notebook.cluster.cells.results import Results, group_by_text, value_of
from nbkit.notebook.cluster.output.display import Outbox, Screen
from nbkit.notebook.cluster.output.handler_failure import fault, guard
from nbkit.notebook.cluster.output.lines import Lines, label
from nbkit.notebook.cluster.output.root_cause import Death, cell_error, root_of, twins_of
from nbkit.wire.cells import COMM_TYPES, CellRecord, CellRequest, Failure, first_line, ranks_text

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cells.stop import Stop

ROOT_SECONDS = 0.3  # an error about a lost peer waits this long for the news of what happened to the peer
TWIN_SECONDS = 0.3  # and a failure for equal ones: ranks that share cores come to their line one after the other
KEEP_OUTPUT = 1 << 20  # characters per rank in Results.output; the file on disk has all


class Running:
    """One cell, from the moment it is sent.

    later: run a function on the wire's thread in so many seconds. names: asks which names the notebook defines.
    """

    def __init__(
        self,
        request: CellRequest,
        screen: Screen,
        later: Callable[[float, Callable[[], None]], Any],
        names: Callable[[], frozenset[str]] = frozenset,
        *,
        live: bool = False,
    ) -> None:
        self.request, self.names, self.live = request, names, live
        self.later: Callable[[float, Callable[[], None]], Any] = lambda seconds, act: later(
            seconds, partial(guard, self, "what was about to be shown", None, act)
        )
        self.before_done: Callable[[], None] = lambda: None
        self.stop_ranks: Callable[[], object] = lambda: None
        self.stop: Stop | None = None  # the one that is under way
        self.fault: CellError | None = None  # why nothing that comes is handled any more
        self.unshown: CellError | None = None  # the first thing that the screen did not take
        self.outbox = Outbox(screen, self.later, self._on_unshown)
        self.lines = Lines(request.ranks)
        self.records: dict[int, CellRecord] = {}
        self.deaths: dict[int, Death] = {}
        self.arrived = dict.fromkeys(request.ranks, 0)
        self.text: dict[int, list[str]] = {rank: [] for rank in request.ranks}
        self.kept = dict.fromkeys(request.ranks, 0)
        self.sent = time.time()
        self.ended = 0.0
        self.followed = False  # an earlier notebook sent it; outputs are fetched, not pushed
        self.reason = ""  # why the user's side ended it: "stopped", "after 3 s (--timeout)"
        self.shown_root = False
        self.closing = False
        self.timer_set = False
        self.done: Future[Results] = Future()

    # What arrives -----------------------------------------------------------------------------------------------

    def on_output(self, kind: str, mark: dict[str, Any], content: dict[str, Any]) -> None:
        """An output message of one rank. seq: its number in the cell, -1 for what a thread prints afterwards."""
        rank, seq = mark["rank"], mark["seq"]
        if rank not in self.arrived or self.done.done() or self.fault or 0 <= seq < self.arrived[rank]:
            return  # not ours, too late, or given to us before by a replay
        if seq >= 0:
            self.arrived[rank] = seq + 1
        if kind == "stream":
            self._keep(rank, content["text"])
            self.lines.feed(time.monotonic(), rank, content["name"], content["text"])
            self._show_ready()
        elif kind in COMM_TYPES:
            self.outbox.put("comm", kind, content)
        else:
            self._show_rich(rank, kind, content)
        if rank in self.records and self.records[rank].status == "error":
            self._show_root()
        self._maybe_close()

    def on_record(self, record: CellRecord) -> None:
        if record.rank in self.deaths or record.rank in self.records:
            return
        self.records[record.rank] = record
        if self.fault:
            self._maybe_close()
        elif record.status == "error":
            self._show_root()
        elif record.status == "released":
            self.later(ROOT_SECONDS, self._show_root)
        self._maybe_close()

    def withdraw(self) -> None:
        """Of a live cell that no rank has begun: it will not be run."""
        failure = Failure("NotRun", "the live cell was withdrawn before its step boundary", (), time.time())
        for rank in self.waiting_for:
            self.records[rank] = CellRecord(self.request.id, rank, 0, "interrupted", 0.0, 0, failure=failure)
        self._maybe_close()

    def on_death(self, death: Death) -> None:
        if death.rank not in self.arrived or death.rank in self.records or death.rank in self.deaths:
            return
        self.deaths[death.rank] = death
        if not self.fault:
            self._show_root()
        self._maybe_close()

    def on_lost(self, rank: int, error: BaseException) -> None:
        """The call itself failed, so no record will come."""
        self.on_record(self._lost(rank, error))

    def _lost(self, rank: int, error: BaseException) -> CellRecord:
        failure = Failure(type(error).__name__, str(error), (str(error),), time.time())
        return CellRecord(self.request.id, rank, 0, "error", 0.0, 0, failure=failure)

    def on_fault(self, what: str, rank: int | None, error: Exception, *, over: bool = False) -> None:
        """Handling a message, or what it led to, has failed. Nothing more is shown, and the ranks are stopped.

        The cell ends with this reason when its ranks are free. over: the part of `rank` is over.
        """
        if self.done.done():
            return
        if over and rank in self.waiting_for:
            self.records[rank] = self._lost(rank, error)
        if self.fault is None:
            self.fault = fault(self.request, what, rank, error)
            if self.waiting_for:
                with suppress(Exception):
                    self.say(f"{self.fault.what}. The cell is stopped.")
                try:
                    self.stop_ranks()
                except Exception:  # nothing can be sent; nothing would come either
                    self.finish(error=self.fault)
                    return
        self._maybe_close()

    # What it shows ----------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A line of nbkit's own, in the cell's output."""
        self.outbox.stream("stderr", f"{text}\n")

    def _on_unshown(self, kind: str, error: Exception) -> None:
        """A screen that fails stops no rank (its notebook may be about to go), but is told in the end."""
        self.unshown = self.unshown or fault(self.request, f"a message for the screen ({kind})", None, error)

    def _keep(self, rank: int, text: str) -> None:
        if self.kept[rank] < KEEP_OUTPUT:
            self.text[rank].append(text)
            self.kept[rank] += len(text)

    def _show_ready(self) -> None:
        now = time.monotonic()
        for name, text in self.lines.take(now):
            self.outbox.stream(name, text)
        wait = self.lines.due(now)
        if wait is not None and not self.timer_set:
            self.timer_set = True
            self.later(wait, self._on_timer)

    def _show_all_lines(self) -> None:
        """Also those that wait for a twin or for their newline: something else comes next."""
        for name, text in self.lines.take(time.monotonic(), final=True):
            self.outbox.stream(name, text)

    def _on_timer(self) -> None:
        self.timer_set = False
        if not self.done.done():
            self._show_ready()

    def _show_rich(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        if kind == "clear_output":
            if rank == min(self.request.ranks):
                self.outbox.put("clear", content.get("wait", False))
            return
        self._show_all_lines()
        transient = dict(content.get("transient") or {})
        if "display_id" in transient:  # two ranks may use the same one
            transient["display_id"] = f"nbkit-{self.request.id}-{rank}-{transient['display_id']}"
        if kind == "display_data":
            self.outbox.stream("stdout", f"{label([rank])}:\n")
        self.outbox.put(
            "display" if kind == "display_data" else "update", content["data"], content["metadata"], transient
        )

    def _show_root(self) -> None:
        """Show the cause as soon as it is known; equal failures of other ranks are folded into it."""
        root = root_of(self.records, self.deaths)
        if root is None or self.shown_root or self.reason:
            return
        record = self.records.get(root)
        if record is not None and self.arrived[root] < record.outputs:
            return  # what it printed before it failed is still on its way, and belongs above
        # Ranks that fail in the same line at the same time are one story: give the others a moment to arrive.
        if root in self.records and len(self.records) < len(self.request.ranks) and not self.closing:
            cause = self.records[root].failure
            assert cause is not None
            if time.time() - cause.moment < TWIN_SECONDS:
                self.later(TWIN_SECONDS / 6, self._show_root)
                return
        self.shown_root = True
        self._show_all_lines()
        if root in self.deaths:
            death = self.deaths[root]
            self.say(f"\x1b[31mRank {root} died: {death.how}.\x1b[0m")
            return
        cause = self.records[root].failure
        assert cause is not None
        self.say(f"{label(twins_of(root, self.records))} " + "\n".join(cause.traceback))

    def _show_values(self) -> None:
        for ranks, bundle in group_by_text(self.records):
            text = bundle["data"].get("text/plain", "")
            if set(bundle["data"]) == {"text/plain"}:
                space = "\n" if "\n" in text else " "
                self.outbox.stream("stdout", f"\x1b[31mOut{label(ranks)}:\x1b[0m{space}{text}\n")
            else:
                self.outbox.stream("stdout", f"\x1b[31mOut{label(ranks)}:\x1b[0m\n")
                self.outbox.put("display", bundle["data"], bundle.get("metadata", {}), {})

    # How it ends ------------------------------------------------------------------------------------------------

    def _maybe_close(self) -> None:
        if self.fault and not self.waiting_for and not self.done.done():
            self.finish(error=self.fault)
        if self.closing or self.fault:
            return
        for rank in self.request.ranks:
            record = self.records.get(rank)
            if rank not in self.deaths and (record is None or self.arrived[rank] < record.outputs):
                return
        self.closing = True
        self._show_all_lines()
        self._show_root()
        self._show_values()
        if self.reason:
            self._drop_flood()
        self.outbox.flushed(partial(guard, self, "the end of the cell", None, self._close))

    def _drop_flood(self) -> None:
        if lines := self.outbox.drop():
            self.say(f"… {lines} lines more; all of it is in the cluster's output folder (%cluster status)")

    def _close(self) -> None:
        failed = bool(self.deaths) or any(record.failure for record in self.records.values())
        if failed and not self.reason:
            self.finish(error=cell_error(self.records, self.deaths, hint_names=self.names()))
        elif self.unshown and not self.reason:
            self.finish(error=self.unshown)
        else:
            self.finish(results=self.results("interrupted" if failed else "ok"))

    def finish(self, *, results: Results | None = None, error: Exception | None = None) -> None:
        """The cell is over. What has to know first, knows first: whoever waits may send the next cell at once."""
        self.ended = time.time()
        try:
            self.before_done()
        except Exception as failed:
            error = error or fault(self.request, "the end of the cell", None, failed)
        with suppress(InvalidStateError):  # the cluster was stopped in the same moment
            if error is not None:
                self.done.set_exception(error)
            else:
                self.done.set_result(results or self.results("interrupted"))

    def results(self, status: str) -> Results:
        """What there is so far."""
        return Results(
            values={rank: value_of(record) for rank, record in sorted(self.records.items())},
            output={rank: "".join(parts) for rank, parts in self.text.items()},
            seconds={rank: record.seconds for rank, record in sorted(self.records.items())},
            status=status,
            generation=max((record.generation for record in self.records.values()), default=0),
        )

    @property
    def waiting_for(self) -> list[int]:
        """The ranks whose part is not over."""
        return [rank for rank in self.request.ranks if rank not in self.records and rank not in self.deaths]

    def describe(self, *, age: bool = True) -> str:
        """`cell 7 (trainer.fit(500) …, ranks 0-3, 12 s)`; age: with the seconds, which go on."""
        short, ranks = first_line(self.request.source), self.request.ranks
        seconds = f", {(self.ended or time.time()) - self.sent:.0f} s" if age else ""
        return f"cell {self.request.number} ({short}, rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}{seconds})"
