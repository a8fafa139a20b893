"""End a cell from outside: because the user stops it, or because another rank failed first.

SIGINT ends Python code, but it cannot end a wait inside gloo or NCCL. So if the cell has not ended shortly after, the
collectives of the rank are aborted. Then a new generation of the world is needed. A thread does both, because the main
thread is the one that is stuck.
"""

from __future__ import annotations

import threading
import time

from nbkit.bridge.runner import Runner, Running
from nbkit.rank.train.control import step_boundary
from nbkit.rank.world import failure_alarm

TICK_SECONDS = 0.05
SIGINT_SECONDS = 0.15  # Python code ends sooner; code that needs longer waits in C
AGAIN_SECONDS = 0.5
ROUNDS = 20
HANDLED = 2  # rounds


class Stopping:
    """The stops of one rank. There is one object per rank. Every call returns at once; a thread does the work."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.withdrawn: set[str] = set()  # live cells that were stopped before they began
        self._hurried: set[str] = set()  # cells that were stopped twice: do not wait for their training

    def stop(self, cell: str, number: int, live: bool = False) -> float | None:
        """Stop a cell for the user. A second call interrupts it at once.

        number: the number of the request to stop a training at a step boundary; the same on every rank.
        live: stop only a live cell; the training around it goes on.
        Returns the seconds that a training has to reach that boundary, 0 if there is no training, or None if no such
        cell runs here.
        """
        # Always posted: the numbers of requests must have no gap, or later ones would wait for the missing one.
        step_boundary.inbox.post(number, "nothing" if live else "stop", None)
        # Add the cell before looking for it: otherwise a cell that begins just after the look would run on.
        (self.withdrawn if live else self.runner.stopped_early).add(cell)
        running = self._find(cell)
        if running is None:
            if not live:
                self.stop_call()  # the cell may be queued behind it
            return None
        if running.asked:
            self._hurried.add(cell)
            return 0.0
        running.asked = True
        patience = 0.0 if live else step_boundary.patience()
        # A training that is held at a breakpoint must go on to its boundary.
        if patience:
            self.runner.prompts.refuse(cell)
        threading.Thread(target=self._stop, args=(running, patience), name="nbkit-stop", daemon=True).start()
        return patience

    def release(self, cell: str, reason: str) -> None:
        """End this rank's part of a cell because another rank failed. reason: such as "rank 1 failed"."""
        running = self._find(cell)
        if running is None:
            return
        running.released = reason
        threading.Thread(target=self._release, args=(running, reason), name="nbkit-release", daemon=True).start()

    def stop_call(self) -> None:
        """Stop a call of the notebook, such as sending a value. The notebook does not wait for it any longer."""
        if (serving := self.runner.serving) is not None:
            threading.Thread(target=self._stop, args=(serving, 0.0), name="nbkit-stop", daemon=True).start()

    def _stop(self, running: Running, patience: float) -> None:
        if self._ends_in(running, patience):
            return
        running.stopped = True
        self.runner.interrupt(running)
        if not running.ended.wait(SIGINT_SECONDS) and self.runner.in_user_code:
            failure_alarm.break_out("the cell was stopped while it waited")
        self._insist(running)

    def _release(self, running: Running, reason: str) -> None:
        failure_alarm.break_out(reason)
        if not running.ended.wait(SIGINT_SECONDS):
            self.runner.interrupt(running)
            self._insist(running)

    def _ends_in(self, running: Running, patience: float) -> bool:
        """Return True if the training in the cell reaches a step boundary in time, and the cell ends there.

        An interrupt within a step can destroy the training: ranks that hold different parts of a model may then be at
        different steps.
        """
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and running.request.id not in self._hurried:
            if running.ended.wait(TICK_SECONDS):
                return True
        self._hurried.discard(running.request.id)
        return False

    def _insist(self, running: Running) -> None:
        """Interrupt the cell again and again until it ends, at most ROUNDS times.

        User code may swallow one interrupt in a loop; it rarely swallows twenty. If the cell has its own SIGINT
        handler, which may save something and end, the first HANDLED interrupts call it. Later ones bypass it.
        """
        for number in range(ROUNDS):
            if running.ended.wait(AGAIN_SECONDS):
                return
            self.runner.interrupt(running, insist=number >= HANDLED)

    def _find(self, cell: str) -> Running | None:
        return next((running for running in list(self.runner.running) if running.request.id == cell), None)
