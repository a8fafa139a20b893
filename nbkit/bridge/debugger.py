"""The debugger of a rank: pdb for `breakpoint()`, and for the frames of the cell that failed last.

The frames of a failed cell are kept until the next cell begins. pdb shows only the frames of the cell and of the code
that it calls.

An engine has no standard input, so pdb gets its lines from the notebook. The prompt goes over the output channel,
after everything that was printed. The answer comes over the control channel, whose thread is free while the main
thread waits here.
"""

from __future__ import annotations

import os
import pdb
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FrameType, TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from IPython.core.debugger import OldPdb  # Python's own Pdb: ipykernel replaces the one in the module pdb

from nbkit.wire.cells import Prompt, PromptKind
from nbkit.wire.messages import ForNotebook, PromptOpened


class NoPrompt(Exception):
    """Raised when nobody answers a prompt. The text says why; it is empty if the cell is being stopped."""


class Prompts:
    """The prompts of one rank. There is one object per rank.

    publish: a function that sends the notebook a message of nbkit. cell: a function that returns the running cell's id.
    """

    def __init__(self, rank: int, publish: Callable[[ForNotebook], None], cell: Callable[[], str]) -> None:
        self.rank, self._publish, self._cell = rank, publish, cell
        self.open: Prompt | None = None
        self._lines: SimpleQueue[str | NoPrompt] = SimpleQueue()
        self._turn = threading.Lock()  # only one thread of a cell may have a prompt at a time
        self._number = 0
        self._refused: dict[str, str] = {}  # cell -> why its prompts are refused

    def ask(self, kind: PromptKind, where: str) -> str:
        """Return the next line that a person types. Raises NoPrompt, and KeyboardInterrupt when the cell is stopped."""
        cell = self._cell()
        with self._turn:
            if cell in self._refused:
                raise NoPrompt(self._refused[cell])
            while not self._lines.empty():  # an answer to an earlier prompt, which an interrupt has ended
                self._lines.get()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._number += 1
            self.open = Prompt(cell, self.rank, self._number, kind, where)
            try:
                self._publish(PromptOpened(self.open))
                line = self._lines.get()
            finally:
                self.open = None
        if isinstance(line, NoPrompt):
            raise line
        return line

    def answer(self, number: int, line: str) -> None:
        """Take the line that was typed in the notebook at prompt `number`."""
        if self.open is not None and self.open.number == number:
            self._lines.put(line)

    def refuse(self, cell: str, why: str = "") -> None:
        """Refuse the open prompt of `cell`, and all later ones. why: shown to the user; "" if the cell is stopped."""
        self._refused = {cell: why}
        if self.open is not None and self.open.cell == cell:
            self._lines.put(NoPrompt(why))


class Cells(Protocol):
    """The part of `Shell` that tells which code belongs to a cell."""

    @property
    def cells(self) -> dict[str, int]: ...

    def is_cell(self, frame: FrameType) -> bool: ...


class RankPdb(OldPdb):  # type: ignore[misc]
    """A pdb session for one stop in the code of a cell, or for one traceback.

    outermost: the code that runs cells. Frames below it on the stack do not belong to the cell.
    """

    def __init__(self, prompts: Prompts, own: Cells, outermost: CodeType, kind: PromptKind) -> None:
        super().__init__(stdin=weakref.proxy(self), stdout=sys.stdout, nosigint=True, readrc=False)
        self.prompt = ""  # the notebook shows its own prompt beside the input field
        self.prompts, self.own, self.outermost, self.kind = prompts, own, outermost, kind
        self.in_cell = True

    def stop_at(self, frame: FrameType) -> None:
        """Ask for commands in the running frame `frame`, and trace the code that follows as the commands say."""
        self.in_cell = any(self.own.is_cell(each) for each in _outwards(frame))  # not in every thread of a cell
        self.reset()
        for each in _outwards(frame):
            each.f_trace = self.trace_dispatch
            self.botframe = each
        self.set_step()
        self.interaction(frame, None)
        # Tracing starts last: it must not stop in the prompt's own code.
        if self.stoplineno != -1 or self.breaks:
            sys.settrace(self.trace_dispatch)

    def look_at(self, traceback: TracebackType) -> None:
        """Ask for commands in the frames of an error. Returns when the person leaves."""
        self.reset()
        self.interaction(None, traceback)

    def let_go(self) -> None:
        """Remove all stops, and drop all frames."""
        self.reset()

    # Overrides of pdb ---------------------------------------------------------------------------------------------

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's own method would catch an interrupt and ask again; here an interrupt ends the cell

    def forget(self) -> None:
        super().forget()
        self.__dict__.pop("curframe_locals", None)  # it keeps the variables of a frame, and so its tensors, alive

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        stack, index = super().get_stack(f, t)
        first = next((at for at, (frame, _) in enumerate(stack) if self.own.is_cell(frame)), 0)
        return stack[first:], max(0, index - first)

    def stop_here(self, frame: FrameType) -> bool:
        return bool(super().stop_here(frame)) and self._is_of_cell(frame)

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        # IPython runs each statement of a cell as a module of its own. pdb must not stop where each of them begins.
        if not (self.own.is_cell(frame) and frame.f_code.co_name == "<module>"):
            super().user_call(frame, argument_list)

    def _is_of_cell(self, frame: FrameType) -> bool:
        """Return True for code of a cell and code that it calls, False for IPython's code between two statements."""
        if not self.in_cell:
            return True
        for each in _outwards(frame):
            if self.own.is_cell(each):
                return True
            if each.f_code is self.outermost:
                return False
        return False

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        text: str = super().format_stack_entry(frame_lineno, lprefix)
        file = frame_lineno[0].f_code.co_filename
        number = self.own.cells.get(file)
        return text if number is None else text.replace(self.canonic(file), f"cell {number} ", 1)

    def do_interact(self, arg: str) -> None:
        self.error("interact has no keyboard here; a line that is no command is run as Python, as at !")

    # Input --------------------------------------------------------------------------------------------------------

    def readline(self) -> str:
        """Return the command that a person has typed. Returns "continue" if nobody can type, so that the cell goes on.

        pdb reads from this object as from a file.
        """
        try:
            return self.prompts.ask(self.kind, self._where()) + "\n"
        except NoPrompt as nobody:
            if (why := str(nobody)) and self.kind == "breakpoint":
                self.message(f"No prompt is possible at {self._where()}: {why}. The cell goes on.")
            self.clear_all_breaks()
            return "continue\n"

    def _where(self) -> str:
        if self.curframe is None:
            return ""
        file, line = self.curframe.f_code.co_filename, self.stack[self.curindex][1]
        number = self.own.cells.get(file)
        return f"{Path(file).name} line {line}" if number is None else f"cell {number} line {line}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


