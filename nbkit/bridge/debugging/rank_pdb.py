"""pdb on a rank: its lines come from the notebook, and its frames are those of the cell and of what the cell calls."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Protocol

from IPython.core.debugger import OldPdb  # Python's own: ipykernel puts another one into the module pdb

from nbkit.bridge.debugging.prompts import NoPrompt, Prompts
from nbkit.wire.cells import PromptKind


class Cells(Protocol):
    """Which code is a cell's."""

    @property
    def cells(self) -> dict[str, int]: ...

    def is_cell(self, frame: FrameType) -> bool: ...


class RankPdb(OldPdb):  # type: ignore[misc]
    """One stop of the code of a cell, or one traceback. outermost: the code that runs cells; what is below it on the
    stack is not the cell's."""

    def __init__(self, prompts: Prompts, own: Cells, outermost: CodeType, kind: PromptKind) -> None:
        super().__init__(stdin=weakref.proxy(self), stdout=sys.stdout, nosigint=True, readrc=False)
        self.prompt = ""  # the notebook shows it, beside the place where one types
        self.prompts, self.own, self.outermost, self.kind = prompts, own, outermost, kind
        self.in_cell = True

    def stop_at(self, frame: FrameType) -> None:
        """Ask for commands in `frame`, which runs, and trace what runs next as they say."""
        self.in_cell = any(self.own.is_cell(each) for each in _outwards(frame))  # a thread of a cell has no cell below
        self.reset()
        for each in _outwards(frame):
            each.f_trace = self.trace_dispatch
            self.botframe = each
        self.set_step()
        self.interaction(frame, None)
        # In this order: the tracing must not stop in the prompt's own code.
        if self.stoplineno != -1 or self.breaks:
            sys.settrace(self.trace_dispatch)

    def look_at(self, traceback: TracebackType) -> None:
        """Ask for commands in the frames of an error. Returns when the person leaves."""
        self.reset()
        self.interaction(None, traceback)

    def let_go(self) -> None:
        """Stop nowhere any more, and hold no frame."""
        self.reset()

    # What pdb does otherwise here ---------------------------------------------------------------------------------

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's own shows an interrupt and asks on; here it ends the cell

    def forget(self) -> None:
        super().forget()
        self.__dict__.pop("curframe_locals", None)  # the variables of a frame, and with them its tensors

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        stack, index = super().get_stack(f, t)
        first = next((at for at, (frame, _) in enumerate(stack) if self.own.is_cell(frame)), 0)
        return stack[first:], max(0, index - first)

    def stop_here(self, frame: FrameType) -> bool:
        return bool(super().stop_here(frame)) and self._is_of_cell(frame)

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        # Each statement of a cell is a module of its own to Python; that one begins is of no interest.
        if not (self.own.is_cell(frame) and frame.f_code.co_name == "<module>"):
            super().user_call(frame, argument_list)

    def _is_of_cell(self, frame: FrameType) -> bool:
        """Whether it is the cell's code, or called by it. Between two statements IPython's own runs."""
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

    # Its lines ----------------------------------------------------------------------------------------------------

    def readline(self) -> str:
        """As of a file: a command that a person has typed, or, where nobody can, the one that lets the cell go on."""
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
