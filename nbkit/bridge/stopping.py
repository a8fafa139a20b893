"""End a cell from outside: because the user stops it, or because another rank failed first.

SIGINT ends Python code; it cannot end a wait inside gloo or NCCL, so a rank that is still in its cell shortly
after is broken out of its collectives, which costs this generation of the world. Both come from a thread,
because the main thread is the one that is stuck.
"""

from __future__ import annotations

import threading
import time

from nbkit.bridge.runner import Runner, Running
from nbkit.rank.train.control import step_boundary
from nbkit.rank.world import failure_alarm

TICK_SECONDS = 0.05
SIGINT_SECONDS = 0.15  # Python code needs less than that; what needs more is waiting in C
AGAIN_SECONDS = 0.5
ROUNDS = 20
HANDLED = 2  # rounds


class Stopping:
    """One per rank. Every call returns at once; the work is done in a thread."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.withdrawn: set[str] = set()  # live cells whose stop came before they began
        self._hurried: set[str] = set()  # cells that were asked twice: their training is not waited for

    def stop(self, cell: str, number: int, live: bool = False) -> float | None:
        """Return the user's Stop; asked again, it interrupts at once.

        number: of the request that asks a training to stop at a step boundary, the same on every rank.
        live: it is a live cell that is stopped; the training around it goes on.
        Returns the seconds that a training gets to reach that boundary, 0 without one; None: no such cell runs here.
        """
        # Posted in any case: the numbers of requests have no gap, or later ones would wait for the missing one.
        step_boundary.inbox.post(number, "nothing" if live else "stop", None)
        running = self._find(cell)
        if running is None:
            if live:
                self.withdrawn.add(cell)
            else:
                self.stop_call()  # the cell may wait behind it
            return None
        if running.asked:
            self._hurried.add(cell)
            return 0.0
        running.asked = True
        patience = 0.0 if live else step_boundary.patience()
        # A training that stands at a breakpoint goes on, to its boundary.
        if patience:
            self.runner.prompts.refuse(cell)
        threading.Thread(target=self._stop, args=(running, patience), name="nbkit-stop", daemon=True).start()
        return patience

    def release(self, cell: str, reason: str) -> None:
        """Another rank failed: end this rank's part of the cell too. reason: "rank 1 failed"."""
        running = self._find(cell)
        if running is None:
            return
        running.released = reason
        threading.Thread(target=self._release, args=(running, reason), name="nbkit-release", daemon=True).start()

    def stop_call(self) -> None:
        """The notebook does not wait any longer for what it has called here, such as a value that is sent."""
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
        """Return True if the training in the cell reaches a boundary in time, and the cell ends there.

        An interrupt within a step can cost the training: ranks that hold different parts of a model may then stand at
        different steps.
        """
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and running.request.id not in self._hurried:
            if running.ended.wait(TICK_SECONDS):
                return True
        self._hurried.discard(running.request.id)
        return False

    def _insist(self, running: Running) -> None:
        """User code may swallow one interrupt in a loop of its own; it rarely swallows twenty.

        A handler of its own for SIGINT, which may save something and end, is called some times before it is passed by.
        """
        for number in range(ROUNDS):
            if running.ended.wait(AGAIN_SECONDS):
                return
            self.runner.interrupt(running, insist=number >= HANDLED)

    def _find(self, cell: str) -> Running | None:
        return next((running for running in list(self.runner.running) if running.request.id == cell), None)
