"""End a cell from outside: because the user stops it, or because another rank failed first.

SIGINT ends Python code; it cannot end a wait inside gloo or NCCL, so a rank that is still in its cell shortly
after is broken out of its collectives, which costs this generation of the world. Both come from a thread,
because the main thread is the one that is stuck.
"""

from __future__ import annotations

import threading

from nbkit.bridge.runner import Runner, Running
from nbkit.rank.train.control import step_boundary
from nbkit.rank.world import watchdog

COOPERATE_SECONDS = 0.7  # a training gets this long to reach its next step boundary
SIGINT_SECONDS = 0.15  # Python code needs less than that; what needs more is waiting in C
AGAIN_SECONDS = 0.5
ROUNDS = 20


class Stopping:
    """One per rank. Every call returns at once; the work is done in a thread."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.withdrawn: set[str] = set()  # live cells whose stop came before they began

    def stop(self, cell: str, number: int, live: bool = False) -> bool:
        """The user's Stop. False: the cell does not run here.

        number: of the request that asks a training to stop at a step boundary, the same on every rank.
        live: it is a live cell that is stopped; the training around it goes on.
        """
        # Posted in any case: the numbers of requests have no gap, or later ones would wait for the missing one.
        step_boundary.inbox.post(number, "nothing" if live else "stop", None)
        running = self._find(cell)
        if running is None:
            if live:
                self.withdrawn.add(cell)
            return False
        threading.Thread(target=self._stop, args=(running, live), name="nbkit-stop", daemon=True).start()
        return True

    def release(self, cell: str, reason: str) -> None:
        """Another rank failed: end this rank's part of the cell too. reason: "rank 1 failed"."""
        running = self._find(cell)
        if running is None:
            return
        running.released = reason
        threading.Thread(target=self._release, args=(running, reason), name="nbkit-release", daemon=True).start()

    def _stop(self, running: Running, live: bool) -> None:
        if not live and step_boundary.training() is not None and running.ended.wait(COOPERATE_SECONDS):
            return
        running.stopped = True
        self.runner.interrupt(running)
        if not running.ended.wait(SIGINT_SECONDS) and self.runner.in_user_code:
            watchdog.break_out("the cell was stopped while it waited")
        self._insist(running)

    def _release(self, running: Running, reason: str) -> None:
        watchdog.break_out(reason)
        if not running.ended.wait(SIGINT_SECONDS):
            self.runner.interrupt(running)
            self._insist(running)

    def _insist(self, running: Running) -> None:
        """User code may swallow one interrupt in a loop of its own; it rarely swallows twenty."""
        for _ in range(ROUNDS):
            if running.ended.wait(AGAIN_SECONDS):
                return
            self.runner.interrupt(running)

    def _find(self, cell: str) -> Running | None:
        return next((running for running in list(self.runner.running) if running.request.id == cell), None)
