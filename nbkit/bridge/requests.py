"""Requests that reach a rank while its main thread is busy: over ipykernel's control channel, in its thread.

They are signed like everything ipyparallel sends and need no port of their own. A handler answers at once.

Send the record files of this rank's newest training in pieces, for a notebook that does not share the disk.
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
from nbkit.wire.processes import Process

_PIECE = 1 << 20


def recorded(rank: int, file: str = "", offset: int = 0) -> dict[str, Any]:
    """{"run": directory of the newest run, "" for none}; with `file` also the bytes of it from `offset` on.

    file: "records", "old" (the part before the newest), "overview" or "plan". head: its first line, by which a reader
    sees that it was begun anew.
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
COMPLETION_SECONDS = 1.0  # requests, a stop among them, are answered one after the other
REPLY_BYTES = 4 << 20  # of missed output in one reply; the notebook asks again for the rest


class Requests:
    """The table of what a rank answers to. Every reply is a dict of plain values."""

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
        """Say so over the channel of outputs: who hears it will hear the outputs too."""
        self.runner.capture.publish("nbkit_hello", {}, self.kernel.iopub_socket)
        return {}

    def status(self) -> dict[str, Any]:
        """Answer with rank, process and device, and what the rank is doing."""
        here, running = world.current(), list(self.runner.running)  # the main thread changes it meanwhile
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
        """The last cell, if it was long enough to outlive a notebook and no notebook has said that it has it."""
        last = next(reversed(self.runner.records.values()), None)
        if last is None or last.seconds < LONG_SECONDS or last.cell == self.delivered:
            return None
        request = self.runner.requests[last.cell]
        return {"cell": request.id, "source": request.source, "number": request.number, "ranks": request.ranks}

    def _failed(self) -> dict[str, Any] | None:
        """The cell whose frames `%nbkit debug` looks at."""
        failed = self.runner.debugger.failed
        return {"number": failed.number, "error": failed.error, "moment": failed.moment} if failed else None

    def answer(self, number: int, line: str) -> dict[str, Any]:
        """Return what a person has typed at a prompt of this rank. number: of the prompt."""
        self.runner.prompts.answer(number, line)
        return {}

    def refuse(self, cell: str, why: str) -> dict[str, Any]:
        """Nobody can type at the prompts of a cell."""
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
        """Queue something to do to the training at a boundary; `result` answers what came of it."""
        return self._post(number, "control", Control(id, action, args))

    def _post(self, number: int, kind: str, payload: Any) -> dict[str, Any]:
        step_boundary.inbox.post(number, kind, payload)
        queued = step_boundary.training() is not None
        if not queued:
            # The training has ended on this rank. It said so before it dropped what was waiting, so whatever comes
            # later is dropped here, and nothing by both.
            for unserved in step_boundary.inbox.drop(number):
                self._not_run(unserved)
        return {"queued": queued}

    def follow(self, cell: str, cursor: int) -> dict[str, Any]:
        """Return what a notebook missed of a cell: outputs from `cursor` on, and the record if all of them are told."""
        record = self.runner.records.get(cell)  # read before the outputs: what it counts is then among them
        outputs, after = self.runner.capture.missed(cell, cursor, REPLY_BYTES)
        return {"outputs": outputs, "cursor": after, "record": record_text(record) if record else None}

    def complete(self, text: str) -> dict[str, Any]:
        """Return what `text` (a name, or a name with a dot) may become, from the names on this rank."""
        if self._completing is not None and self._completing.is_alive():
            return {"matches": []}  # it asks an object of the user's, whose code does not end
        matches = set[str]()

        def look() -> None:
            completer = self.runner.shell.Completer
            matches.update(completer.attr_matches(text) if "." in text else completer.global_matches(text))

        self._completing = threading.Thread(target=look, name="nbkit-complete", daemon=True)
        self._completing.start()
        self._completing.join(COMPLETION_SECONDS)
        return {"matches": sorted(matches.copy())[:COMPLETIONS]}

    def seen(self, cell: str = "") -> dict[str, Any]:
        """A notebook is there, and has all of `cell`: the parent counts the idle time from now."""
        self.runner.link.send(event="seen")
        if cell:
            self.delivered = cell
        return {}

    def why(self, stacks: bool = False) -> dict[str, Any]:
        """Return what this rank does right now: see nbkit.wire.activity."""
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
        """Return what is another value when this rank has issued an operation, or made a step."""
        return {"moved": [delegating_group.num_issued(), step_boundary.progress().get("step", 0)]}

    def outside(self, processes: dict[str, list[Any]]) -> dict[str, Any]:
        """Return how processes of other ranks look from outside, those that are of this host. processes: by rank."""
        logs = self.runner.capture.folder.parent / "logs"
        looks = {}
        for rank, process in processes.items():
            if found := process_state.look(Process(*process), logs / f"rank{rank}.log"):
                looks[int(rank)] = found
        return {"looks": base64.b64encode(pickle.dumps(looks)).decode()}

    def interrupt(self, rank: int, cell: str) -> dict[str, Any]:
        """Ask the parent to interrupt another rank, which does not answer, in a cell."""
        self.runner.link.send(event="interrupt", rank=rank, cell=cell)
        return {}

    def end(self, rank: int) -> dict[str, Any]:
        """Ask the parent to end another rank that answers to nothing."""
        self.runner.link.send(event="end", rank=rank)
        return {}

    def _run_live(self, request: CellRequest) -> None:
        if self._is_withdrawn(request.id):
            self._tell_not_run(request, "interrupted", "stopped before the next step boundary")
            return
        with self.runner.shielded():  # or a stop of the training could take the record away
            record = self.runner.run(request)
            self.runner.capture.publish("nbkit_record", {"record": record_text(record)}, self.kernel.iopub_socket)

    def _is_withdrawn(self, cell: str) -> bool:
        """Return True if its stop has reached any rank. All must answer alike: a cell on some ranks meets no
        partners."""
        here = world.current()
        assert here is not None
        return any_rank(cell in self.stopping.withdrawn, device=here.place.device)

    def _not_run(self, request: tuple[int, str, Any]) -> None:
        """The training ended before it came to a live cell or a control."""
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
