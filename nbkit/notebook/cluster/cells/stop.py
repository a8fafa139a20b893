"""Stop a cell from the notebook, in steps that become stronger: the rungs of a ladder.

The user sees each rung. The next rung begins only after the previous one has had its time.

1. Every rank is asked to stop, over a channel that works while its main thread is busy. A training stops at a step
   boundary, and gets the time of some steps to reach one. A press during this time interrupts it within the step.
2. A rank that has not answered after ANSWER_SECONDS holds the interpreter lock, or is suspended. It gets a SIGINT from
   outside, as a plain kernel does from the stop button.
3. PATIENCE_SECONDS later a warning says which ranks have not ended, since when, what they do, and what another press
   does. Until then no press ends a rank; it is answered with the time that is left to wait.
4. A press after the warning has been on screen for READ_SECONDS ends the ranks that it names; their variables are lost.
5. A press after that stops waiting: the notebook's cell ends in any case.

Without a press no rank is ended: a long C call looks like a stuck rank, and only the user can tell them apart.
`--timeout` is the exception: there may be nobody to press, and Run All would wait for ever. Then the ranks are ended
END_AFTER_SECONDS after the warning, which says so.

The ladder belongs to the cell: stopping a cell that is being stopped (the stop button, handle.stop(), the panel) counts
as another press. Every waiter drives it: `tick()` is called about 20 times a second until the cell is over.

This module also inspects, interrupts and ends the process of a rank that does not answer.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

import psutil

from nbkit.errors import CellStopped
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.output import display
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.wire import interrupts
from nbkit.wire.cells import ranks_named, ranks_text
from nbkit.wire.messages import EndRank, InterruptRank

_ALONE = "in code that lets no other Python of its process run (a C call)"
_DOES = {
    psutil.STATUS_RUNNING: f"it computes {_ALONE}",
    psutil.STATUS_SLEEPING: f"it waits {_ALONE}",
    psutil.STATUS_DISK_SLEEP: "it waits for a disk or a driver",
    psutil.STATUS_STOPPED: "it is suspended (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "a debugger holds it",
}


def interrupt(entry: ClusterEntry, client: Client, rank: int, cell: str, through: int | None) -> bool:
    """Send SIGINT to a rank, for this cell. Return False if the rank cannot be reached.

    through: a rank that answers. It passes the signal on if `rank` may be on another host.
    """
    if _is_beside(entry):
        interrupts.send(entry.folder / "output", rank, cell, entry.ranks[rank].end)
        return True
    if through is not None:
        client.request([through], InterruptRank(rank, cell))
    return through is not None


def end(entry: ClusterEntry, client: Client, rank: int) -> None:
    """End one rank's process at once."""
    if _is_beside(entry):
        entry.ranks[rank].end(signal.SIGKILL, group=True)
        return
    others = [other for other in range(entry.n) if other != rank]
    client.request(others, EndRank(rank))  # one rank that answers is enough


def activity(entry: ClusterEntry, rank: int) -> str:
    """Return the state of a rank's process in words, such as "it is suspended (SIGSTOP)"; "" if it is not known."""
    process = entry.ranks[rank]
    if not _is_beside(entry) or not process.is_alive():
        return ""
    try:
        return _DOES.get(psutil.Process(process.pid).status(), "")
    except psutil.Error:
        return ""


def _is_beside(entry: ClusterEntry) -> bool:
    """Return True if all ranks are processes of this host."""
    return entry.is_here and not entry.is_spread


ANSWER_SECONDS = 2.0  # a free interpreter answers in milliseconds, or in hundreds of them on a crowded core
PATIENCE_SECONDS = 3.0
READ_SECONDS = 2.0
END_AFTER_SECONDS = 30.0
DYING_SECONDS = 1.0  # a killed process is gone, and reported, in less
LONG_STEP_SECONDS = 2.0  # the user is told if a training may take longer to reach a boundary
FLOOD_SECONDS = 1.0  # for output still on its way when all ranks have ended the cell
UNSEEN_SECONDS = 5.0  # a warning that is not on screen by then will not appear
LIVE_PATIENCE_SECONDS = 1.5


def begin_stop(
    entry: ClusterEntry,
    client: Client,
    execution: Execution,
    timeout: float | None = None,
    *,
    end_after: float | None = None,
) -> Stop:
    """Ask the ranks to stop, or count as a press if the cell is already being stopped. The caller then calls `tick()`.

    timeout: the seconds of --timeout, if that is the reason. end_after: see Stop.
    """
    end_after = end_after if timeout is None else END_AFTER_SECONDS
    if execution.stop is None:
        reason = "stopped" if timeout is None else f"stopped after {timeout:g} s (--timeout)"
        execution.stop = Stop(entry, client, execution, reason, end_after)
    else:
        if timeout is None:
            execution.stop.press()
        if not execution.stop.warned:  # a warning that was shown must stay true
            execution.stop.end_after = execution.stop.end_after or end_after
    if threading.current_thread() is threading.main_thread():  # other threads have no cell of their own
        execution.stop.show_on(display.here())
    return execution.stop


