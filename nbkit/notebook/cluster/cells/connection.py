"""The connection of a notebook to a cluster: sends cells and requests, and passes every answer to its cell.

`EndNews` tells running cells that their cluster is about to end, and why.
"""

from __future__ import annotations

import itertools
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from nbkit.errors import CellRunning, ClusterError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.debugging.prompt import announced
from nbkit.notebook.cluster.launch.pins import repinned
from nbkit.notebook.cluster.output.display import Screen
from nbkit.notebook.cluster.output.lines import label
from nbkit.notebook.cluster.output.widget_comms import ClusterComms
from nbkit.notebook.cluster.registry import ClusterEntry, names_of_notebook
from nbkit.notebook.cluster.why import QuietWatch
from nbkit.notebook.cluster.world_generation import WorldGeneration
from nbkit.wire import cluster_end
from nbkit.wire.cells import COMM_TYPES, LONG_SECONDS, CellRecord, CellRequest, Prompt, ranks_named, record_from
from nbkit.wire.messages import (
    NEWS,
    Death,
    FollowCell,
    GetStatus,
    LiveCellEnded,
    NotebookSeen,
    PromptOpened,
    RankEnd,
    RankIsDead,
    RanksChanged,
    RunLiveCell,
    SayHello,
    SizeChange,
    StopCell,
    decoded,
    deliver,
    handles,
)
from nbkit.wire.processes import Process


class EndNews:
    """News about the end of one connection's cluster. It is checked every second."""

    def __init__(self, entry: ClusterEntry) -> None:
        self._entry = entry
        self._said, self._looks = "", 0

    def say(self, cells: Collection[Execution]) -> None:
        """Tell the running cells why the cluster is about to end; once for each reason."""
        end = cluster_end.read(self._entry.folder)
        if cells and end is not None and end.step < 0 and end.why != self._said:
            self._said = end.why
            for execution in cells:
                execution.say(f"{end.why}: a training ends at its next step boundary, and is saved.")

    def still_ends(self) -> bool:
        """Return True if the cluster is gone but some of its ranks are alive and still ending a training."""
        self._looks += 1
        if self._entry.is_spread and self._entry.controller.is_alive() and not registry.how_ended(self._entry):
            return True  # the coordinator was killed: ranks on other hosts notice it, and still answer
        if not any(process.is_alive() for process in self._entry.ranks):
            return False
        # A rank's note about the end may arrive a moment after the end itself.
        return cluster_end.read(self._entry.folder) is not None or self._looks < 2


FOLLOW_SECONDS = 0.2
DEATH_NEWS_SECONDS = 0.1
LATE_SECONDS = 2.0
WATCH_SECONDS = 1.0
_TAKEN = "another notebook has taken the cluster over"


