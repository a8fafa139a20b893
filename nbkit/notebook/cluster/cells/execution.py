"""The execution of one cell: collects what each rank sends back, shows it, and decides how the cell ends.

All of this runs on the client's thread when messages arrive; other threads only wait for `done`. A rank has finished
when its record and all outputs that the record counts have arrived. The cell has ended when every rank has finished and
the screen has shown everything. The first failure is shown as soon as it is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nbkit.errors import CellError
from nbkit.notebook.cluster.cells.results import Results, group_by_text, value_of
from nbkit.notebook.cluster.output.display import NOBODY, KeptText, Outbox, Screen, ShownByRank, ShownMessage
from nbkit.notebook.cluster.output.lines import Lines, label
from nbkit.notebook.cluster.output.rank_tabs import RankTabs
from nbkit.notebook.cluster.output.root_cause import cell_error, fault, root_of, twins_of
from nbkit.wire.cells import COMM_TYPES, CellRecord, CellRequest, Failure, Prompt, first_line, ranks_text
from nbkit.wire.messages import Death

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cells.stop import Stop

ROOT_SECONDS = 0.3  # how long an error about a lost peer waits for the message about that peer
LOST_SECONDS = 3.0  # then outputs that a rank's log lacks count as lost, if no more have arrived meanwhile
TWIN_SECONDS = 0.3  # how long a failure waits for equal ones: ranks that share cores fail one after the other


class Execution:
    """A cell, from the moment it is sent until `done` has its Results or its error.

    later: runs a function on the client's thread after the given number of seconds. stop_ranks: asks all ranks to stop
    the cell; returns their replies. names: returns the names that the notebook defines. observers: each is called with
    the execution, on the client's thread, after all output is shown and before `done` is set; more may be appended
    until then. fetched: an earlier notebook sent the cell, so its outputs are fetched, not pushed. followed: the ranks
    whose outputs are fetched.
    """

    def __init__(
        self,
        request: CellRequest,
        screen: Screen,
        *,
        later: Callable[[float, Callable[[], None]], Any],
        stop_ranks: Callable[[], dict[int, Future[Any]]],
        observers: Iterable[Callable[[Execution], object]] = (),
        names: Callable[[], frozenset[str]] = frozenset,
        live: bool = False,
        fetched: bool = False,
    ) -> None:
        self.request, self.names, self.live, self.fetched = request, names, live, fetched
        self.followed = set(request.ranks) if fetched else set[int]()
        self.stop_ranks, self.observers = stop_ranks, list(observers)
        self.later: Callable[[float, Callable[[], None]], Any] = lambda seconds, act: later(
            seconds, partial(self.guard, "what was about to be shown", None, act)
        )
        self.stop: Stop | None = None  # begun by the user
        self.fault: CellError | None = None  # an error of nbkit itself; later messages are ignored
        self.unshown: CellError | None = None  # the error of the first message that the screen could not show
        self.outbox = Outbox(screen, self.later, self._on_unshown)
        self.shown = ShownByRank()
        self.clearing: set[int] = set()  # ranks whose earlier output is cleared when they show the next
        self.tabs = screen if isinstance(screen, RankTabs) else None
        self.lines = Lines(request.ranks)
        self.records: dict[int, CellRecord] = {}
        self.deaths: dict[int, Death] = {}
        self.prompts: dict[int, Prompt] = {}  # of ranks that wait for a typed line, once their earlier output is shown
        self.asked: set[int] = set()
        self.unanswered = ""  # why no line could be typed
        self.arrived = dict.fromkeys(request.ranks, 0)
        self.missing: dict[int, tuple[int, float]] = {}  # rank -> (outputs that have arrived, time of the last)
        self.text = {rank: KeptText() for rank in request.ranks}
        self.sent = time.time()
        self.ended = 0.0
        self.reason = ""  # why the notebook stopped the cell: "stopped", "stopped after 3 s (--timeout)"
        self.shown_root = False
        self.closing = False
        self.timer_set = False
        self.done: Future[Results] = Future()

    # Messages from the ranks ------------------------------------------------------------------------------------

    def on_output(self, kind: str, mark: dict[str, Any], content: dict[str, Any]) -> None:
        """Show an output message of one rank. mark["seq"]: its number in the cell; -1 from a thread after the cell."""
        rank, seq = mark["rank"], mark["seq"]
        if rank not in self.arrived or self.done.done() or self.fault or 0 <= seq < self.arrived[rank]:
            return  # from a rank that does not run this cell, too late, or a duplicate
        if seq >= 0:
            self.arrived[rank] = seq + 1
        if kind == "stream":
            self.text[rank].add(content["text"])
        if kind in COMM_TYPES:
            self.outbox.put("comm", kind, content)
        elif kind == "clear_output":
            self.clearing.add(rank)
            if not content.get("wait"):
                self._clear({rank}, at_once=True)
        else:
            if rank in self.clearing:
                self._clear({rank})
            piece = ShownMessage(rank, kind, content)
            if kind != "stream" or self.tabs is None:  # tabs keep their own text
                self.shown.add(piece)
            self._show(piece)
        if rank in self.records and self.records[rank].status == "error":
            self._show_root()
        self._maybe_close()

    def on_missing_output(self, rank: int, outputs: int) -> None:
        """Handle a rank whose log lacks some of its `outputs`. Stop waiting if no more arrive for LOST_SECONDS."""
        if rank not in self.arrived:
            return  # a resize removed it from the cell after it was asked
        arrived, since = self.missing.get(rank, (-1, 0.0))
        if arrived != self.arrived[rank]:
            self.missing[rank] = self.arrived[rank], time.monotonic()
        elif time.monotonic() - since > LOST_SECONDS:
            self.arrived[rank] = outputs
            self.say(f"{outputs - arrived} outputs of rank {rank} were lost on their way, and its log lacks them.")
            self._maybe_close()

    def on_prompt(self, prompt: Prompt, words: str) -> None:
        """Handle a rank's request for a typed line. words: an explanation to show once, "" for none."""
        if prompt.rank not in self.arrived or prompt.rank in self.records or self.done.done():
            return
        self._show_all_lines()
        if words and not self.asked & ({prompt.rank} if self.request.detached else {*self.arrived}):
            self.say(words)
        self.asked.add(prompt.rank)
        self.outbox.flushed(lambda: self.prompts.update({prompt.rank: prompt}))

    def on_record(self, record: CellRecord) -> None:
        self.prompts.pop(record.rank, None)
        if record.rank in self.deaths or record.rank in self.records or record.rank not in self.arrived:
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
        """End a live cell that no rank has begun."""
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

    def on_replaced(self, rank: int) -> None:
        """Handle the replacement of `rank`: a new process continues the cell and counts its outputs from zero."""
        self.arrived[rank] = 0
        self.followed.add(rank)

    def on_resized(self, n: int, newcomers: list[int], said: str) -> None:
        """Handle a resize of the cluster to `n` ranks.

        newcomers: new ranks that run the cell too. said: the text to show.
        """
        self.say(said)
        ranks = sorted({*(rank for rank in self.request.ranks if rank < n), *newcomers})
        self.request = replace(self.request, ranks=tuple(ranks))
        for rank in [rank for rank in self.arrived if rank >= n]:
            for of in (self.arrived, self.records, self.deaths, self.missing):
                of.pop(rank, None)  # type: ignore[attr-defined]
        for rank in newcomers:
            self.arrived[rank], self.text[rank] = 0, self.text.get(rank, KeptText())
        self.followed |= {*newcomers}
        self.lines.ranks = self.request.ranks
        self._maybe_close()

    def on_lost(self, rank: int, error: BaseException) -> None:
        """Handle a failure of the call itself: no record will come."""
        self.on_record(self._lost(rank, error))

    def _lost(self, rank: int, error: BaseException) -> CellRecord:
        failure = Failure(type(error).__name__, str(error), (str(error),), time.time())
        return CellRecord(self.request.id, rank, 0, "error", 0.0, 0, failure=failure)

    def guard(self, what: str, rank: int | None, act: Callable[..., object], *args: Any) -> None:
        """Call act(*args), and end the cell if it raises. what: names the message or the work, for the error.

        On the client's thread, nobody would see a raised error, and whoever waits for the cell would wait for ever.
        """
        try:
            act(*args)
        except Exception as error:
            self.on_fault(what, rank, error)

    def on_fault(self, what: str, rank: int | None, error: Exception, *, over: bool = False) -> None:
        """Stop the cell because a message could not be handled. Its later output is not shown.

        The cell ends with this error when its ranks are free. over: `rank` will send nothing more.
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
                except Exception:  # nothing can be sent, so no answer would come
                    self.finish(error=self.fault)
                    return
        self._maybe_close()

    # Display ------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Show a line from nbkit itself in the cell's output."""
        self.shown.add(ShownMessage(NOBODY, "stream", {"name": "stderr", "text": f"{text}\n"}))
        self.outbox.stream("stderr", f"{text}\n")

    def _on_unshown(self, kind: str, error: Exception) -> None:
        """Keep a screen's error for the end of the cell. The ranks go on: perhaps only the notebook is being closed."""
        self.unshown = self.unshown or fault(self.request, f"a message for the screen ({kind})", None, error)

    def _show_ready(self) -> None:
        now = time.monotonic()
        for name, text in self.lines.take(now):
            self.outbox.stream(name, text)
        wait = self.lines.due(now)
        if wait is not None and not self.timer_set:
            self.timer_set = True
            self.later(wait, self._on_timer)

    def _show_all_lines(self) -> None:
        """Show all lines, even those that wait for an equal line or a newline, because other output comes next."""
        for name, text in self.lines.take(time.monotonic(), final=True):
            self.outbox.stream(name, text)

    def _on_timer(self) -> None:
        self.timer_set = False
        if not self.done.done():
            self._show_ready()

    def _show(self, piece: ShownMessage) -> None:
        rank, content = piece.rank, piece.content
        if piece.kind != "stream":
            self._show_rich(rank, piece.kind, content)
        elif rank == NOBODY:
            self._show_all_lines()
            self.outbox.stream(content["name"], content["text"])
        elif self.tabs is not None:
            self.tabs.feed(rank, content["text"])
        else:
            self.lines.feed(time.monotonic(), rank, content["name"], content["text"])
            self._show_ready()

    def _clear(self, ranks: set[int], *, at_once: bool = False) -> None:
        """Clear the output of `ranks`. Only a whole page can be cleared, so the output of other ranks is shown again.

        at_once: clear even if nothing follows.
        """
        self.clearing -= ranks
        if not ranks or not self.outbox.screen.clears:
            return
        if self.tabs is not None:
            self.tabs.empty(ranks)
        kept = self.shown.clear(ranks)
        if kept is None:
            return
        self.lines = Lines(self.request.ranks)
        self.outbox.put("clear", bool(kept) or not at_once)
        if self.tabs is not None:
            self.outbox.put("display", *self.tabs.as_output())
        for piece in kept:
            self._show(piece)

    def _show_rich(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        self._show_all_lines()
        transient = dict(content.get("transient") or {})
        if "display_id" in transient and rank != NOBODY:  # two ranks may use the same id
            transient["display_id"] = f"nbkit-{self.request.id}-{rank}-{transient['display_id']}"
        if kind == "display_data" and rank != NOBODY:
            self.outbox.stream("stdout", f"{label([rank])}:\n")
        self.outbox.put(
            "display" if kind == "display_data" else "update", content["data"], content["metadata"], transient
        )

    def _show_root(self) -> None:
        """Show the cause as soon as it is known. Equal failures of other ranks are folded into it."""
        root = root_of(self.records, self.deaths)
        if root is None or self.shown_root or self.reason:
            return
        record = self.records.get(root)
        if record is not None and self.arrived[root] < record.outputs:
            return  # its earlier output must be shown first, and is still on its way
        # Ranks that fail in the same line at the same time are shown together: wait a moment for the others.
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
        values = group_by_text(self.records)
        self._clear(self.clearing & {rank for ranks, _ in values for rank in ranks})
        self._show_all_lines()
        for ranks, bundle in values:
            text = bundle["data"].get("text/plain", "")
            if set(bundle["data"]) == {"text/plain"}:
                space = "\n" if "\n" in text else " "
                self.outbox.stream("stdout", f"\x1b[31mOut{label(ranks)}:\x1b[0m{space}{text}\n")
            else:
                self.outbox.stream("stdout", f"\x1b[31mOut{label(ranks)}:\x1b[0m\n")
                self.outbox.put("display", bundle["data"], bundle.get("metadata", {}), {})

    # The end ----------------------------------------------------------------------------------------------------

    def _maybe_close(self) -> None:
        if self.fault and not self.waiting_for and not self.done.done():
            self.finish(error=self.fault)
        if self.closing or self.fault:
            return
        # This runs for each rank that ends, so it must not loop over all ranks before the last one has ended.
        if len(self.records) + len(self.deaths) < len(self.request.ranks):
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
        self.outbox.flushed(partial(self.guard, "the end of the cell", None, self._close))

    def give_up_output(self) -> None:
        """Stop waiting for output that has not arrived or is not shown yet.

        The user has stopped the cell and every rank has ended it.
        """
        if self.closing:
            self._drop_flood()
            return
        for rank, record in self.records.items():
            self.arrived[rank] = max(self.arrived[rank], record.outputs)
        self._maybe_close()

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
        """End the cell. Observers are called before `done` is set, because a waiter may send the next cell at once."""
        self.ended = time.time()
        if self.tabs is not None:
            self.tabs.end()
        for observe in self.observers:
            try:
                observe(self)
            except Exception as failed:
                error = error or fault(self.request, "the end of the cell", None, failed)
        with suppress(InvalidStateError):  # the cluster was stopped at the same moment
            if error is not None:
                self.done.set_exception(error)
            else:
                self.done.set_result(results or self.results("interrupted"))

    def results(self, status: str) -> Results:
        """Return the results that have arrived so far."""
        return Results(
            values={rank: value_of(record) for rank, record in sorted(self.records.items())},
            output={rank: str(text) for rank, text in self.text.items()},
            seconds={rank: record.seconds for rank, record in sorted(self.records.items())},
            status=status,
            generation=max((record.generation for record in self.records.values()), default=0),
        )

    @property
    def waiting_for(self) -> list[int]:
        """Return the ranks that have neither ended the cell nor died."""
        return [rank for rank in self.request.ranks if rank not in self.records and rank not in self.deaths]

    def is_last(self, rank: int) -> bool:
        """Return True if every other rank has ended the cell or died. Does not loop over all ranks."""
        ended = self.records.keys() | self.deaths.keys() if self.deaths else self.records
        return len(ended) + (rank not in ended) >= len(self.request.ranks)

    def describe(self, *, age: bool = True) -> str:
        """Return `cell 7 (trainer.fit(500) …, ranks 0-3, 12 s)`. age: include the seconds, which keep changing."""
        short, ranks = first_line(self.request.source), self.request.ranks
        seconds = f", {(self.ended or time.time()) - self.sent:.0f} s" if age else ""
        return f"cell {self.request.number} ({short}, rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}{seconds})"
