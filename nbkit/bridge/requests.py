"""Requests that a rank answers while its main thread is busy.

They come over ipykernel's control channel, and are handled in its thread. They are signed like every message of
ipyparallel and need no port of their own. Each handler answers at once.

One of them, `recorded`, sends the record files of this rank's newest training in pieces, for a notebook that does not
share the disk.
"""

from __future__ import annotations

import base64
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from nbkit.bridge import training_requests
from nbkit.bridge.runner import Runner
from nbkit.bridge.stopping import Stopping
from nbkit.bridge.training_requests import Control, TrainingRequestHandler
from nbkit.rank.comm import delegating_group
from nbkit.rank.comm.agree import any_rank
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.active_job import newest
from nbkit.rank.world import failure_alarm, world
from nbkit.rank.world.activity import activity
from nbkit.records.record_file import old_part, overview_of, rank_files
from nbkit.wire import process_state
from nbkit.wire.cells import COMM_TYPES, LONG_SECONDS, CellRecord, CellRequest, Failure, Status, record_text
from nbkit.wire.messages import EndRank, InterruptRank, InUse
from nbkit.wire.processes import Process

_PIECE = 1 << 20


def recorded(rank: int, file: str = "", offset: int = 0) -> dict[str, Any]:
    """Return {"run": directory of the newest run, "" for none}, and with `file` also its bytes from `offset` on.

    file: "records", "old" (the part before the newest), "overview" or "plan". The answer has "data" and "head", the
    first line of the file. By it a reader sees that the file was begun anew.
    """
    folder = getattr(newest(), "run_dir", None)
    if folder is None:
        return {"run": ""}
    answer: dict[str, Any] = {"run": str(folder)}
    path = _path(folder, rank, file) if file else None
    if path is None:
        return answer
    try:
        with path.open("rb") as read:
            head = read.readline()
            read.seek(offset)
            data = read.read(_PIECE)
    except FileNotFoundError:
        return answer
    return answer | {"head": head.decode(errors="replace"), "data": base64.b64encode(data).decode()}


def _path(folder: Path, rank: int, file: str) -> Path | None:
    if file == "plan":
        return folder / "telemetry" / "plan.jsonl"
    records = rank_files(folder).get(rank)
    places = {"old": old_part, "overview": overview_of}
    return places[file](records) if records is not None and file in places else records


MESSAGE_TYPE = "nbkit_request"
COMPLETIONS = 200
COMPLETION_SECONDS = 1.0  # requests, also a stop, are answered one after the other
REPLY_BYTES = 4 << 20  # of missed output in one reply; the notebook asks again for the rest