FRAMES_KEPT = 200  # the innermost ones; an endless recursion has thousands


@dataclass(frozen=True)
class FailedCell:
    """The error and the frames of a cell that failed. moment: as time.time(). The frames keep their variables alive."""

    number: int
    error: str
    moment: float
    traceback: TracebackType


class Debugger:
    """The debugger of a rank. There is one per rank. outermost: the code that runs cells."""

    def __init__(self, prompts: Prompts, own: Cells, outermost: CodeType) -> None:
        self.prompts, self.own, self.outermost = prompts, own, outermost
        self.failed: FailedCell | None = None
        self._process = os.getpid()
        self._passed: dict[tuple[CodeType, int], int] = {}  # (code, line) -> calls of torch.distributed.breakpoint

    def install(self) -> None:
        """Let `breakpoint()`, `pdb.set_trace()` and `torch.distributed.breakpoint()` ask in the notebook."""
        sys.breakpointhook = self.set_trace
        pdb.set_trace = self.set_trace
        dist.breakpoint = self.breakpoint_of_one

    def set_trace(self, *, header: str | None = None, **_: Any) -> None:
        """Stop at a `breakpoint()`, which calls this. PYTHONBREAKPOINT=0 turns all of them off, as in Python."""
        if os.environ.get("PYTHONBREAKPOINT") == "0":
            return
        if os.getpid() != self._process:
            print("breakpoint(): a process that a rank has started has no prompt, and goes on", file=sys.stderr)
            return
        if header:
            print(header)
        RankPdb(self.prompts, self.own, self.outermost, "breakpoint").stop_at(sys._getframe(1))

    def breakpoint_of_one(self, rank: int = 0, skip: int = 0, timeout_s: int | None = None) -> None:
        """Replace torch.distributed.breakpoint: `rank` has a prompt, the others wait. timeout_s has no effect."""
        if os.environ.get("PYTHONBREAKPOINT") == "0":
            return
        frame = sys._getframe(1)
        key = frame.f_code, frame.f_lineno
        self._passed[key] = self._passed.get(key, 0) + 1
        if self._passed[key] <= skip:
            return
        if dist.get_rank() == rank:
            RankPdb(self.prompts, self.own, self.outermost, "breakpoint").stop_at(frame)
        dist.barrier()

    def begin(self) -> None:
        """Drop the frames of the failed cell, and with them its tensors. Called when a cell begins."""
        self.failed = None
        self._passed.clear()

    def end(self) -> None:
        """Stop tracing. Called when a cell, or a live cell within it, has ended, so nothing is left to step through."""
        tracing = getattr(sys.gettrace(), "__self__", None)
        if isinstance(tracing, RankPdb):
            sys.settrace(None)
            tracing.let_go()

    def keep(self, number: int, error: str, moment: float, traceback: TracebackType | None) -> None:
        """Keep the frames of a cell that has failed, from the cell's own code inwards."""
        while traceback is not None and not self.own.is_cell(traceback.tb_frame):
            traceback = traceback.tb_next
        steps = []
        while traceback is not None:
            steps.append(traceback)
            traceback = traceback.tb_next
        kept = None
        for step in reversed([*steps[:1], *steps[1:][-FRAMES_KEPT:]]):
            kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
        if kept is not None:
            self.failed = FailedCell(number, error, moment, kept)

    def post_mortem(self) -> None:
        """Ask for commands in the frames that are kept. Raises LookupError if there are none."""
        if self.failed is None:
            raise LookupError("no frames of a failed cell are kept on this rank")
        assert threading.current_thread() is threading.main_thread()
        print(f"{self.failed.error} (cell {self.failed.number})")
        RankPdb(self.prompts, self.own, self.outermost, "post-mortem").look_at(self.failed.traceback)