class Stop:
    """A single stop of one cell.

    end_after: seconds from the warning until the ranks that it names are ended without another press; None: never.
    """

    def __init__(
        self, entry: ClusterEntry, client: Client, execution: Execution, reason: str, end_after: float | None
    ) -> None:
        self.entry, self.client, self.execution, self.end_after = entry, client, execution, end_after
        execution.reason = reason
        self.began = time.monotonic()
        self.replies = execution.stop_ranks()
        self.last_rung = self.began
        self.interrupted: list[int] = []
        self.long_since = 0.0  # when the user was told that the step takes long
        self.hurried = False  # the training is no longer waited for
        self.warned: list[int] = []
        self.warned_at = 0.0
        self.shown_at = 0.0  # when the warning was on screen
        self.ended: list[int] = []
        self.ended_at = 0.0
        self.free_at = 0.0  # since when every rank has ended the cell
        self.presses = 0
        self.given_back = False  # the notebook's cell ends although ranks have not
        self.answered_presses: set[str] = set()
        self.screens = [execution.outbox.screen]
        self.words = ""  # the last shown message
        self.lock = threading.Lock()

    def press(self) -> None:
        """Record a press of the user; the next tick acts on it."""
        self.presses += 1

    def show_on(self, screen: display.Screen) -> None:
        """Show the messages of this stop on `screen` too."""
        if not any(display.same_place(screen, other) for other in self.screens):
            self.screens.append(screen)

    def tick(self) -> None:
        """Advance on the ladder if it is time. Raises CellStopped at the last rung, which ends the notebook's cell."""
        if not self.lock.acquire(blocking=False):
            return  # another waiter of the cell does it
        try:
            if self.given_back:
                self._give_back()
            pressed, self.presses = self.presses > 0, 0
            now = time.monotonic()
            if waiting := self.execution.waiting_for:
                self._climb(waiting, pressed, now)
                self.free_at = 0.0
            elif not self.free_at:
                self.free_at = now
            elif now - self.free_at > FLOOD_SECONDS:
                self.free_at = now
                self.client.soon(self.execution.guard, "a stop", None, self.execution.give_up_output)
        finally:
            self.lock.release()

    def _climb(self, waiting: list[int], pressed: bool, now: float) -> None:
        unheard = [rank for rank in self._silent(waiting) if rank not in self.interrupted]
        if unheard and now - self.began > ANSWER_SECONDS:
            self._interrupt(unheard, now)
        elif self.execution.live:
            # Ranks that have begun end by themselves. The others will not begin, so no process is ended.
            if not unheard and (pressed or now - self.last_rung > LIVE_PATIENCE_SECONDS):
                self.client.soon(self.execution.withdraw)
        elif now < (boundary := self.began + self._patience()):
            self._await_boundary(boundary - now, pressed, now)
        elif not self.warned:
            if now - max(self.last_rung, boundary) > PATIENCE_SECONDS:
                self._warn(waiting, now)
            elif pressed:
                self._explain_wait(
                    "asked", f"who has not ended {self._until_warning(now):.0f} s from now is named here"
                )
        elif not self.ended:
            self._end_or_wait(waiting, pressed, now)
        elif pressed and now - self.ended_at > DYING_SECONDS:
            self._give_back()
        elif self.end_after is not None and now - self.ended_at > self.end_after:
            self._give_back()

    def _patience(self) -> float:
        """Return the seconds that a training gets to reach a step boundary; 0 without a training."""
        if self.hurried:
            return 0.0
        answers = [
            reply.result()["content"] for reply in self.replies.values() if reply.done() and not reply.exception()
        ]
        return max((answer.get("patience", 0.0) for answer in answers), default=0.0)

    def _await_boundary(self, left: float, pressed: bool, now: float) -> None:
        """Let the training finish its step. Once the user knows what a press does, a press interrupts the step."""
        if not self.long_since and left > LONG_STEP_SECONDS:
            self.long_since = now
            self._tell(
                f"The training stops after the current step, which may take {left:.0f} s. Press stop again after "
                f"{READ_SECONDS:.0f} s to interrupt the step. Then the steps since the last checkpoint may be lost."
            )
        elif pressed and self.long_since and now - self.long_since > READ_SECONDS:
            self.execution.stop_ranks()
            self.hurried, self.last_rung = True, now
            self._tell("The training is interrupted within its step.")
        elif pressed:
            self._explain_wait("asked", "the training stops after the current step")

    def _interrupt(self, ranks: list[int], now: float) -> None:
        through = next((rank for rank, reply in self.replies.items() if reply.done() and not reply.exception()), None)
        reached = [
            rank for rank in ranks if interrupt(self.entry, self.client, rank, self.execution.request.id, through)
        ]
        self.interrupted += ranks
        self.last_rung = now
        if reached:
            self._tell(
                f"{ranks_named(reached)} {_have(reached)} not answered for {now - self.began:.0f} s and "
                f"{_are(reached)} interrupted from outside now (SIGINT), as a plain kernel is."
            )

    def _warn(self, waiting: list[int], now: float) -> None:
        self.warned, self.warned_at = waiting, now
        lines = [f"{ranks_named(waiting)} {_have(waiting)} not ended, {now - self.began:.0f} s after the stop."]
        silent = self._silent(waiting)
        doing = {rank: activity(self.entry, rank) for rank in silent}
        for what in dict.fromkeys(doing.values()):
            same = [rank for rank in silent if doing[rank] == what]
            how = "answers" if len(same) == 1 else "answer"
            lines.append(f"{ranks_named(same)} {how} neither the request nor SIGINT{what and ': '}{what}.")
        if stubborn := [rank for rank in waiting if rank not in silent]:
            lines.append(
                f"{ranks_named(stubborn)} {_have(stubborn)} the stop, in code that goes on: a long C call, or it "
                "catches the interrupt."
            )
        if self.end_after is None:
            lines.append(f"Wait, or press stop again, {READ_SECONDS:.0f} s from now or later:")
        else:
            lines.append(f"If not over {self.end_after:.0f} s from now, or when you press stop:")
        lines.append(f"that ends {ranks_named(waiting).lower()}, and {_their(waiting)} variables are lost.")
        self._tell(" ".join(lines), warning=True)

    def _end_or_wait(self, waiting: list[int], pressed: bool, now: float) -> None:
        if not self.shown_at:
            if pressed and now - self.warned_at > UNSEEN_SECONDS:
                self._give_back()
            return
        stood = now - self.shown_at
        if (pressed and stood > READ_SECONDS) or (self.end_after is not None and stood > self.end_after):
            self.ended, self.ended_at = waiting, now
            self._tell(f"{ranks_named(waiting)} {_are(waiting)} ended now; {_their(waiting)} variables are lost.")
            for rank in waiting:
                if rank in self.execution.waiting_for:  # it may end by itself at the last moment
                    end(self.entry, self.client, rank)
        elif pressed:
            self._explain_wait("warned", f"a press {READ_SECONDS - stood:.1f} s from now or later ends them")

    def _explain_wait(self, rung: str, until: str) -> None:
        """Say once per rung why a press changes nothing yet."""
        if rung not in self.answered_presses:
            self.answered_presses.add(rung)
            self._tell(f"Stop is under way, and nobody is ended yet: {until}.")

    def _until_warning(self, now: float) -> float:
        ranks_answer = not self._silent(self.execution.waiting_for)
        rung = max(self.last_rung, self.began + self._patience())
        if not (ranks_answer or self.interrupted):
            rung = self.began + ANSWER_SECONDS
        return max(1.0, rung + PATIENCE_SECONDS - now)

    def _silent(self, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if not (rank in self.replies and self.replies[rank].done())]

    def _give_back(self) -> None:
        self.given_back = True
        raise CellStopped(
            f"stopped waiting; {self.execution.describe()} has not ended. "
            "→ %train wait   or   %cluster restart (variables are lost)"
        )

    def _tell(self, text: str, *, warning: bool = False) -> None:
        self.words = text
        self.client.soon(self._show, text, warning)

    def _show(self, text: str, warning: bool) -> None:
        """Show the text at once, even if a flood of output is still queued. Runs on the client's thread."""
        for name, wiped in self.execution.lines.make_way():
            self.execution.outbox.stream(name, wiped)
        for screen in self.screens:
            try:
                screen.stream("stderr", f"{text}\n")
            except Exception:  # the screen is gone, so the warning does not count as read
                continue
            if warning:
                self.shown_at = time.monotonic()

    def summary(self) -> str:
        """Return a sentence about the stop, for the error that ends the cell."""
        seconds = time.monotonic() - self.began
        text = (
            f"{self.execution.reason}; ranks {ranks_text(self.execution.request.ranks)} were free after {seconds:.1f} s"
        )
        if self.ended:
            return f"{text}. {ranks_named(self.ended)} had to be ended. → %cluster restart"
        return f"{text}, variables live on"


class Presses:
    """Handle the stop button during a wait for a cell. The first press interrupts as usual; later presses go to `stop`.

    stop: None until the first press has begun a Stop.
    """

    def __init__(self, stop: Stop | None = None) -> None:
        self.stop = stop
        self.interrupted = False

    def __enter__(self) -> Presses:
        self.before = signal.getsignal(signal.SIGINT)
        self.taken = callable(self.before) and threading.current_thread() is threading.main_thread()
        if self.taken:
            signal.signal(signal.SIGINT, self._pressed)
        return self

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self.stop is not None:
            self.stop.press()
        elif not self.interrupted and callable(self.before):  # a second press must not interrupt the first request
            self.interrupted = True
            self.before(number, frame)
            self.interrupted = False

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self.taken:
            signal.signal(signal.SIGINT, self.before)


def _have(ranks: list[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _are(ranks: list[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def _their(ranks: list[int]) -> str:
    return "their" if len(ranks) > 1 else "its"
