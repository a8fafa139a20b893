"""Steering a training from the notebook: switch, undo, try, pause, resume, save, stop; and looking at what it could be.

While the ranks are between two steps, each goes to all of them as a request and acts at the step they agree on; else it
runs at once as a cell of its own, on the newest Trainer. Either way one verdict comes back.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbkit.errors import StrategyError, UsageError
from nbkit.notebook.cluster import presence
from nbkit.notebook.cluster.cells import submit
from nbkit.notebook.cluster.cells.execution import Running
from nbkit.notebook.cluster.cells.handle import handle_of
from nbkit.notebook.cluster.cells.wait import wait_here
from nbkit.notebook.cluster.control_result import Verdict, stopped
from nbkit.notebook.cluster.naming import names_of_notebook
from nbkit.notebook.tracing import Traced, trace
from nbkit.strategy import Strategy

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cluster import Cluster

TICK_SECONDS = 0.03
GRACE_SECONDS = 2.0  # a cell that has just been sent may be on its way to its first step
ANSWER_SECONDS = 2.0
TABLE_SECONDS = 1.0
FRESH_SECONDS = 1.5  # a panel looks more often: what it shows is what was foretold, and a click waits for nothing


class Training:
    """The training on a cluster's ranks, as the notebook sees it. Every method may be called from any thread."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._table: dict[str, Any] = {}
        self._stamp = ""
        self._looked: tuple[float, dict[str, Any]] = 0.0, {}  # when last, and what was told

    def switch(self, strategy: str) -> Verdict:
        """Train on under another strategy, e.g. "zero3" or "pp=2 schedule=1f1b"; what was moved, and how long it took.

        Raises StrategyError or SwitchError when it was refused: the old strategy goes on, and nothing has changed.
        """
        return self.ask("switch", strategy=strategy)

    def undo(self) -> Verdict:
        """Go back to the strategy before the last switch, with the weights of now."""
        return self.ask("undo")

    def try_out(self, strategy: str, steps: int = 10) -> Verdict:
        """Measure a strategy for so many steps on the live job, then go back to where it was."""
        return self.ask("try", strategy=strategy, steps=steps)

    def pause(self) -> Verdict:
        """Hold the training at its next step boundary, until `resume` or Stop; switches act meanwhile."""
        return self.ask("pause")

    def resume(self) -> Verdict:
        """Go on after `pause`."""
        return self.ask("resume")

    def save(self, path: str = "") -> Verdict:
        """Write a checkpoint at the next step boundary; default: checkpoint in the run's directory."""
        return self.ask("save", path=path)

    def wait(self) -> None:
        """Wait for the cell that runs: see Cluster.wait."""
        self.cluster.wait()

    def stop(self) -> Verdict:
        """Stop the cell that runs, a training at its next step boundary, and wait for that: see CellHandle.stop."""
        if (handle := handle_of(self.cluster)) is None:
            raise UsageError("No cell runs, so there is nothing to stop.", hint="%cluster status")
        handle.stop()
        return stopped(self.look().get("step", 0))

    def trace(self, steps: int = 3, path: str | os.PathLike[str] | None = None) -> Traced:
        """The next `steps` steps of all ranks as one file for Perfetto: see nbkit.notebook.tracing."""
        return trace(self.cluster, steps, path)

    def look(self) -> dict[str, Any]:
        """What a rank says of its training, whatever it is doing now: see nbkit.bridge.controls. {}: no answer.

        "table" is what every strategy would cost, {} while that is being worked out.
        """
        cluster = self.cluster
        first = min(set(range(cluster.entry.n)) - set(cluster.post.deaths), default=0)
        answers = cluster.post.wire.ask([first], "strategies", ANSWER_SECONDS, known=self._stamp)
        if first not in answers:
            return {}
        told = answers[first]
        if told["table"] is not None or not told["job"]:
            self._table, self._stamp = told["table"] or {}, told["stamp"]
        told = {**told, "table": self._table}
        self._looked = time.monotonic(), told
        return told

    def look_well(self, patience: float = TABLE_SECONDS) -> dict[str, Any]:
        """The table of the strategy in force, {} if it takes longer than `patience` seconds."""
        deadline = time.monotonic() + patience
        while (told := self.look()).get("job") and time.monotonic() < deadline:
            if table := _in_force(told):
                return table
            time.sleep(TICK_SECONDS)
        return {}

    def ask(self, do: str, **args: Any) -> Verdict:
        """Have all ranks do one of nbkit.bridge.controls at the same boundary, or now when none makes steps."""
        cluster = self.cluster
        presence.must_be_here(cluster)
        cluster.post.check_alive(range(cluster.entry.n))
        id = uuid.uuid4().hex[:12]
        foretold = self._foretold(do, args)
        self._looked = 0.0, {}  # what comes now may change it
        if self._makes_steps():
            everyone = range(cluster.entry.n)
            number = cluster.post.next_request()
            cluster.post.wire.request(everyone, "control", number=number, id=id, action=do, args=args)
        else:
            self._run_as_cell(id, do, args)
        verdict = replace(self._verdict(id), foretold=foretold)
        verdict.check()
        return verdict

    def _foretold(self, do: str, args: dict[str, Any]) -> dict[str, Any]:
        """What the table says of the strategy that is switched to."""
        if do not in ("switch", "undo"):
            return {}
        when, told = self._looked
        table = (_in_force(told) if time.monotonic() - when < FRESH_SECONDS else {}) or self.look_well()
        try:
            wanted = args.get("strategy") or table.get("previous") or ""
            strategy = str(Strategy.parse(wanted, self.cluster.entry.n))
        except StrategyError:
            return {}  # the ranks say what is wrong with it
        row: dict[str, Any] = next((row for row in table.get("options", ()) if row["strategy"] == strategy), {})
        return {key: row[key] for key in ("moved_bytes", "switch_s") if key in row}

    def _makes_steps(self) -> bool:
        """Whether all ranks are between two steps; a cell that has just been sent is given time to get there."""
        post, n = self.cluster.post, self.cluster.entry.n
        while (busy := post.busy()) is not None:
            states = post.wire.ask(range(n), "status")
            if len(states) == n and all(state["training"] for state in states.values()):
                return True
            if time.time() - busy.sent > GRACE_SECONDS and not any(state["training"] for state in states.values()):
                return False
            time.sleep(TICK_SECONDS)
        return False

    def _run_as_cell(self, id: str, do: str, args: dict[str, Any]) -> None:
        cluster = self.cluster
        words = " ".join([do, *(str(value) for value in args.values() if value != "")])
        call = f"__import__('nbkit.bridge.controls', fromlist=['now']).now({id!r}, {do!r}, {args!r})"
        request = submit.request_for(cluster, f"# {words}\n{call}", None, at_step=False)
        cluster.generation.ensure()
        running = Running(request, _Nowhere(), cluster.post.wire.later, names_of_notebook)
        running.before_done = lambda: cluster.generation.learn_from(running)
        cluster.post.send(running)
        wait_here(cluster, running)

    def _verdict(self, id: str) -> Verdict:
        """Wait for it. The stop button ends the waiting only. Raises ClusterError."""
        cluster = self.cluster
        while True:
            for told in cluster.post.wire.ask([0], "verdict", ANSWER_SECONDS, id=id).values():
                if told["verdict"] is not None:
                    return Verdict(**told["verdict"])
            presence.must_be_here(cluster)
            cluster.post.check_alive(range(cluster.entry.n))
            time.sleep(TICK_SECONDS)


def _in_force(told: dict[str, Any]) -> dict[str, Any]:
    """The table, if it is that of the strategy in force, and knows of the optimizer's state where there is some."""
    table: dict[str, Any] = told.get("table") or {}
    same = table and table["strategy"] == told["strategy"] and bool(table["step"]) == bool(told["step"])
    return table if same else {}


class _Nowhere:
    """A screen for what is told by its verdict."""

    paced = False

    def stream(self, name: str, text: str) -> None:
        return

    def display(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        return

    def update(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        return

    def clear(self, wait: bool) -> None:
        return

    def comm(self, kind: str, content: dict[str, Any]) -> None:
        return
