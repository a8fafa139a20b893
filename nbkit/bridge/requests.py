"""Requests that a rank answers while its main thread is busy.

They come over ipykernel's control channel, and the thread of that channel handles them. They are signed like every
message of ipyparallel, and need no port of their own. Each handler answers at once.

GetRecords sends the record files of this rank's newest training in pieces, for a notebook that does not share the disk.
"""

from __future__ import annotations

import base64
import os
import pickle
import threading
import time
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
from nbkit.rank.train.control.step_boundary import newest
from nbkit.rank.world import failure_alarm, world
from nbkit.rank.world.activity import activity
from nbkit.records.events import LiveCell
from nbkit.records.record_file import old_part, overview_of, rank_files
from nbkit.wire import process_state
from nbkit.wire.cells import COMM_TYPES, LONG_SECONDS, CellRecord, CellRequest, Failure, Status, record_text
from nbkit.wire.messages import (
    REQUEST,
    AnswerPrompt,
    CompleteName,
    ControlTraining,
    EndRank,
    FollowCell,
    ForNotebook,
    GetActivity,
    GetControlResult,
    GetProgress,
    GetRecords,
    GetStatus,
    GetStrategies,
    GetStrategyRow,
    Hello,
    InterruptRank,
    InUse,
    LiveCellEnded,
    LookAtProcesses,
    NotebookSeen,
    RefusePrompts,
    RunLiveCell,
    SayHello,
    StopCall,
    StopCell,
    decoded,
    deliver,
    handles,
)

_PIECE = 1 << 20