class Connection:
    """An open connection to a running cluster. Methods `_on_*` run on the client's thread.

    entry: the cluster's entry in the registry, with this kernel as its notebook. ended: why the connection is closed,
    "" while it is open.
    """

    def __init__(self, entry: ClusterEntry, client: Client) -> None:
        self.entry, self.client = entry, client
        self._resized = 0.0  # when the number of ranks last changed
        self.ended = ""
        self.cells: dict[str, Execution] = {}
        self.latest: Execution | None = None
        self.deaths: dict[int, Death] = {}
        self.replaced: dict[tuple[int, float], tuple[str, str]] = {}  # (rank, time of death) -> (cell, text to show)
        self.generation = WorldGeneration(client, entry.n)
        self.numbers = itertools.count(1)  # numbers of cells, when there is no notebook
        self.request_number = 0
        self.end_news = EndNews(entry)
        self.comms = ClusterComms(lambda *message: client.soon(client.relay, *message))
        self.read_size()
        client.listen(self._on_message, self._on_gone)
        client.soon(self._keep_in_touch, min(60.0, entry.ttl / 4))
        client.soon(self._watch)

    def take_up(self, screen: Screen) -> None:
        """Read the state of a running cluster from its ranks. If they run a cell, follow it."""
        self._read_deaths()
        alive = [rank for rank in self.client.ranks if rank not in self.deaths]
        self.client.listen_to(alive, 5.0)
        states = self.client.ask(alive, GetStatus())
        self.request_number = max((state["requests"] for state in states.values()), default=0)
        self.generation.learn(states)
        held = next((s for s in states.values() if s["cell"]), None)
        held = held or next((s["undelivered"] for s in states.values() if s["undelivered"]), None)
        if held:
            request = CellRequest(held["cell"], held["source"], held["number"], tuple(held["ranks"]))
            self.latest = self._execution(request, screen, fetched=True)
            self._watch_quiet(self.latest)
            for said in dict.fromkeys(said for cell, said in self.replaced.values() if cell == request.id):
                self.client.soon(self.latest.say, said)
            for rank in request.ranks:
                self.client.soon(self._follow, self.latest, rank, 0)
            for asked in [state["prompt"] for state in states.values() if state["prompt"]]:
                self.client.soon(self._on_prompt, Prompt(**asked))

    def close(self, why: str = "the cluster was stopped") -> None:
        """Close the connection, and end the running cells with this reason."""
        self.ended = why
        for execution in list(self.cells.values()):
            execution.reason = execution.reason or why
            execution.finish()
        self.comms.close()
        self.client.close()

    # State ----------------------------------------------------------------------------------------------------------

    def busy(self) -> Execution | None:
        """Return the ordinary cell that runs now."""
        latest = self.latest
        return latest if latest is not None and not latest.done.done() else None

    def why_gone(self) -> str:
        """Return why the cluster cannot be used any more, or ""."""
        if self.ended or not self.entry.is_alive():
            return self.ended or registry.how_ended(self.entry) or "the cluster has ended"
        try:
            found = registry.find(self.entry.name)
        except ClusterError:  # a notebook with another release of nbkit has attached to it
            return _TAKEN
        return _TAKEN if found and found.kernel != self.entry.kernel else ""

    def check_open(self) -> None:
        """Raise ClusterError if the cluster is gone."""
        if why := self.why_gone():
            again = "%cluster start" if self.ended else "%cluster restart"  # a restart keeps the options of `start`
            if why == _TAKEN:
                again = f"%cluster attach {self.entry.name} --take"
            elif cluster_end.SAVED in why:
                again = cluster_end.HINT
            raise ClusterError(f"{self.entry.name}: {why}.", hint=again)

    def check_ours(self) -> None:
        """Raise ClusterError if another live notebook has taken the cluster: then this notebook must not end it."""
        if self.why_gone() != _TAKEN:
            return
        with suppress(ClusterError):
            if (found := registry.find(self.entry.name)) and not found.is_attached():
                return
        raise ClusterError(
            f"{self.entry.name}: {_TAKEN}, and uses it.",
            hint=f"%cluster attach {self.entry.name} --take   first; or leave it to that notebook",
        )

    def check_idle(self, what: str) -> None:
        """Raise CellRunning, naming the cell, if a cell runs. what: "cell", "push", "pull", "sync" or "control"."""
        busy = self.busy()
        if busy is not None:
            live = "   or   --at-step to run inside a training" if what == "cell" else ""
            queue = "   or   --queue to run after it" if what not in ("sync", "control") else ""
            raise CellRunning(
                f"The ranks are busy with {busy.describe()}.",
                numbers=f"this {what} has to wait for it",
                hint=f"%train wait{queue}{live}",
            )

    def check_alive(self, ranks: Sequence[int]) -> None:
        """Raise ClusterError if one of `ranks` has died."""
        gone = [rank for rank in ranks if rank in self.deaths]
        if gone:
            left = [rank for rank in self.client.ranks if rank not in self.deaths]  # the hub hears of deaths later
            raise ClusterError(
                f"Rank {gone[0]} has died ({self.deaths[gone[0]].how}).",
                numbers=f"left: {ranks_named(left).lower() if left else 'none'}",
                hint="%cluster restart   or   --ranks to use those that are left (without collectives)",
            )

    # Sending --------------------------------------------------------------------------------------------------------

    def send(self, request: CellRequest, screen: Screen, note: str = "", *, live: bool = False) -> Execution:
        """Send a cell to its ranks.

        note: text to show before its output. live: run the cell at the next step boundary of a training.
        """
        execution = self._execution(request, screen, live=live)
        if note:
            self.client.soon(execution.say, note)
        if live:  # a live cell is a request, not a call, so its records come as messages
            self.client.request(request.ranks, RunLiveCell(self.next_request(), request))
            return execution
        futures = self.client.call(request.ranks, "nbkit.bridge.calls:run_cell", request)
        self.latest = execution
        self._watch_quiet(execution)
        for rank, future in futures.items():
            future.add_done_callback(partial(self._on_call_over, execution, rank))
        return execution

    def ensure_world(self) -> str:
        """Form a new generation of the world if the current one cannot be used. Return the text for the user, or ""."""
        return self.generation.ensure(self.deaths)

    def ask_to_stop(self, request: CellRequest, live: bool) -> dict[int, Future[Any]]:
        """Ask all ranks to stop a cell, even if they do not run it: every rank must know the number of each request."""
        everyone = sorted({*self.client.ranks, *request.ranks})
        return self.client.request(everyone, StopCell(request.id, self.next_request(), live))

    def next_request(self) -> int:
        """Return the number of the next request. All ranks handle numbered requests in the same order."""
        self.request_number += 1
        return self.request_number

    def _execution(
        self, request: CellRequest, screen: Screen, *, live: bool = False, fetched: bool = False
    ) -> Execution:
        self.cells[request.id] = execution = Execution(
            request,
            screen,
            later=self.client.later,
            stop_ranks=partial(self.ask_to_stop, request, live),
            observers=() if live or fetched else (self.generation.learn_from,),
            names=names_of_notebook,
            live=live,
            fetched=fetched,
        )
        for death in self.deaths.values():
            self.client.soon(execution.guard, "the death", death.rank, execution.on_death, death)
        execution.done.add_done_callback(lambda _: self._on_end(execution))
        return execution

    def _watch_quiet(self, execution: Execution) -> None:
        self.client.soon(QuietWatch(self.entry, self.client, self.deaths, execution).begin)

    def _keep_in_touch(self, seconds: float) -> None:
        """Tell the cluster at regular intervals that this notebook is there."""
        if not self.ended:
            self.client.later(seconds, self._keep_in_touch, seconds)  # scheduled first, to go on after a failure
            self.client.request(self.client.ranks[:1], NotebookSeen())

    def _watch(self) -> None:
        """Check every second whether the cluster is alive and still ours, and whether a rank has died.

        Messages about deaths are not enough: zmq drops what is published while a connection is being made.
        """
        if self.ended:
            return
        self.end_news.say(self.cells.values())
        try:
            why = self.why_gone()
        except Exception:  # the next check reads it again
            why = ""
        if not why:
            try:
                self._read_deaths()
            except Exception:  # e.g. the registry cannot be saved because the disk is full
                traceback.print_exc(file=sys.__stderr__)
        elif why != _TAKEN and self.cells and self.end_news.still_ends():
            pass
        elif (end := cluster_end.read(self.entry.folder)) is not None and end.step >= 0:
            for execution in list(self.cells.values()):
                execution.finish(error=ClusterError(f"{self.entry.name}: {why}.", hint=cluster_end.HINT))
            return
        elif why == _TAKEN or not any(process.is_alive() for process in self.entry.ranks):
            for rank in {rank for execution in self.cells.values() for rank in execution.request.ranks}:
                self._on_death(Death(rank, why, time.time()))
            return
        else:
            for execution in list(self.cells.values()):
                execution.finish(error=_out_of_reach(self.entry, why))
            return
        self.client.later(WATCH_SECONDS, self._watch)

    # Receiving -------------------------------------------------------------------------------------------------------

    def _on_message(self, kind: str, mark: dict[str, Any], content: dict[str, Any]) -> None:
        """Handle a message of a rank: one of nbkit's own, an output of a cell, or a widget's."""
        if kind == NEWS:
            deliver(decoded(content), self, mark["rank"])
        elif kind in COMM_TYPES:
            self._on_comm(kind, mark, content)
        elif execution := self.cells.get(mark["cell"]):
            if mark["rank"] not in execution.followed:
                what = f"output {mark['seq']} ({kind})"
                execution.guard(what, mark["rank"], execution.on_output, kind, mark, content)
        elif (
            kind == "stream" and mark["seq"] < 0 and self.latest is not None and mark["cell"] == self.latest.request.id
        ):
            # A thread that outlived its cell printed this.
            self.latest.outbox.stream(content["name"], f"{label([mark['rank']])} {content['text']}")

    def _on_prompt(self, prompt: Prompt) -> None:
        if execution := self.cells.get(prompt.cell):
            execution.guard("a prompt", prompt.rank, execution.on_prompt, prompt, announced(prompt, execution.request))

    @handles(RankIsDead)
    def _on_rank_died(self, message: RankIsDead, _: int) -> None:
        self._on_death(message.death)

    @handles(RanksChanged)
    def _on_ranks_changed(self, _: RanksChanged, __: int) -> None:
        self._read_deaths()

    @handles(PromptOpened)
    def _on_prompt_opened(self, opened: PromptOpened, _: int) -> None:
        self._on_prompt(opened.prompt)

    @handles(LiveCellEnded)
    def _on_live_cell_ended(self, ended: LiveCellEnded, rank: int) -> None:
        try:
            record = record_from(ended.record)
        except Exception as error:  # only the record says which cell it belongs to
            for live in [live for live in self.cells.values() if live.live]:
                live.on_fault("a record", rank, error, over=True)
            return
        if execution := self.cells.get(record.cell):
            self._on_record(execution, record)

    def _on_record(self, execution: Execution, record: CellRecord) -> None:
        try:
            self._take_record(execution, record)
        except Exception as error:
            execution.on_fault("the record", record.rank, error, over=True)

    def _take_record(self, execution: Execution, record: CellRecord) -> None:
        # A resize may have removed this rank: then its record must not end the cell or show a failure. The size is in a
        # file. It is read only when it matters, so that a thousand ranks do not read it a thousand times.
        if record.status != "ok" or execution.is_last(record.rank):
            self.read_size()
        execution.on_record(record)

    def _on_comm(self, kind: str, mark: dict[str, Any], content: dict[str, Any]) -> None:
        """Handle a message of a widget on a rank.

        A message without a number is not in the rank's log, so it cannot be fetched later.
        """
        self.comms.on_message(mark["rank"], kind, content)
        execution = self.cells.get(mark["cell"])
        if execution is not None and not (mark["rank"] in execution.followed and mark["seq"] >= 0):
            execution.guard(f"a widget's message ({kind})", mark["rank"], execution.on_output, kind, mark, content)
        elif execution is None and self.latest is not None:  # between two cells
            self.latest.outbox.put("comm", kind, content)

    def _on_gone(self, rank: int) -> None:
        """Handle a message of the hub that a rank is gone.

        Another rank, or the cluster's folder, says how the rank ended.
        """

        def read() -> None:
            found = self._read_deaths()
            if rank < self.entry.n and not any(end.rank == rank and end.replaced for end in found):
                self._on_death(Death(rank, "its process ended", time.time()))

        if not self.ended:
            self.client.later(DEATH_NEWS_SECONDS, read)

    def _read_deaths(self) -> list[RankEnd]:
        """Read which ranks have ended, and act on it. The ranks' parent writes this before it tells the other ranks."""
        self.read_size()
        found = [end for end in cluster_end.read_ranks(self.entry.folder) if end.rank < self.entry.n]
        for end in found:
            if end.replaced == "done":
                self._on_replaced(end)
            elif not end.replaced:
                self._on_death(end)
        return found

    def read_size(self) -> None:
        """Read the number of ranks that the parent has written, if it has changed."""
        change = None if self.ended else cluster_end.read_size(self.entry.folder)
        if change is None or change.when <= self._resized or change.n == self.entry.n:
            return
        self._resized = change.when
        self.entry = _resized(self.entry, change)
        self.generation.resized(self.entry.n)
        self.client.heard -= {*change.newcomers, *(rank for rank in self.client.heard if rank >= change.n)}
        if execution := self.cells.get(change.cell):
            newcomers = list(change.newcomers) if change.enters else []
            execution.guard("another number of ranks", None, execution.on_resized, change.n, newcomers, change.said)
            for rank in newcomers:
                self._greet(execution, rank)

    def _on_replaced(self, end: RankEnd) -> None:
        """Handle the replacement of a rank that died in a training."""
        rank, key = end.rank, (end.rank, end.when)  # not by pid: processes of two hosts may have the same one
        if key in self.replaced or self.ended:
            return
        told = any(said == end.said for _, said in self.replaced.values())
        self.replaced[key] = end.cell, end.said
        ranks = [*self.entry.ranks]
        if end.by is not None:
            ranks[rank] = end.by
        self.entry = repinned(replace(self.entry, ranks=tuple(ranks)))
        registry.save(self.entry)
        self.client.heard.discard(rank)
        if execution := self.cells.get(end.cell):
            if not told:
                execution.guard("a rank that is replaced", rank, execution.say, end.said)
            execution.on_replaced(rank)
            self._greet(execution, rank)
        # A live cell that some ranks have already run ends here. The new rank runs only live cells that no rank has
        # begun.
        for live in [one for one in self.cells.values() if one.live and one.records and one.sent < end.when]:
            live.guard("the death", rank, live.on_death, end)

    def _greet(self, execution: Execution, rank: int) -> None:
        """Follow a cell on a new rank, as soon as the rank can be reached."""
        if execution.done.done() or self.ended or rank >= self.entry.n:
            return
        if rank not in self.client.heard:
            self.client.request([rank], SayHello())
            self.client.later(FOLLOW_SECONDS, self._greet, execution, rank)
            return
        self._follow(execution, rank, 0)
        if execution.stop is not None:  # the new rank did not exist when the others were asked to stop
            self.client.request([rank], StopCell(execution.request.id, self.request_number))

    def _on_end(self, execution: Execution) -> None:
        self.cells.pop(execution.request.id, None)
        if not self.ended and time.time() - execution.sent > LONG_SECONDS:
            self.client.request(self.client.ranks, NotebookSeen(execution.request.id))

    def _on_call_over(self, execution: Execution, rank: int, answer: Future[Any]) -> None:
        try:
            self._on_answer(execution, rank, answer)
        except Exception as error:
            execution.on_fault("the answer", rank, error, over=True)

    def _on_answer(self, execution: Execution, rank: int, answer: Future[Any]) -> None:
        error = answer.exception()
        record = answer.result() if error is None else error
        if error is not None:  # the rank had left when the cell was sent; another message says how it ended
            lost = partial(execution.guard, "the answer", rank, execution.on_lost, rank, error)
            self.client.soon(self.client.later, 3 * DEATH_NEWS_SECONDS, lost)
        elif isinstance(record, CellRecord):
            self._take_record(execution, record)
            if execution.arrived.get(rank, record.outputs) < record.outputs:
                self.client.later(LATE_SECONDS, execution.guard, "late output", rank, self._fetch_late, execution, rank)
        elif "died while running" not in str(record):  # a message about the death follows
            execution.on_lost(rank, record if isinstance(record, BaseException) else RuntimeError(str(record)))

    def _fetch_late(self, execution: Execution, rank: int) -> None:
        """Fetch outputs that have not arrived: a cell must end even if a connection has lost messages."""
        record = None if execution.done.done() else execution.records.get(rank)
        if record is not None and execution.arrived[rank] < record.outputs:
            self._follow(execution, rank, 0)

    def _on_death(self, death: Death) -> None:
        if death.rank in self.deaths or self.ended:
            return
        self.deaths[death.rank] = death
        self.generation.spoil(f"rank {death.rank} died")
        for execution in list(self.cells.values()):
            execution.guard("the death", death.rank, execution.on_death, death)

    def _follow(self, execution: Execution, rank: int, cursor: int) -> None:
        if execution.done.done() or self.ended:
            return
        futures = self.client.request([rank], FollowCell(execution.request.id, cursor))
        for future in futures.values():
            future.add_done_callback(lambda reply: self.client.soon(self._on_followed, execution, rank, reply))

    def _on_followed(self, execution: Execution, rank: int, reply: Future[Any]) -> None:
        try:
            content = reply.result()["content"]
            if content["status"] != "ok":
                raise ClusterError(content["why"])
            record = record_from(content["record"]) if content["record"] is not None else None
        except Exception as error:
            execution.on_fault("what was asked for", rank, error, over=True)
            return
        if record is not None and not content["outputs"] and execution.arrived.get(rank, 0) < record.outputs:
            # The rank has sent everything in its log. An output that is not in the log, e.g. because the disk is full,
            # may still be on its way.
            execution.guard("lost output", rank, execution.on_missing_output, rank, record.outputs)
        for output in content["outputs"]:
            if output["kind"] in COMM_TYPES:
                self.comms.on_message(rank, output["kind"], output["content"])
            what = f"output {output['seq']} ({output['kind']})"
            execution.guard(what, rank, execution.on_output, output["kind"], output, output["content"])
        if record is not None:
            self._on_record(execution, record)
        if rank in execution.waiting_for or (
            rank in execution.records
            and not execution.fault
            and execution.arrived[rank] < execution.records[rank].outputs
        ):
            pause = 0.0 if content["outputs"] else FOLLOW_SECONDS
            self.client.later(pause, self._follow, execution, rank, content["cursor"])


def _resized(entry: ClusterEntry, change: SizeChange) -> ClusterEntry:
    """Return the cluster's entry with its new ranks, and save it in the registry."""
    with suppress(ProcessLookupError):
        ranks = tuple(map(Process.of, change.pids))
        pins, labels, reasons = change.pins, entry.labels[: change.n], entry.reasons[: change.n]
        if all("label" in pin for pin in pins):  # a notebook planned the pins; else every rank has kept its own
            labels, reasons = (tuple(pin[key] for pin in pins) for key in ("label", "why"))
        entry = replace(entry, n=change.n, ranks=ranks, labels=labels, reasons=reasons)
        registry.save(entry)
    return entry


def _out_of_reach(entry: ClusterEntry, why: str) -> ClusterError:
    """Return the error for a cell whose ranks are alive, but the controller or the parent of the ranks was killed."""
    gone = "the controller" if not entry.controller.is_alive() else "the parent of the ranks"
    return ClusterError(
        f"{entry.name}: {why}, since {gone} was killed. Its ranks live, and end with this cell.",
        hint="%cluster restart   ends them, and starts others",
    )
