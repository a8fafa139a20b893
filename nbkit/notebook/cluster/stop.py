"""The user's side of Stop: ask every rank, see who answers, tell what happens, end what answers to nothing.

Driven by whoever waits for the cell: `tick()` is called about 20 times a second until the cell is over.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from nbkit.cells import ranks_text
from nbkit.errors import CellStopped
from nbkit.notebook.cluster.running import Running

PATIENCE_SECONDS = 5.0
LIVE_PATIENCE_SECONDS = 1.5


class Stop:
    """One stop of one cell.

    ask: send the stop to these ranks, returns futures of their replies. end: end a rank's process.
    """

    def __init__(
        self,
        running: Running,
        ask: Callable[[list[int]], dict[int, Any]],
        end: Callable[[int], None],
        reason: str = "stopped",
    ) -> None:
        self.running, self.end_rank = running, end
        running.reason = reason
        self.began = time.monotonic()
        self.replies = ask(list(running.request.ranks))
        self.told = False
        self.ended: list[int] = []

    def tick(self, pressed: int = 0) -> None:
        """Go on with the ladder. pressed: how often the user has pressed stop since then.

        Raises CellStopped at the third press: whatever is wrong, the notebook itself is given back.
        """
        if pressed > 1:
            raise CellStopped(f"stopped waiting; {self.running.describe()} has not ended. → %cluster restart")
        pressed_again = pressed > 0
        waiting = self.running.waiting_for
        if self.running.live:
            # Ranks that have begun end by themselves; one that has not will not begin, and none is ended for it.
            if pressed_again or time.monotonic() - self.began > LIVE_PATIENCE_SECONDS:
                self.running.withdraw()
            return
        if not waiting or not (pressed_again or time.monotonic() - self.began > PATIENCE_SECONDS):
            return
        silent = [rank for rank in waiting if not (rank in self.replies and self.replies[rank].done())]
        for rank in waiting if pressed_again else silent:
            if rank not in self.ended:
                self.ended.append(rank)
                self.running.say(f"Rank {rank} does not answer and is ended now; its variables are lost.")
                self.end_rank(rank)
        stubborn = [rank for rank in waiting if rank not in self.ended]
        if stubborn and not self.told:
            self.told = True
            self.running.say(
                f"Ranks {ranks_text(stubborn)} have the stop but are in code that does not end yet. "
                "Wait, or press stop again to end them (their variables are lost)."
            )

    def summary(self) -> str:
        """How it went, for the error that ends the cell."""
        seconds = time.monotonic() - self.began
        text = f"{self.running.reason}; ranks {ranks_text(self.running.request.ranks)} were free after {seconds:.1f} s"
        if self.ended:
            return f"{text}. Ranks {ranks_text(self.ended)} had to be ended. → %cluster restart"
        return f"{text}, variables live on"


class Presses:
    """Counts presses of the stop button while a stop is under way, instead of letting them break the wait."""

    def __enter__(self) -> Presses:
        self.count = 0
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self.main:
            signal.signal(signal.SIGINT, self.before)
