"""The end of a rank with its cluster: a training is saved at its next step boundary, and the notebook reads what was.

Whoever ends it cannot wait for long, or is gone: the parent was killed, the controller is, or a batch system has sent
SIGTERM, to the parent or to all processes of the job. Without a controller nothing that a rank says reaches the
notebook, so it is written in the cluster's folder.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from nbkit.bridge.runner import Runner
from nbkit.rank.train.control import step_boundary
from nbkit.wire import cluster_end
from nbkit.wire.cluster_end import ClusterEnd, end_signals

PARENT_SECONDS = 1.0
SEND_SECONDS = 0.5  # for the record of the last cell to leave this process


class Ending:
    """One per rank. loop: of the engine, in the main thread."""

    def __init__(self, runner: Runner, folder: Path, loop: Any) -> None:
        self.runner, self.folder, self._loop = runner, folder, loop
        self._began, self._pid, self._why = False, os.getpid(), ""
        step_boundary.handlers["ended"] = self._training_ended
        self._signals = {signal.SIGTERM, *end_signals()}
        for number in self._signals:
            signal.signal(number, self._on_signal)
        self._masks = threading.local()  # of who forks
        os.register_at_fork(before=self._hold, after_in_parent=self._let_come, after_in_child=self._be_another)

    def end_training(self, why: str) -> None:
        """A training ends at its next boundary, and so does any later one; the rank lives on. From any thread.

        why: "": it need not end after all.
        """
        self._why = why
        step_boundary.tell_to_end(why)

    def begin(self, why: str, *, now: bool) -> None:
        """End when the cell that runs has; a training in it ends at its next boundary. From any thread.

        now: a cell that does not train is not waited for. Called again, with a reason that says more, it changes that.
        """
        self._why = why
        trains = step_boundary.training() is not None
        if now and not trains and not self._began:
            os._exit(1)
        if trains and cluster_end.read(self.folder) is None:
            cluster_end.write(self.folder, ClusterEnd(why))
        step_boundary.tell_to_end(why)
        if not self._began:
            self._began = True
            threading.Thread(target=self._end, name="nbkit-end", daemon=True).start()

    def _training_ended(self, told: tuple[str, int, str]) -> None:
        why, step, saved = told
        cluster_end.write(self.folder, ClusterEnd(why, step, saved))
        self.runner.link.send(event="training_ended", why=why, step=step, saved=saved)

    def _end(self) -> None:
        for running in list(self.runner.running):
            running.ended.wait()
        self._loop.add_callback(self._loop.call_later, SEND_SECONDS, os._exit, 1)

    # A fork of this rank, such as a pool's, ends by these signals as any process. Python forgets what comes to a fork
    # before it is ready, where a handler is set: until it has none they wait.

    def _hold(self) -> None:
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def _let_come(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _be_another(self) -> None:
        for number in self._signals:
            if signal.getsignal(number) == self._on_signal:  # or it is one that the fork, which forks again, has set
                signal.signal(number, signal.SIG_DFL)
        self._let_come()

    def _on_signal(self, number: int, _: object) -> None:
        # Elsewhere: a signal comes in the middle of anything, also of what this does.
        why = f"the ranks were told to end ({signal.Signals(number).name})"
        threading.Thread(target=self._begin_by_signal, args=(why,), name="nbkit-signal", daemon=True).start()

    def _begin_by_signal(self, why: str) -> None:
        if step_boundary.training() is None:
            # A batch system tells all processes at once. The parent ends this rank too; it would take an end that comes
            # before for a death.
            time.sleep(PARENT_SECONDS)
        self.begin(self._why or why, now=True)
