"""Lines that a person types in the notebook, for code on this rank that asks for one.

An engine has no standard input. The question goes over the channel of outputs, after everything that was printed; the
answer comes over the control channel, whose thread is free while the main thread waits here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from nbkit.wire.cells import Prompt, PromptKind


class NoPrompt(Exception):
    """Nobody answers. The text says why; it is empty where the cell is being stopped."""


class Prompts:
    """One per rank. publish: sends the notebook a message of nbkit's own. cell: gives the id of the cell that runs."""

    def __init__(self, rank: int, publish: Callable[[str, dict[str, Any]], None], cell: Callable[[], str]) -> None:
        self.rank, self._publish, self._cell = rank, publish, cell
        self.open: Prompt | None = None
        self._lines: SimpleQueue[str | NoPrompt] = SimpleQueue()
        self._turn = threading.Lock()  # threads of a cell ask one after the other
        self._number = 0
        self._refused: dict[str, str] = {}  # cell -> why nobody answers in it

    def ask(self, kind: PromptKind, where: str) -> str:
        """The next line that a person types. Raises NoPrompt, and KeyboardInterrupt when the cell is stopped."""
        cell = self._cell()
        with self._turn:
            if cell in self._refused:
                raise NoPrompt(self._refused[cell])
            while not self._lines.empty():  # an answer to a question that an interrupt has ended
                self._lines.get()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._number += 1
            self.open = Prompt(cell, self.rank, self._number, kind, where)
            try:
                self._publish("nbkit_prompt", asdict(self.open))
                line = self._lines.get()
            finally:
                self.open = None
        if isinstance(line, NoPrompt):
            raise line
        return line

    def answer(self, number: int, line: str) -> None:
        """From the notebook: what was typed at question `number`."""
        if self.open is not None and self.open.number == number:
            self._lines.put(line)

    def refuse(self, cell: str, why: str = "") -> None:
        """No question of `cell` is answered any more, the open one neither. why: shown; "" while it is stopped."""
        self._refused = {cell: why}
        if self.open is not None and self.open.cell == cell:
            self._lines.put(NoPrompt(why))
