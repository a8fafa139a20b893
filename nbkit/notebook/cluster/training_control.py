"""Control a training from the notebook: switch, undo, try, pause, resume, learning rate, save, stop, trace.

During a training, a control is a request to all ranks, which they serve at the same step boundary. Otherwise it runs at
once, as its own cell, on the newest Trainer. The result is a line of text, a small table of predicted and measured
values, or an error.
"""

from __future__ import annotations

import html
import math
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbkit import errors
from nbkit.errors import ClusterError, NbkitError, UsageError
from nbkit.figures import between, html_table, seconds, size
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.cells.handle import handle_of, wait_for, wait_here
from nbkit.notebook.cluster.cells.submit import request_for
from nbkit.notebook.cluster.newest_run import NewestRun
from nbkit.notebook.cluster.output.display import NoScreen
from nbkit.notebook.tracing import TraceFile, trace
from nbkit.records.event_words import resized
from nbkit.wire.messages import ControlTraining, GetControlResult, GetStatus, GetStrategies, GetStrategyRow, Request

_DONE = {"pause": "paused", "resume": "going on", "save": "saved", "stop": "stopped"}


@dataclass(frozen=True)
class ControlResult:
    """The result of a training control, from the ranks.

    strategy: the current strategy afterwards. error: the name of the error's class, "" on success. served: False if the
    training ended before it served the control.

    result: for a switch or undo, the fields of nbkit.records.events.Switched; for a try or a comparison, the Trainer's
    return value. predicted: the moved_bytes and switch_s that were predicted before a switch, or why switch_s was not
    predicted; {} without a prediction. deviations: after a switch or undo, how the training differs from one in a
    single process.
    """

    id: str
    do: str
    args: Mapping[str, Any]
    step: int
    strategy: str
    ok: bool
    error: str
    what: str
    numbers: str
    hint: str
    result: Mapping[str, Any]
    served: bool = True
    predicted: Mapping[str, Any] = field(default_factory=dict)
    deviations: Sequence[str] = ()

    def check(self) -> None:
        """Raise the error that the ranks raised, if any."""
        if self.ok:
            return
        kind = getattr(errors, self.error, NbkitError)
        plain = isinstance(kind, type) and issubclass(kind, NbkitError) and kind.__init__ is NbkitError.__init__
        raise (kind if plain else NbkitError)(self.what, numbers=self.numbers, hint=self.hint)

    @property
    def line(self) -> str:
        """Return the result as one line of text."""
        if not self.ok:
            return " ".join(part for part in (self.what, f"({self.numbers})" * bool(self.numbers)) if part)
        if self.do in ("switch", "undo"):
            return f"{self.result['old']} → {self.result['new']} after step {self.step}"
        if self.do == "try":
            tried, before = self.result["step_s"], self.result["before_step_s"]
            steps = f"{self.result['steps']} step{'s' * (self.result['steps'] != 1)}"
            beside = f"{seconds(before)} under {self.strategy}" if before else f"{self.strategy} is not measured yet"
            change = f", {before / tried:.2f} × as fast" if tried and before else ""
            return f"tried {self.result['strategy']} for {steps}: {seconds(tried)} a step, {beside}{change}"
        if self.do == "compare":
            return verdict(self.result["strategies"], self.strategy)
        if self.do == "fit":
            then = "going on" if self.result["goes_on"] else "trainer.fit(...) goes on"
            return f"{self.result['changes']} after step {self.step}: {then}"
        if self.do == "resize" and "moved_bytes" in self.result:
            return resized(self.result)
        if self.do == "resize":
            return f"{self.result['ranks']} ranks; nothing trains on them"
        if self.do == "lr":
            return f"learning rate {self.result['old']:g} → {self.result['new']:g} after step {self.step}"
        if self.do == "trace":
            return f"tracing steps {self.result['first']} to {self.result['last']}"
        where = f" {self.result['path']}" if self.do == "save" else ""
        return f"{_DONE[self.do]}{where} after step {self.step}"

    @property
    def figures(self) -> list[tuple[str, str, str]]:
        """Return [(name, predicted, measured)] of a switch. A prediction may be unknown."""
        if not self.ok or self.do not in ("switch", "undo"):
            return []
        return [
            ("bytes moved", size(self.predicted.get("moved_bytes")), size(self.result["moved_bytes"])),
            ("pause", seconds(self.predicted.get("switch_s")), seconds(self.result["pause_s"])),
        ]

    def __repr__(self) -> str:
        if self.ok and self.do == "compare":
            return "\n".join([self.line, *_lined_up(self.compared), f"  {self.turns}"])
        rows = [f"  {what:<12} predicted {predicted:<10} measured {found}" for what, predicted, found in self.figures]
        notes = [f"  {note}" for note in self.notes]
        return "\n".join([self.line, *rows, *notes])

    @property
    def notes(self) -> list[str]:
        """Return sentences about a switch: whether the state was preserved, what is unknown, and the deviations."""
        if not self.figures:
            return []
        unknown = [f"pause not predicted: {why}"] if (why := self.predicted.get("why")) else []
        return [proof(self.result), *unknown, *self.deviations]

    @property
    def compared(self) -> list[tuple[str, ...]]:
        """Return the rows of a comparison; the first one is the header."""
        head = "strategy", "a step", "the median lies within", "peak", "sent in a step"
        rows = sorted(self.result["strategies"], key=lambda row: math.inf if row["error"] else row["step_s"])
        return [head, *map(_compared, rows)]

    @property
    def turns(self) -> str:
        """Return a sentence about the method of a comparison."""
        steps = f"{self.result['steps']} steps each, in turns, after step {self.step}"
        return f"{steps}, from the same state on the same batches; the training goes on under {self.strategy}"

    def _repr_html_(self) -> str:
        if self.ok and self.do == "compare":
            head, *rows = self.compared
            table = html_table(head, rows, figures=head[1:])
            return f"<b>{html.escape(self.line)}</b>{table}<small>{html.escape(self.turns)}</small>"
        if not self.figures:
            return f"<span>{html.escape(self.line)}</span>"
        table = html_table(("", "predicted", "measured"), self.figures, figures=("predicted", "measured"))
        notes = "<br>".join(map(html.escape, self.notes))
        return f"<b>{html.escape(self.line)}</b>{table}<small>{notes}</small>"


