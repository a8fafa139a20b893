"""Control a training from the notebook: switch, undo, try, pause, resume, save, stop, trace; estimate strategies.

While the ranks are between two steps, a control goes to all of them as a request, and they act at the step they agree
on. Otherwise it runs at once, as a cell of its own, on the newest Trainer. Either way one result comes back.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from typing import Any

from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.cells.handle import handle_of
from nbkit.notebook.cluster.cells.submit import request_for
from nbkit.notebook.cluster.cells.wait import wait_for, wait_here
from nbkit.notebook.cluster.control_result import ControlResult, stopped
from nbkit.notebook.cluster.newest_run import NewestRun
from nbkit.notebook.cluster.output.display import NoScreen
from nbkit.notebook.tracing import Traced, trace

TICK_SECONDS = 0.03
_TRAINS = re.compile(r"\.(fit|batches)\(")
GRACE_SECONDS = 2.0  # a cell that has just been sent may be on its way to its first step
ANSWER_SECONDS = 2.0
LOST_SECONDS = 5.0  # for a request to be on its way to the ranks
TABLE_SECONDS = 1.0


class Training:
    """The training on a cluster's ranks, as the notebook sees it. Every method may be called from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._table: dict[str, Any] = {}
        self._stamp = ""
        self.switched: list[ControlResult] = []  # every switch and undo that the ranks have made, in order

    def switch(self, strategy: str) -> ControlResult:
        """Switch to another strategy, e.g. "zero3" or "pp=2 schedule=1f1b"; the result has bytes moved and seconds.

        Raises StrategyError or SwitchError when it was refused: the old strategy goes on, and nothing has changed.
        """
        return self.ask("switch", strategy=strategy)

    def undo(self) -> ControlResult:
        """Go back to the strategy before the last switch, with the weights of now."""
        return self.ask("undo")

    def try_out(self, strategy: str, steps: int = 10) -> ControlResult:
        """Measure a strategy for so many steps on the live job, then go back to where it was."""
        return self.ask("try", strategy=strategy, steps=steps)

    def compare(self, *strategies: str, steps: int = 20) -> ControlResult:
        """Measure strategies in turns, from one state on the same batches, then go back to where it was."""
        return self.ask("compare", strategies=list(strategies), steps=steps)

    def pause(self) -> ControlResult:
        """Hold the training at its next step boundary, until `resume` or Stop; switches act meanwhile."""
        return self.ask("pause")

    def resume(self) -> ControlResult:
        """Continue after `pause`."""
        return self.ask("resume")

    def fit(self, number: int = 0) -> ControlResult:
        """After a step ran out of memory: go on with row `number` of what was offered; 0: the first that fits."""
        return self.ask("fit", number=number)

    def save(self, path: str = "") -> ControlResult:
        """Write a checkpoint at the next step boundary; default: checkpoint in the run's directory."""
        return self.ask("save", path=path)

    def wait(self) -> None:
        """Wait for the cell that runs: see Cluster.wait."""
        if (execution := self._connection.busy()) is not None:
            wait_for(self._connection, execution)

    def stop(self) -> ControlResult:
        """Stop the cell that runs, a training at its next step boundary, and wait for that: see CellHandle.stop."""
        if (handle := handle_of(self._connection)) is None:
            raise UsageError("No cell runs, so there is nothing to stop.", hint="%cluster status")
        handle.stop()
        return stopped(self.look().get("step", 0))

    def trace(self, steps: int = 3, path: str | os.PathLike[str] | None = None) -> Traced:
        """Trace the next `steps` steps of all ranks into one file for Perfetto; returns when it is written.

        path: default trace-RUN-FIRST-LAST.json.gz where the notebook is. Raises UsageError where nothing makes steps
        or nothing is recorded, TrainingError when the training ends before one of the steps, ClusterError when a rank
        has died.
        """

        def begin() -> tuple[int, int]:
            steps_traced = self.ask("trace", steps=steps).result
            return steps_traced["first"], steps_traced["last"]

        return trace(NewestRun(self._connection), begin, self._check, path)

    def runs(self) -> bool:
        """Return True if a training makes steps. Asks for nothing that would have to be found out about its model."""
        return bool(self._ask_one("status").get("training"))

    def look(self) -> dict[str, Any]:
        """What a rank answers about its training, whatever it is doing: see bridge/training_requests.py. {}: no answer.

        "table" is the estimate for every strategy, {} while it is being computed.
        """
        answer = self._ask_one("strategies", known=self._stamp)
        if not answer:
            return {}
        if answer["table"] is not None or not answer["job"]:
            self._table, self._stamp = answer["table"] or {}, answer["stamp"]
        return {**answer, "table": self._table}

    def option(self, strategy: str) -> dict[str, Any]:
        """The row that the table of `look` would have for a strategy; {} where there is none, or no answer yet."""
        return self._ask_one("option", strategy=strategy).get("row") or {}

    def look_well(self, patience: float = TABLE_SECONDS) -> dict[str, Any]:
        """The table of the strategy in force, {} if it takes longer than `patience` seconds."""
        deadline = time.monotonic() + patience
        while (answer := self.look()).get("job") and time.monotonic() < deadline:
            if table := _in_force(answer):
                return table
            time.sleep(TICK_SECONDS)
        return {}

    def ask(self, do: str, **args: Any) -> ControlResult:
        """Have all ranks serve a request at the same boundary, or now when none makes steps.

        A training that ends before it comes to the request does not lose it: the newest Trainer serves it then.
        """
        self._check()
        result = self._at_boundary(do, args) if self._makes_steps() else None
        if result is None or not result.served:
            while result is not None and self._connection.busy() is not None:
                time.sleep(TICK_SECONDS)  # for what else the training's cell does
            result = self._as_cell(do, args)
        result.check()
        if do in ("switch", "undo"):
            self.switched.append(result)
        return result

    def _ask_one(self, what: str, **values: Any) -> dict[str, Any]:
        """The answer of the first rank that lives; {}: none came."""
        connection = self._connection
        first = min(set(range(connection.entry.n)) - set(connection.deaths), default=0)
        return dict(connection.client.ask([first], what, ANSWER_SECONDS, **values).get(first, {}))

    def _check(self) -> None:
        self._connection.check_open()
        self._connection.check_alive(range(self._connection.entry.n))

    def _makes_steps(self) -> bool:
        """Return whether all ranks are between two steps.

        A cell that has just been sent is given time to get there; one that calls `fit`, or loops over `batches`, as
        long as it runs: what is asked is kept for when its training begins.
        """
        connection = self._connection
        n = connection.entry.n
        while (busy := connection.busy()) is not None:
            states = connection.client.ask(range(n), "status")
            if len(states) == n and all(state["training"] for state in states.values()):
                return True
            begins = _TRAINS.search(busy.request.source) and not any(state["trained"] for state in states.values())
            trains = any(state["training"] for state in states.values())
            if time.time() - busy.sent > GRACE_SECONDS and not (begins or trains):
                return False
            time.sleep(TICK_SECONDS)
        return False

    def _at_boundary(self, do: str, args: dict[str, Any]) -> ControlResult:
        connection, id = self._connection, _new_id()
        number = connection.next_request()
        connection.client.request(range(connection.entry.n), "control", number=number, id=id, action=do, args=args)
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
        """Wait for the result. The stop button ends only the waiting.

        Raises ClusterError where a rank has died, or where none knows of the request any more: those that did have
        been replaced.
        """
        known = time.monotonic()
        while True:
            n = self._connection.entry.n
            answers = self._connection.client.ask(range(n), "result", ANSWER_SECONDS, id=id)
            for answer in answers.values():
                if answer["result"] is not None:
                    return ControlResult(**answer["result"])
            self._check()
            if len(answers) < n or any(answer["known"] for answer in answers.values()):
                known = time.monotonic()
            elif time.monotonic() - known > LOST_SECONDS:
                raise ClusterError(
                    "No rank knows of the request any more: those that did have died and were replaced.",
                    numbers=f"asked for {LOST_SECONDS:.0f} s",
                    hint="%strategy   shows what is in force",
                )
            time.sleep(TICK_SECONDS)


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _in_force(answer: dict[str, Any]) -> dict[str, Any]:
    """The table, if it is that of the strategy in force, and it counts the optimizer's state where there is some."""
    table: dict[str, Any] = answer.get("table") or {}
    same = table and table["strategy"] == answer["strategy"] and bool(table["step"]) == bool(answer["step"])
    return table if same else {}
