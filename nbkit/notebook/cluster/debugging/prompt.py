"""Let a person answer the prompts of a cell's ranks. One rank's pdb gets lines at a time, while the others wait.

`input()` reads the lines; Jupyter passes it to the front end of the running cell. It blocks the main thread, so it must
be interrupted when the cell ends, and by Stop, whichever interrupt handler the kernel has.
"""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import Future
from types import FrameType
from typing import Any

from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.wire.cells import CellRequest, Prompt, ranks_text
from nbkit.wire.messages import AnswerPrompt, RefusePrompts

LEAVING = frozenset({"q", "quit", "exit", "EOF"})  # commands that end a program under pdb
SAME_RANK_SECONDS = 1.0  # how long the answered rank may take to ask again before another rank is next
TICK_SECONDS = 0.02
COMMANDS = "p w u d l n s c, as in pdb; q stops the cell"
COMMANDS_AFTER = "p w u d l, as in pdb; q ends it"


class PromptTalk:
    """The prompts of one cell. rank: the rank to answer first; None: the lowest rank that asks."""

    def __init__(self, client: Client, execution: Execution, rank: int | None = None) -> None:
        self.client, self.execution, self.rank = client, execution, rank
        self._why_not = ""
        self._reading = self._pressed = False
        self._lock = threading.Lock()

    def answer_all(self) -> bool:
        """Answer prompts until no rank asks. Return True if the person wants to stop the cell. Main thread only.

        If nobody can type, tell the ranks, which then go on.
        """
        if threading.current_thread() is not threading.main_thread():
            self._refuse("the cell was run from a thread, and input() belongs to the main one")
            return False
        before = signal.signal(signal.SIGINT, self._on_sigint)
        self.execution.done.add_done_callback(self._on_end)
        try:
            while (prompt := self._next()) is not None:
                if self._answer(prompt) or self._pressed:
                    return not self.execution.done.done()
            return self._pressed and not self.execution.done.done()
        finally:
            signal.signal(signal.SIGINT, before)

    def _next(self) -> Prompt | None:
        """Return the prompt to answer next. The rank that was answered last is preferred if it asks again soon."""
        deadline = time.monotonic() + SAME_RANK_SECONDS
        while time.monotonic() < deadline and not (self.execution.done.done() or self._pressed):
            asking = dict(self.execution.prompts)
            if self.rank in asking or (asking and self.rank is None):
                break
            if self.rank is not None and self.rank not in self.execution.waiting_for:
                self.rank = None
            else:
                time.sleep(TICK_SECONDS)
        asking = {} if self.execution.done.done() else dict(self.execution.prompts)
        return asking.get(min(asking) if self.rank not in asking else self.rank) if asking else None  # type: ignore[arg-type]

    def _answer(self, prompt: Prompt) -> bool:
        """Read a line for a prompt and send it. Return True if it stops the cell."""
        line = self._read(self._words(prompt))
        if line is None:
            if not (self._pressed or self.execution.done.done()):
                self._refuse(self._why_not)
            return False
        word, _, rest = line.strip().partition(" ")
        if word == "rank" and rest.strip().isdigit():
            self._turn_to(int(rest))
        elif word == "all" and rest.strip() and not rest.lstrip().startswith("("):
            for each in dict(self.execution.prompts).values():
                self._send(each, rest.strip())
        elif word in LEAVING and prompt.kind == "breakpoint":
            return True
        else:
            self.rank = None if word in ("c", "cont", "continue") else prompt.rank
            self._send(prompt, line)
        return False

    def _refuse(self, why: str) -> None:
        """Tell the ranks that nobody can type here."""
        self.execution.unanswered = why
        self.execution.prompts.clear()
        self.client.request(self.execution.request.ranks, RefusePrompts(self.execution.request.id, why))

    def _turn_to(self, rank: int) -> None:
        if rank in self.execution.prompts:
            self.rank = rank
        else:
            asking = ranks_text(list(self.execution.prompts))
            self.client.soon(self.execution.say, f"Rank {rank} is at no prompt; asking: {asking}.")

    def _send(self, prompt: Prompt, line: str) -> None:
        self.execution.prompts.pop(prompt.rank, None)
        self.client.request([prompt.rank], AnswerPrompt(prompt.number, line))

    def _words(self, prompt: Prompt) -> str:
        others = [rank for rank in self.execution.prompts if rank != prompt.rank]
        beside = f"; {ranks_text(others)} too" if others else ""
        return f"(Pdb rank {prompt.rank}{beside}) "

    def _read(self, words: str) -> str | None:
        """Return a line, or None if Stop was pressed, the cell has ended, or nobody can type here."""
        try:
            with self._lock:
                self._reading = not self.execution.done.done()
            return input(words) if self._reading else None
        except KeyboardInterrupt:
            return None
        except (EOFError, OSError) as error:  # standard input is closed or at its end
            self._why_not = f"standard input has ended ({type(error).__name__})"
        except NotImplementedError:  # StdinNotImplementedError under papermill, nbconvert and similar programs
            self._why_not = "this notebook runs without a keyboard"
        finally:
            with self._lock:
                self._reading = False
        return None

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        if not self.execution.done.done():
            self._pressed = True
        if self._reading:
            raise KeyboardInterrupt

    def _on_end(self, _: Future[Any]) -> None:
        """Stop waiting for a line, because the cell has ended. Can be called from any thread."""
        with self._lock:
            if self._reading and (main := threading.main_thread().ident) is not None:
                signal.pthread_kill(main, signal.SIGINT)


def announced(prompt: Prompt, request: CellRequest) -> str:
    """Return the text to show when a rank of the cell asks for the first time."""
    if prompt.kind == "post-mortem":
        return COMMANDS_AFTER[:1].upper() + COMMANDS_AFTER[1:] + "."
    at = f"Rank {prompt.rank} is at a breakpoint, {prompt.where}"
    if request.detached:  # the notebook does not wait for the cell
        return f"{at}, and the ranks that need it wait. → %nbkit debug {prompt.rank}"
    return f"{at}. {COMMANDS}; `rank 1` turns to another rank that asks, `all c` answers all of them."