def verdict(rows: Sequence[Mapping[str, Any]], now: str) -> str:
    """Return a sentence about which strategy of a comparison is the fastest. now: the current strategy.

    A difference counts only if the intervals of the medians do not overlap.
    """
    known = [row for row in rows if not row["error"]]
    here = next((row for row in known if row["strategy"] == now), None)
    if here is None or len(known) < 2:
        return f"No other strategy could be measured beside {now}."
    best = min(known, key=lambda row: row["step_s"])
    if None in (best["high_s"], here["low_s"]):
        return f"Too few steps were measured to tell the strategies apart: {now} took {seconds(here['step_s'])} a step."
    if best["high_s"] < here["low_s"]:
        times = f"{here['step_s'] / best['step_s']:.2f}"
        took = f"{seconds(best['step_s'])} a step, {times} times as fast as {now}"
        return f"{best['strategy']} was the fastest of the {len(known)} that were measured: {took}, which runs now."
    # In the past tense, because the panel also shows the newest steps of the strategy that runs.
    took = f"took {seconds(here['step_s'])} a step in this comparison"
    return f"{now}, which runs now, {took}. No strategy was measurably faster."


def _compared(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["error"]:
        return row["strategy"], row["error"], "", "", ""
    within = between(row["low_s"], row["high_s"]) if row["low_s"] is not None else ""
    return row["strategy"], seconds(row["step_s"]), within, size(row["peak_bytes"]), size(row["sent_bytes"])


def _lined_up(rows: list[tuple[str, ...]]) -> list[str]:
    # The reason for refusing a strategy may be long, so it is on a line of its own.
    widths = [max(len(row[at]) for row in rows if row[-1]) for at in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def stopped(step: int) -> ControlResult:
    """Return the result for a training that was stopped after `step` steps."""
    return ControlResult("", "stop", {}, step, "", True, "", "", "", "", {})


def proof(switched: Mapping[str, Any]) -> str:
    """Return in words whether a switch preserved the state."""
    words = {True: "state identical, bit for bit", False: "STATE DIFFERS", None: "state not compared"}
    return words[switched.get("identical")]


TICK_SECONDS = 0.03
_TRAINS = re.compile(r"\.(fit|batches)\(")
GRACE_SECONDS = 2.0  # for a new cell to reach its first step
END_SECONDS = 5.0  # for a cell to end after its training
ANSWER_SECONDS = 2.0
LOST_SECONDS = 5.0  # for a request to reach the ranks
TABLE_SECONDS = 1.0


class TrainingClient:
    """The notebook's access to the training on a cluster's ranks. All methods are thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._table: dict[str, Any] = {}
        self._stamp = ""
        self.switched: list[ControlResult] = []  # every switch and undo that the ranks have made, in order

    def switch(self, strategy: str) -> ControlResult:
        """Switch to another strategy, e.g. "zero3" or "pp=2 schedule=1f1b". The result has the bytes moved and seconds.

        Raises StrategyError or SwitchError if it is refused. The old strategy then goes on, and nothing has changed.
        """
        return self.ask("switch", strategy=strategy)

    def undo(self) -> ControlResult:
        """Go back to the strategy before the last switch, with the current weights."""
        return self.ask("undo")

    def try_out(self, strategy: str, steps: int = 10) -> ControlResult:
        """Measure a strategy for `steps` steps on the live job, then return to the previous state."""
        return self.ask("try", strategy=strategy, steps=steps)

    def compare(self, *strategies: str, steps: int = 20) -> ControlResult:
        """Measure strategies in turns, from the same state on the same batches, then return to the previous state."""
        return self.ask("compare", strategies=list(strategies), steps=steps)

    def pause(self) -> ControlResult:
        """Hold the training at its next step boundary until `resume` or Stop. Switches still work meanwhile."""
        result = self.ask("pause")
        # Any rank may have given the result, but `look` asks the first one, which may be held a moment later.
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.look().get("held") is False and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)
        return result

    def resume(self) -> ControlResult:
        """Continue after `pause`."""
        return self.ask("resume")

    def lr(self, value: float) -> ControlResult:
        """Set the learning rate of the Trainer at its next step boundary. A schedule keeps its shape.

        value: the new rate of the first parameter group; others keep their ratio to it.
        """
        return self.ask("lr", value=value)

    def fit(self, number: int = 0) -> ControlResult:
        """After a step ran out of memory, continue with row `number` of the offered options; 0: the first that fits."""
        return self.ask("fit", number=number)

    def save(self, path: str = "") -> ControlResult:
        """Write a checkpoint at the next step boundary, by default to checkpoint in the run's directory."""
        return self.ask("save", path=path)

    def wait(self) -> None:
        """Wait for the running cell; see Cluster.wait."""
        if (execution := self._connection.busy()) is not None:
            wait_for(self._connection, execution)

    def stop(self) -> ControlResult:
        """Stop the running cell and wait for it; see CellHandle.stop. A training stops at its next step boundary."""
        if (handle := handle_of(self._connection)) is None:
            raise UsageError("No cell runs, so there is nothing to stop.", hint="%cluster status")
        handle.stop()
        return stopped(self.look().get("step", 0))

    def trace(self, steps: int = 3, path: str | os.PathLike[str] | None = None) -> TraceFile:
        """Trace the next `steps` steps of all ranks into one file for Perfetto, and wait until it is written.

        path: default trace-RUN-FIRST-LAST.json.gz in the notebook's directory. Raises UsageError if no training runs or
        nothing is recorded, TrainingError if the training ends before the first of them, ClusterError if a rank has
        died.
        """

        def begin() -> tuple[int, int]:
            steps_traced = self.ask("trace", steps=steps).result
            return steps_traced["first"], steps_traced["last"]

        return trace(NewestRun(self._connection), begin, self._check, path)

    def runs(self) -> bool:
        """Return True if a training makes steps. Unlike `look`, this does not make ranks estimate strategies."""
        return bool(self._ask_one(GetStatus()).get("training"))

    def look(self) -> dict[str, Any]:
        """Return a rank's answer about its training, even if it is busy. {}: it did not answer.

        "training": it makes steps. "job": it has a Trainer or a job; without one the other keys are missing. "held": it
        is paused. "step": number of finished steps. "strategy": the current one. "progress": the content of the cell's
        card. "table": an estimate for every strategy, {} while it is being computed; `table` in
        nbkit/rank/train/estimate/strategy_table.py lists its keys.
        """
        answer = self._ask_one(GetStrategies(self._stamp))
        if not answer:
            return {}
        if answer["table"] is not None or not answer["job"]:
            self._table, self._stamp = answer["table"] or {}, answer["stamp"]
        return {**answer, "table": self._table}

    def option(self, strategy: str) -> dict[str, Any]:
        """Return a row like those in the table of `look` for any strategy; {} if there is none, or no answer yet."""
        return self._ask_one(GetStrategyRow(strategy)).get("row") or {}

    def look_well(self, patience: float = TABLE_SECONDS) -> dict[str, Any]:
        """Return the table for the current strategy, or {} if it takes longer than `patience` seconds."""
        deadline = time.monotonic() + patience
        while (answer := self.look()).get("job") and time.monotonic() < deadline:
            if table := _in_force(answer):
                return table
            time.sleep(TICK_SECONDS)
        return {}

    def ask(self, do: str, **args: Any) -> ControlResult:
        """Send a request that all ranks serve at the same step boundary, or at once if none makes steps.

        If the training ends before it serves the request, the newest Trainer serves it afterwards.
        """
        self._check()
        result = self._at_boundary(do, args) if self._makes_steps() else None
        if result is None or not result.served:
            while result is not None and self._connection.busy() is not None:
                time.sleep(TICK_SECONDS)  # wait for the end of the training's cell
            result = self._as_cell(do, args)
        result.check()
        if do in ("switch", "undo"):
            self.switched.append(result)
        return result

    def _ask_one(self, request: Request) -> dict[str, Any]:
        """Return the answer of the first live rank, or {}."""
        connection = self._connection
        first = min(set(range(connection.entry.n)) - set(connection.deaths), default=0)
        return dict(connection.client.ask([first], request, ANSWER_SECONDS).get(first, {}))

    def _check(self) -> None:
        self._connection.check_open()
        self._connection.check_alive(range(self._connection.entry.n))

    def _makes_steps(self) -> bool:
        """Return True as soon as all ranks are in a training, False if there is none.

        Wait GRACE_SECONDS for a new cell to begin a training, and END_SECONDS for a cell to end after its training.
        Wait without limit for a cell that calls `fit` or loops over `batches` but has not begun to train.
        """
        connection = self._connection
        n = connection.entry.n
        seen = time.time()  # when a training was seen last
        while (busy := connection.busy()) is not None:
            states = connection.client.ask(range(n), GetStatus())
            if len(states) == n and all(state["training"] for state in states.values()):
                return True
            trains = any(state["training"] for state in states.values())
            trained = any(state["trained"] for state in states.values())
            begins = _TRAINS.search(busy.request.source) and not trained
            now = time.time()
            too_long = now - seen > END_SECONDS if trained else now - busy.sent > GRACE_SECONDS
            if trains:
                seen = now
            elif too_long and not begins:
                return False
            time.sleep(TICK_SECONDS)
        return False

    def _at_boundary(self, do: str, args: dict[str, Any]) -> ControlResult:
        connection, id = self._connection, _new_id()
        number = connection.next_request()
        connection.client.request(range(connection.entry.n), ControlTraining(number, id, do, args))
        return self._result(id)

    def _as_cell(self, do: str, args: dict[str, Any]) -> ControlResult:
        connection, id = self._connection, _new_id()
        connection.check_idle("control")
        words = " ".join([do, *(str(value) for value in args.values() if value != "")])
        call = f"__import__('nbkit.bridge.training_requests', fromlist=['now']).now({id!r}, {do!r}, {args!r})"
        request = request_for(connection, f"# {words}\n{call}")
        note = connection.ensure_world()
        wait_here(connection, connection.send(request, NoScreen(), note))
        return self._result(id)

    def _result(self, id: str) -> ControlResult:
        """Wait for the result. The stop button ends the wait, not the control.

        Raises ClusterError if a rank has died, or if every rank that knew of the request has been replaced.
        """
        known = time.monotonic()
        while True:
            n = self._connection.entry.n
            answers = self._connection.client.ask(range(n), GetControlResult(id), ANSWER_SECONDS)
            for answer in answers.values():
                if answer["result"] is not None:
                    return ControlResult(**answer["result"])
            self._check()
            if len(answers) < n or any(answer["known"] for answer in answers.values()):
                known = time.monotonic()
            elif time.monotonic() - known > LOST_SECONDS:
                raise ClusterError(
                    "No rank has the request any more: the ranks that had it died and were replaced.",
                    numbers=f"asked for {LOST_SECONDS:.0f} s",
                    hint="%strategy   shows what is in force",
                )
            time.sleep(TICK_SECONDS)


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _in_force(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the table if it is for the current strategy, and includes the optimizer's state after the first step."""
    table: dict[str, Any] = answer.get("table") or {}
    same = table and table["strategy"] == answer["strategy"] and bool(table["step"]) == bool(answer["step"])
    return table if same else {}
