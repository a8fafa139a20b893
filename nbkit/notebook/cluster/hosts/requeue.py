"""Continue a cluster that was started with --requeue, if Slurm takes its hosts away during a training.

Hosts are requested again, as by `restart`. To restore the ranks' variables, their earlier cells run again in order,
without output. The cell with the training runs again too if it is detached and continues from its checkpoint (`fit(...,
resume="auto")`). Otherwise a message says what to type. This runs in a thread, so the notebook can run other cells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbkit.errors import NbkitError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.output.display import Screen
from nbkit.notebook.cluster.sent_cells import SentCell, SentValues
from nbkit.wire import cluster_end
from nbkit.wire.cells import CellRequest
from nbkit.wire.cluster_end import ClusterEnd

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cluster import Cluster

_FATE_SECONDS = 120.0  # from the end of the cell until Slurm tells how the job ends
_LOOK_SECONDS = 0.2
_RESUMES = "resume="  # a cell with this continues its training from a checkpoint


_Again = Callable[[CellRequest, Screen], Execution]


def watch(cluster: Cluster, execution: Execution, again: _Again) -> None:
    """Watch a sent cell, if its cluster was started with --requeue. again: sends a cell again."""
    on: Any = cluster.entry.options.get("on")
    if on and on.get("requeue"):
        execution.done.add_done_callback(_Requeue(cluster, execution, again).begin)


class _Requeue:
    """The requeue of one cell. cell: the cell that may be interrupted."""

    def __init__(self, cluster: Cluster, cell: Execution, again: _Again) -> None:
        self.cluster, self.cell, self.again = cluster, cell, again
        self.connection = cluster.connection

    def begin(self, done: Future[Any]) -> None:
        """If the cell's training was saved and ended early, check whether Slurm takes its hosts away."""
        if cluster_end.SAVED in str(done.exception()):
            threading.Thread(target=self._run, name="nbkit-requeue", daemon=True).start()

    def _run(self) -> None:
        if (end := _end_by_slurm(self.connection)) is None:
            return
        cluster, sent = self.cluster, list(self.cluster.sent)
        self._say(f"{end.words}. --requeue: Slurm is asked for hosts again.")
        cluster.before_stop.append(self._give_up)
        try:
            cluster.restart()
            missing = self._run_again(sent)
            self._go_on(end, missing)
        except NbkitError as error:
            self._say(f"--requeue: {error}")
        finally:
            if self._give_up in cluster.before_stop:
                cluster.before_stop.remove(self._give_up)

    def _give_up(self) -> None:
        """Give up, because the user stopped the cluster while it waits for hosts."""
        if found := registry.find(self.connection.entry.name):
            registry.end(found)

    def _run_again(self, sent: Sequence[SentCell | SentValues]) -> list[str]:
        """Run the ranks' earlier cells. Return the names of pushed values that could not be restored."""
        missing: set[str] = set()
        for each in sent:
            request = self.cell.request
            if isinstance(each, SentCell):
                if each.state != "ok" or each.live:
                    continue
                request = each.request
            else:
                missing = missing - set(each.literals) | set(each.others)
                source = "\n".join(f"{name} = {text}" for name, text in each.literals.items())
                request = replace(request, source=source, ranks=each.ranks)
            self._send(request, _Nowhere()).done.result()
        return sorted(missing)

    def _send(self, request: CellRequest, screen: Screen) -> Execution:
        while self.cluster.connection.busy():  # with a cell of the notebook
            time.sleep(_LOOK_SECONDS)
        return self.again(request, screen)

    def _go_on(self, end: ClusterEnd, missing: list[str]) -> None:
        request = self.cell.request
        there = f"--requeue: the ranks are there again, after the cells of before; the checkpoint is of step {end.step}"
        if missing:
            self._say(f"{there}. What was pushed has to be pushed again: %push {' '.join(missing)}")
        elif request.detached and _RESUMES in request.source:
            self._send(request, self.cell.outbox.screen)
            self._say(f"{there}, and cell [{request.number}] goes on from it: %train wait")
        elif _RESUMES in request.source:
            self._say(f"{there}. Run cell [{request.number}] again: it goes on from there.")
        else:
            self._say(f'{there}. trainer.fit(until=..., resume="auto")   goes on from there.')

    def _say(self, words: str) -> None:
        self.cell.outbox.screen.stream("stderr", f"{self.connection.entry.name}: {words}\n")


def _end_by_slurm(connection: Connection) -> ClusterEnd | None:
    """Wait for the reason why the hosts are taken away. Return None if they are not, or if a user asked for it."""
    deadline = time.monotonic() + _FATE_SECONDS
    while time.monotonic() < deadline and not connection.ended:
        is_alive = connection.entry.is_alive()
        end = cluster_end.read(connection.entry.folder)
        if end is None or (end.step >= 0 and end.again):
            return end
        if not is_alive:
            return None
        time.sleep(_LOOK_SECONDS)
    return None


class _Nowhere:
    """A screen that shows nothing."""

    paced = clears = False

    def stream(self, name: str, text: str) -> None: ...
    def display(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None: ...
    def update(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None: ...
    def clear(self, wait: bool) -> None: ...
    def comm(self, kind: str, content: dict[str, Any]) -> None: ...
