"""The end of a rank with its cluster: a training is saved at its next step boundary, and the notebook reads what was.

Whoever ends it cannot wait for long, or is gone: the parent was killed, the controller is, or a batch system has sent
SIGTERM, to the parent or to all processes of the job. Without a controller nothing that a rank says reaches the
notebook, so it is written in the cluster's folder.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from nbkit.bridge.runner import Runner
from nbkit.rank.train.control import step_boundary
from nbkit.wire import cluster_end
from nbkit.wire.cluster_end import ClusterEnd

SEND_SECONDS = 0.5  # for the record of the last cell to leave this process


class Ending:
    """One per rank. loop: of the engine, in the main thread."""

    def __init__(self, runner: Runner, folder: Path, loop: Any) -> None:
        self.runner, self.folder, self._loop = runner, folder, loop
        self._began, self._pid = False, os.getpid()
        step_boundary.handlers["ended"] = lambda told: cluster_end.write(folder, ClusterEnd(*told))
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def begin(self, why: str, *, now: bool) -> None:
        """End when the cell that runs has; a training in it ends at its next boundary. From any thread.

        now: a cell that does not train is not waited for.
        """
        if self._began:
            return
        self._began = True
        trains = step_boundary.training() is not None
        if now and not trains:
            os._exit(1)
        if trains and cluster_end.read(self.folder) is None:
            cluster_end.write(self.folder, ClusterEnd(why))
        step_boundary.tell_to_end(why)
        threading.Thread(target=self._end, name="nbkit-end", daemon=True).start()

    def _end(self) -> None:
        for running in list(self.runner.running):
            running.ended.wait()
        self._loop.add_callback(self._loop.call_later, SEND_SECONDS, os._exit, 1)

    def _on_sigterm(self, number: int, _: object) -> None:
        if os.getpid() != self._pid:  # a fork of this rank, such as a pool's, which is told to end by itself
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self.begin("the ranks were told to end (SIGTERM)", now=True)