def recorded(rank: int, file: str = "", offset: int = 0) -> dict[str, Any]:
    """Return {"run": directory of the newest run; "" for none}. With `file`, also return its bytes from `offset` on.

    file: "records", "old" (the part before the newest), "overview" or "plan". The bytes are "data". "head" is the first
    line of the file: it changes when the file begins anew.
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


COMPLETIONS = 200
COMPLETION_SECONDS = 1.0  # requests are answered one at a time, so a slow completion would delay a stop
REPLY_BYTES = 4 << 20  # of missed output in one reply; the notebook asks again for the rest
_LINE_LENGTH = 80  # of the first line of a live cell, in its event


class Requests:
    """The requests that a rank answers. Every reply is a dict of plain values."""

    def __init__(self, runner: Runner, stopping: Stopping) -> None:
        self.runner, self.stopping = runner, stopping
        self.process = psutil.Process()
        self.delivered = ""
        self._completing: threading.Thread | None = None
        self.controls = training_requests.controls = TrainingRequestHandler()
        step_boundary.handlers["cell"] = self._run_live
        step_boundary.handlers["nothing"] = lambda _: None
        step_boundary.handlers["unserved"] = self._not_run

    def install(self, kernel: Any) -> None:
        def answer(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
            try:
                reply = {"status": "ok", **deliver(decoded(parent["content"]), self)}
            except Exception as error:
                reply = {"status": "error", "why": f"{type(error).__name__}: {error}"}
            kernel.session.send(stream, "nbkit_reply", reply, parent=parent, ident=ident)

        self.kernel = kernel
        kernel.control_handlers[REQUEST] = answer
        for kind in COMM_TYPES:
            kernel.shell_handlers[kind] = self.runner.stoppable(kernel.shell_handlers[kind])

    @handles(SayHello)
    def _on_hello(self, _: SayHello) -> dict[str, Any]:
        self._publish(Hello())
        return {}

    @handles(GetStatus)
    def _on_status(self, _: GetStatus) -> dict[str, Any]:
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
        """Return the last cell if it took so long that its notebook may be gone, and no notebook has confirmed it."""
        last = next(reversed(self.runner.records.values()), None)
        if last is None or last.seconds < LONG_SECONDS or last.cell == self.delivered:
            return None
        request = self.runner.requests[last.cell]
        return {"cell": request.id, "source": request.source, "number": request.number, "ranks": request.ranks}

    def _failed(self) -> dict[str, Any] | None:
        """Return the failed cell whose frames `%nbkit debug` shows, or None."""
        failed = self.runner.debugger.failed
        return {"number": failed.number, "error": failed.error, "moment": failed.moment} if failed else None

    @handles(AnswerPrompt)
    def _on_answer(self, answer: AnswerPrompt) -> dict[str, Any]:
        self.runner.prompts.answer(answer.number, answer.line)
        return {}

    @handles(RefusePrompts)
    def _on_refusal(self, refused: RefusePrompts) -> dict[str, Any]:
        self.runner.prompts.refuse(refused.cell, refused.why)
        return {}

    @handles(StopCell)
    def _on_stop(self, stop: StopCell) -> dict[str, Any]:
        patience = self.stopping.stop(stop.cell, stop.number, stop.live)
        return {"found": patience is not None, "patience": patience or 0.0}

    @handles(StopCall)
    def _on_stop_call(self, _: StopCall) -> dict[str, Any]:
        self.stopping.stop_call()
        return {}

    @handles(RunLiveCell)
    def _on_live_cell(self, live: RunLiveCell) -> dict[str, Any]:
        """Queue a live cell for the step boundary that all ranks agree on."""
        return self._post(live.number, "cell", live.cell)

    @handles(ControlTraining)
    def _on_control(self, control: ControlTraining) -> dict[str, Any]:
        """Queue an action on the training for a step boundary."""
        return self._post(control.number, "control", Control(control.id, control.action, control.args))

    @handles(GetControlResult)
    def _on_control_result(self, asked: GetControlResult) -> dict[str, Any]:
        return self.controls.result(asked.id)

    @handles(GetStrategies)
    def _on_strategies(self, asked: GetStrategies) -> dict[str, Any]:
        return self.controls.strategies(asked.known)

    @handles(GetStrategyRow)
    def _on_strategy_row(self, asked: GetStrategyRow) -> dict[str, Any]:
        return self.controls.option(asked.strategy)

    def _post(self, number: int, kind: str, payload: Any) -> dict[str, Any]:
        step_boundary.inbox.post(number, kind, payload)
        queued = step_boundary.training() is not None
        if not queued:
            # The training has ended on this rank, and has dropped the requests that waited. This one came later, so it
            # is dropped here.
            for unserved in step_boundary.inbox.drop(number):
                self._not_run(unserved)
        return {"queued": queued}

    @handles(FollowCell)
    def _on_follow(self, follow: FollowCell) -> dict[str, Any]:
        record = self.runner.records.get(follow.cell)  # before the outputs, which must include all that it counts
        outputs, after = self.runner.capture.missed(follow.cell, follow.cursor, REPLY_BYTES)
        return {"outputs": outputs, "cursor": after, "record": record_text(record) if record else None}

    @handles(CompleteName)
    def _on_complete(self, complete: CompleteName) -> dict[str, Any]:
        """Return completions of a name, or of a name with a dot, from the names on this rank."""
        text = complete.text
        if self._completing is not None and self._completing.is_alive():
            return {"matches": []}  # the last completion hangs in the code of a user's object
        matches = set[str]()

        def look() -> None:
            completer = self.runner.shell.Completer
            matches.update(completer.attr_matches(text) if "." in text else completer.global_matches(text))

        self._completing = threading.Thread(target=look, name="nbkit-complete", daemon=True)
        self._completing.start()
        self._completing.join(COMPLETION_SECONDS)
        return {"matches": sorted(matches.copy())[:COMPLETIONS]}

    @handles(NotebookSeen)
    def _on_seen(self, seen: NotebookSeen) -> dict[str, Any]:
        self.runner.link.send(InUse())
        if seen.cell:
            self.delivered = seen.cell
        return {}

    @handles(GetActivity)
    def _on_activity(self, asked: GetActivity) -> dict[str, Any]:
        """Return what this rank is doing now: see nbkit.wire.activity."""
        running = list(self.runner.running)
        known: dict[str, Any] = {}
        if running:
            known = {"cell": running[-1].request.number, "seconds": time.time() - running[-1].started}
        if step_boundary.training() is not None:
            known["step"] = step_boundary.progress().get("step", 0)
        if (prompt := self.runner.prompts.open) is not None:
            known["prompt"] = prompt.kind
        found = activity(self.runner.rank, self.runner.own.cells, stacks=asked.stacks, **known)
        return {"activity": base64.b64encode(pickle.dumps(found)).decode()}

    @handles(GetProgress)
    def _on_progress(self, _: GetProgress) -> dict[str, Any]:
        return {"moved": [delegating_group.num_issued(), step_boundary.progress().get("step", 0)]}

    @handles(LookAtProcesses)
    def _on_look(self, asked: LookAtProcesses) -> dict[str, Any]:
        logs = self.runner.capture.folder.parent / "logs"
        looks = {}
        for rank, process in zip(asked.ranks, asked.processes, strict=True):
            if found := process_state.look(process, logs / f"rank{rank}.log"):
                looks[rank] = found
        return {"looks": base64.b64encode(pickle.dumps(looks)).decode()}

    @handles(InterruptRank)
    def _on_interrupt(self, message: InterruptRank) -> dict[str, Any]:
        self.runner.link.send(message)
        return {}

    @handles(EndRank)
    def _on_end_rank(self, message: EndRank) -> dict[str, Any]:
        self.runner.link.send(message)
        return {}

    @handles(GetRecords)
    def _on_records(self, asked: GetRecords) -> dict[str, Any]:
        return recorded(asked.rank, asked.file, asked.offset)

    def _run_live(self, request: CellRequest) -> None:
        if self._is_withdrawn(request.id):
            self._tell_not_run(request, "interrupted", "stopped before the next step boundary")
            return
        with self.runner.shielded():  # otherwise a stop of the training could lose the record
            began = time.monotonic()
            record = self.runner.run(request)
            self._publish(LiveCellEnded(record_text(record)))
            if (training := step_boundary.training()) is not None:
                lines = [line.strip() for line in request.source.splitlines() if line.strip()]
                seconds, what = time.monotonic() - began, (lines or [""])[0][:_LINE_LENGTH]
                getattr(training, "job", training).ledger.emit(LiveCell(training.step, what=what, seconds=seconds))

    def _is_withdrawn(self, cell: str) -> bool:
        """Return True if a stop of the cell has reached any rank. Collective: all ranks get the same answer.

        A cell that ran only on some ranks would wait for the others.
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
        self._publish(LiveCellEnded(record_text(record)))

    def _publish(self, message: ForNotebook) -> None:
        self.runner.capture.publish(message, self.kernel.iopub_socket)