class Requests:
    """The requests that a rank answers, in `table`. Every reply is a dict of plain values."""

    def __init__(self, runner: Runner, stopping: Stopping) -> None:
        self.runner, self.stopping = runner, stopping
        self.process = psutil.Process()
        self.delivered = ""
        self._completing: threading.Thread | None = None
        self.controls = training_requests.controls = TrainingRequestHandler()
        step_boundary.handlers["cell"] = self._run_live
        step_boundary.handlers["nothing"] = lambda _: None
        step_boundary.handlers["unserved"] = self._not_run
        self.table: dict[str, Callable[..., dict[str, Any]]] = {
            "hello": self.hello,
            "status": self.status,
            "stop": self.stop,
            "stop_call": self.stop_call,
            "live": self.live_cell,
            "control": self.control,
            "result": self.controls.result,
            "strategies": self.controls.strategies,
            "option": self.controls.option,
            "recorded": recorded,
            "follow": self.follow,
            "complete": self.complete,
            "seen": self.seen,
            "why": self.why,
            "moved": self.moved,
            "outside": self.outside,
            "interrupt": self.interrupt,
            "end": self.end,
            "answer": self.answer,
            "refuse": self.refuse,
        }

    def install(self, kernel: Any) -> None:
        def answer(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
            content = dict(parent["content"])
            try:
                reply = {"status": "ok", **self.table[content.pop("do")](**content)}
            except Exception as error:
                reply = {"status": "error", "why": f"{type(error).__name__}: {error}"}
            kernel.session.send(stream, "nbkit_reply", reply, parent=parent, ident=ident)

        self.kernel = kernel
        kernel.control_handlers[MESSAGE_TYPE] = answer
        for kind in COMM_TYPES:
            kernel.shell_handlers[kind] = self.runner.stoppable(kernel.shell_handlers[kind])

    def hello(self) -> dict[str, Any]:
        """Answer over the output channel: a notebook that hears this will hear the outputs too."""
        self.runner.capture.publish("nbkit_hello", {}, self.kernel.iopub_socket)
        return {}

    def status(self) -> dict[str, Any]:
        """Answer with rank, process and device, and what the rank is doing."""
        here, running = world.current(), list(self.runner.running)  # a copy: the main thread changes the list meanwhile
        cell = running[0] if running else None
        return {
            "rank": self.runner.rank,
            "pid": os.getpid(),
            "generation": here.generation if here else 0,
            "dirty": here.dirty if here else "this rank has no world",
            "backend": here.place.backend if here else "",
            "memory": self.process.memory_info().rss,
            "cell": cell.request.id if cell else "",
            "number": cell.request.number if cell else 0,
            "source": cell.request.source if cell else "",
            "ranks": cell.request.ranks if cell else (),
            "age": time.time() - cell.started if cell else 0.0,
            "live": running[-1].request.id if len(running) > 1 else "",
            "where": failure_alarm.where() if cell else "",
            "progress": step_boundary.progress(),
            "training": step_boundary.training() is not None,
            "trained": cell is not None and step_boundary.began > cell.started,
            "requests": step_boundary.inbox.highest(),
            "undelivered": self._undelivered(),
            "prompt": asdict(asked) if (asked := self.runner.prompts.open) else None,
            "failed": self._failed(),
        }

    def _undelivered(self) -> dict[str, Any] | None:
        """Return the last cell if it was long enough to outlive a notebook, and no notebook has confirmed it."""
        last = next(reversed(self.runner.records.values()), None)
        if last is None or last.seconds < LONG_SECONDS or last.cell == self.delivered:
            return None
        request = self.runner.requests[last.cell]
        return {"cell": request.id, "source": request.source, "number": request.number, "ranks": request.ranks}

    def _failed(self) -> dict[str, Any] | None:
        """Return the failed cell whose frames `%nbkit debug` shows, or None."""
        failed = self.runner.debugger.failed
        return {"number": failed.number, "error": failed.error, "moment": failed.moment} if failed else None

    def answer(self, number: int, line: str) -> dict[str, Any]:
        """Pass on the line that a person has typed at prompt `number` of this rank."""
        self.runner.prompts.answer(number, line)
        return {}

    def refuse(self, cell: str, why: str) -> dict[str, Any]:
        """Refuse the prompts of a cell, at which nobody can type."""
        self.runner.prompts.refuse(cell, why)
        return {}

    def stop(self, cell: str, number: int, live: bool = False) -> dict[str, Any]:
        patience = self.stopping.stop(cell, number, live)
        return {"found": patience is not None, "patience": patience or 0.0}

    def stop_call(self) -> dict[str, Any]:
        self.stopping.stop_call()
        return {}

    def live_cell(self, number: int, cell: dict[str, Any]) -> dict[str, Any]:
        """Queue a live cell for the step boundary that all ranks agree on."""
        request = CellRequest(**{**cell, "ranks": tuple(cell["ranks"])})
        return self._post(number, "cell", request)

    def control(self, number: int, id: str, action: str, args: dict[str, Any]) -> dict[str, Any]:
        """Queue an action on the training for a step boundary. `result` returns its outcome."""
        return self._post(number, "control", Control(id, action, args))

    def _post(self, number: int, kind: str, payload: Any) -> dict[str, Any]:
        step_boundary.inbox.post(number, kind, payload)
        queued = step_boundary.training() is not None
        if not queued:
            # The training has ended on this rank. It said so before it dropped the waiting requests. So later
            # requests are dropped here, and none is dropped twice.
            for unserved in step_boundary.inbox.drop(number):
                self._not_run(unserved)
        return {"queued": queued}

    def follow(self, cell: str, cursor: int) -> dict[str, Any]:
        """Return what a notebook missed of a cell: its outputs from `cursor` on, and its record if it has ended."""
        record = self.runner.records.get(cell)  # read before the outputs, so that these include all that it counts
        outputs, after = self.runner.capture.missed(cell, cursor, REPLY_BYTES)
        return {"outputs": outputs, "cursor": after, "record": record_text(record) if record else None}

    def complete(self, text: str) -> dict[str, Any]:
        """Return completions of `text` (a name, or a name with a dot) from the names on this rank."""
        if self._completing is not None and self._completing.is_alive():
            return {"matches": []}  # the last one hangs in the code of a user's object
        matches = set[str]()

        def look() -> None:
            completer = self.runner.shell.Completer
            matches.update(completer.attr_matches(text) if "." in text else completer.global_matches(text))

        self._completing = threading.Thread(target=look, name="nbkit-complete", daemon=True)
        self._completing.start()
        self._completing.join(COMPLETION_SECONDS)
        return {"matches": sorted(matches.copy())[:COMPLETIONS]}

    def seen(self, cell: str = "") -> dict[str, Any]:
        """Note that a notebook is there and has all of `cell`. The parent counts the idle time from now."""
        self.runner.link.send(InUse())
        if cell:
            self.delivered = cell
        return {}

    def why(self, stacks: bool = False) -> dict[str, Any]:
        """Return what this rank is doing now: see nbkit.wire.activity."""
        running = list(self.runner.running)
        known: dict[str, Any] = {}
        if running:
            known = {"cell": running[-1].request.number, "seconds": time.time() - running[-1].started}
        if step_boundary.training() is not None:
            known["step"] = step_boundary.progress().get("step", 0)
        if (asked := self.runner.prompts.open) is not None:
            known["prompt"] = asked.kind
        found = activity(self.runner.rank, self.runner.own.cells, stacks=stacks, **known)
        return {"activity": base64.b64encode(pickle.dumps(found)).decode()}

    def moved(self) -> dict[str, Any]:
        """Return a value that changes whenever this rank issues an operation or makes a step."""
        return {"moved": [delegating_group.num_issued(), step_boundary.progress().get("step", 0)]}

    def outside(self, processes: dict[str, list[Any]]) -> dict[str, Any]:
        """Return the state of other ranks' processes on this host, seen from outside. processes: by rank."""
        logs = self.runner.capture.folder.parent / "logs"
        looks = {}
        for rank, process in processes.items():
            if found := process_state.look(Process(*process), logs / f"rank{rank}.log"):
                looks[int(rank)] = found
        return {"looks": base64.b64encode(pickle.dumps(looks)).decode()}

    def interrupt(self, rank: int, cell: str) -> dict[str, Any]:
        """Ask the parent to interrupt a cell on another rank, which does not answer."""
        self.runner.link.send(InterruptRank(rank, cell))
        return {}

    def end(self, rank: int) -> dict[str, Any]:
        """Ask the parent to end another rank that does not answer at all."""
        self.runner.link.send(EndRank(rank))
        return {}

    def _run_live(self, request: CellRequest) -> None:
        if self._is_withdrawn(request.id):
            self._tell_not_run(request, "interrupted", "stopped before the next step boundary")
            return
        with self.runner.shielded():  # otherwise a stop of the training could lose the record
            record = self.runner.run(request)
            self.runner.capture.publish("nbkit_record", {"record": record_text(record)}, self.kernel.iopub_socket)

    def _is_withdrawn(self, cell: str) -> bool:
        """Return True if a stop of the cell has reached any rank. Collective: all ranks get the same answer.

        A cell that ran on some ranks only would wait for the others.
        """
        here = world.current()
        assert here is not None
        return any_rank(cell in self.stopping.withdrawn, device=here.place.device)

    def _not_run(self, request: tuple[int, str, Any]) -> None:
        """Report that the training ended before it served a live cell or a control."""
        _, kind, payload = request
        if kind == "cell":
            self._tell_not_run(payload, "error", "the training ended before its next step boundary")
        elif kind == "control":
            self.controls.unserved(payload)

    def _tell_not_run(self, cell: CellRequest, status: Status, why: str) -> None:
        record = CellRecord(
            cell.id, self.runner.rank, 0, status, 0.0, 0, failure=Failure("NotRun", why, (), time.time())
        )
        self.runner.capture.publish("nbkit_record", {"record": record_text(record)}, self.kernel.iopub_socket)
