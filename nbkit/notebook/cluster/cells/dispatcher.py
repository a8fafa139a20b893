"""The post room: sends cells and requests, and hands what comes back to the cell it belongs to."""

from __future__ import annotations

import base64
import json
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nbkit.errors import CellRunning, ClusterError
from nbkit.notebook.cluster.cells.client import Wire
from nbkit.notebook.cluster.cells.execution import Running
from nbkit.notebook.cluster.output.handler_failure import guard
from nbkit.notebook.cluster.output.lines import label
from nbkit.notebook.cluster.output.root_cause import Death
from nbkit.notebook.cluster.output.widget_comms import Comms
from nbkit.wire.cells import COMM_TYPES, LONG_SECONDS, CellRecord, ranks_text

FOLLOW_SECONDS = 0.2
DEATH_NEWS_SECONDS = 0.1
LATE_SECONDS = 2.0
WATCH_SECONDS = 1.0


class Post:
    """One per cluster object. What starts with `on_` is called on the wire's thread."""

    wire: Wire

    def __init__(self) -> None:
        self.cells: dict[str, Running] = {}
        self.latest: Running | None = None
        self.deaths: dict[int, Death] = {}
        self.request_number = 0
        self.comms = Comms(lambda *message: self.wire.soon(self.wire.relay, *message))
        self.closed = False
        self.on_death: Callable[[int, str], None] = lambda rank, how: None

    def busy(self) -> Running | None:
        """The ordinary cell that runs now."""
        running = self.latest
        return running if running is not None and not running.done.done() else None

    def check_idle(self, what: str) -> None:
        """Raise CellRunning, naming the cell, if one runs. what: "cell", "push" or "pull"."""
        busy = self.busy()
        if busy is not None:
            live = "   or   --at-step to run inside a training" if what == "cell" else ""
            raise CellRunning(
                f"The ranks are busy with {busy.describe()}.",
                numbers=f"this {what} has to wait for it",
                hint=f"%train wait   or   --queue to run after it{live}",
            )

    def check_alive(self, ranks: Sequence[int]) -> None:
        """Raise ClusterError if one of `ranks` has died."""
        gone = [rank for rank in ranks if rank in self.deaths]
        if gone:
            raise ClusterError(
                f"Rank {gone[0]} has died ({self.deaths[gone[0]].how}).",
                numbers=f"ranks {ranks_text(self.wire.ranks)} are left",
                hint="%cluster restart   or   --ranks to use those that are left (without collectives)",
            )

    # Out ------------------------------------------------------------------------------------------------------------

    def send(self, running: Running) -> None:
        """Send a cell to its ranks."""
        self._expect(running)
        futures = self.wire.call(running.request.ranks, "nbkit.bridge.calls:run_cell", running.request)
        self.latest = running
        for rank, future in futures.items():
            future.add_done_callback(partial(self._on_call_over, running, rank))

    def send_live(self, running: Running) -> None:
        """Send a live cell: its records come as messages, because no call of it is answered."""
        self._expect(running)
        self.wire.request(running.request.ranks, "live", number=self.next_request(), cell=asdict(running.request))

    def ask_to_stop(self, running: Running, ranks: list[int]) -> dict[int, Future[Any]]:
        """The numbers of requests must be known on every rank, so all are asked."""
        everyone = sorted({*self.wire.ranks, *ranks})
        return self.wire.request(
            everyone, "stop", cell=running.request.id, number=self.next_request(), live=running.live
        )

    def next_request(self) -> int:
        self.request_number += 1
        return self.request_number

    def follow(self, running: Running) -> None:
        """Take up a cell that an earlier notebook sent: fetch what was missed, then the rest as it comes."""
        running.followed = True
        self.latest = running
        self._expect(running)
        for rank in running.request.ranks:
            self.wire.soon(self._follow, running, rank, 0)

    def keep_in_touch(self, seconds: float) -> None:
        """Tell the cluster every so often that this notebook is there."""

        def tell() -> None:
            if not self.closed:
                self.wire.later(seconds, tell)  # first: what fails once is tried again
                self.wire.request(self.wire.ranks[:1], "seen")

        self.wire.soon(tell)

    def watch(self, gone: Callable[[], str], folder: Path) -> None:
        """Look every second whether the cluster is still there and ours; `gone` says why not, or "".

        And whether a rank has died: zmq drops what is published while a connection is being made, news of deaths too.
        """

        def look() -> None:
            if self.closed:
                return
            try:
                why = gone()
            except Exception:  # what cannot be read now is read again
                why = ""
            if why:
                for rank in {rank for running in self.cells.values() for rank in running.request.ranks}:
                    self._on_death(Death(rank, why, time.time()))
            else:
                self.wire.later(WATCH_SECONDS, look)
                self.read_deaths(folder)

        self.wire.soon(look)

    def close(self) -> None:
        self.closed = True
        for running in list(self.cells.values()):
            running.reason = running.reason or "the cluster was stopped"
            running.finish()
        self.comms.close()
        self.wire.close()

    # In -------------------------------------------------------------------------------------------------------------

    def on_message(self, kind: str, mark: dict[str, Any], content: dict[str, Any]) -> None:
        """One of nbkit's own messages."""
        if kind == "nbkit_record":
            self._on_live_record(mark["rank"], content["record"])
        elif kind == "nbkit_died":
            self._on_death(Death(content["rank"], content["how"], content["when"]))
        elif kind in COMM_TYPES:
            self._on_comm(kind, mark, content)
        elif running := self.cells.get(mark["cell"]):
            if not running.followed:
                guard(running, f"output {mark['seq']} ({kind})", mark["rank"], running.on_output, kind, mark, content)
        elif kind == "stream" and self.latest is not None and mark["cell"] == self.latest.request.id:
            # Of a thread that outlived its cell.
            self.latest.outbox.stream(content["name"], f"{label([mark['rank']])} {content['text']}")

    def _on_live_record(self, rank: int, text: str) -> None:
        try:
            record = record_from(text)
        except Exception as error:  # which cell it is of stands in it
            for live in [live for live in self.cells.values() if live.live]:
                live.on_fault("a record", rank, error, over=True)
            return
        if running := self.cells.get(record.cell):
            self._on_record(running, record)

    def _on_record(self, running: Running, record: CellRecord) -> None:
        try:
            running.on_record(record)
        except Exception as error:
            running.on_fault("the record", record.rank, error, over=True)

    def _on_comm(self, kind: str, mark: dict[str, Any], content: dict[str, Any]) -> None:
        """Of a widget on a rank. What is not counted is not kept there either, and comes in no other way."""
        self.comms.on_message(mark["rank"], kind, content)
        running = self.cells.get(mark["cell"])
        if running is not None and not (running.followed and mark["seq"] >= 0):
            guard(running, f"a widget's message ({kind})", mark["rank"], running.on_output, kind, mark, content)
        elif running is None and self.latest is not None:  # between two cells
            self.latest.outbox.put("comm", kind, content)

    def on_gone(self, rank: int, folder: Path) -> None:
        """The hub has lost a rank. How it ended is told by the others, or else stands in the folder."""

        def read() -> None:
            self.read_deaths(folder)
            self._on_death(Death(rank, "its process ended", time.time()))

        if not self.closed:
            self.wire.later(DEATH_NEWS_SECONDS, read)

    def read_deaths(self, folder: Path) -> None:
        """What the parent of the ranks wrote of those that ended, before it told anybody."""
        for path in folder.glob("rank*.end.json"):
            with suppress(OSError, ValueError):  # the folder goes with the cluster; half written: the next look has it
                told = json.loads(path.read_text())
                self._on_death(Death(told["rank"], told["how"], told["when"]))

    def _expect(self, running: Running) -> None:
        self.cells[running.request.id] = running
        running.stop_ranks = partial(self.ask_to_stop, running, list(running.request.ranks))
        for death in self.deaths.values():
            self.wire.soon(guard, running, "the death", death.rank, running.on_death, death)
        running.done.add_done_callback(lambda _: self._on_end(running))

    def _on_end(self, running: Running) -> None:
        self.cells.pop(running.request.id, None)
        if not self.closed and time.time() - running.sent > LONG_SECONDS:
            self.wire.request(self.wire.ranks, "seen", cell=running.request.id)

    def _on_call_over(self, running: Running, rank: int, answer: Future[Any]) -> None:
        try:
            self._on_answer(running, rank, answer)
        except Exception as error:
            running.on_fault("the answer", rank, error, over=True)

    def _on_answer(self, running: Running, rank: int, answer: Future[Any]) -> None:
        error = answer.exception()
        record = answer.result() if error is None else error
        if error is not None:  # it had left when the cell was sent; how it ended is told in a moment
            lost = partial(guard, running, "the answer", rank, running.on_lost, rank, error)
            self.wire.soon(self.wire.later, 3 * DEATH_NEWS_SECONDS, lost)
        elif isinstance(record, CellRecord):
            running.on_record(record)
            if running.arrived[rank] < record.outputs:
                self.wire.later(LATE_SECONDS, guard, running, "late output", rank, self._fetch_late, running, rank)
        elif "died while running" not in str(record):  # the news of a death come by themselves
            running.on_lost(rank, record if isinstance(record, BaseException) else RuntimeError(str(record)))

    def _fetch_late(self, running: Running, rank: int) -> None:
        """Outputs that have not come by themselves are asked for: a cell must end, whatever a connection has lost."""
        if not running.done.done() and running.arrived[rank] < running.records[rank].outputs:
            self._follow(running, rank, 0)

    def _on_death(self, death: Death) -> None:
        if death.rank in self.deaths or self.closed:
            return
        self.deaths[death.rank] = death
        self.on_death(death.rank, death.how)
        for running in list(self.cells.values()):
            guard(running, "the death", death.rank, running.on_death, death)

    def _follow(self, running: Running, rank: int, cursor: int) -> None:
        if running.done.done() or self.closed:
            return
        futures = self.wire.request([rank], "follow", cell=running.request.id, cursor=cursor)
        for future in futures.values():
            future.add_done_callback(lambda reply: self.wire.soon(self._on_followed, running, rank, reply))

    def _on_followed(self, running: Running, rank: int, reply: Future[Any]) -> None:
        try:
            content = reply.result()["content"]
            if content["status"] != "ok":
                raise ClusterError(content["why"])
            record = record_from(content["record"]) if content["record"] is not None else None
        except Exception as error:
            running.on_fault("what was asked for", rank, error, over=True)
            return
        for output in content["outputs"]:
            if output["kind"] in COMM_TYPES:
                self.comms.on_message(rank, output["kind"], output["content"])
            what = f"output {output['seq']} ({output['kind']})"
            guard(running, what, rank, running.on_output, output["kind"], output, output["content"])
        if record is not None:
            self._on_record(running, record)
        if rank in running.waiting_for or (not running.fault and running.arrived[rank] < running.records[rank].outputs):
            pause = 0.0 if content["outputs"] else FOLLOW_SECONDS
            self.wire.later(pause, self._follow, running, rank, content["cursor"])


def record_from(text: str) -> CellRecord:
    """A record that came in a message."""
    record = pickle.loads(base64.b64decode(text))
    assert isinstance(record, CellRecord)
    return record
