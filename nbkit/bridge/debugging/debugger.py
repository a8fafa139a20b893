"""`breakpoint()` on this rank, and the frames of the cell that failed last, until the next cell begins."""

from __future__ import annotations

import os
import pdb
import sys
import threading
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import torch.distributed as dist

from nbkit.bridge.debugging.prompts import Prompts
from nbkit.bridge.debugging.rank_pdb import Cells, RankPdb

FRAMES_KEPT = 200  # the innermost; a recursion without an end has thousands


@dataclass(frozen=True)
class FailedCell:
    """What is kept of a cell that failed. moment: time.time() of it. Its frames hold their variables."""

    number: int
    error: str
    moment: float
    traceback: TracebackType


class Debugger:
    """One per rank. outermost: the code that runs cells."""

    def __init__(self, prompts: Prompts, own: Cells, outermost: CodeType) -> None:
        self.prompts, self.own, self.outermost = prompts, own, outermost
        self.failed: FailedCell | None = None
        self._process = os.getpid()
        self._passed: dict[tuple[CodeType, int], int] = {}  # calls of torch's breakpoint, by where it stands

    def install(self) -> None:
        """Let `breakpoint()`, `pdb.set_trace()` and `torch.distributed.breakpoint()` ask in the notebook."""
        sys.breakpointhook = self.set_trace
        pdb.set_trace = self.set_trace
        dist.breakpoint = self.breakpoint_of_one

    def set_trace(self, *, header: str | None = None, **_: Any) -> None:
        """What `breakpoint()` calls. PYTHONBREAKPOINT=0 leaves all of them out, as everywhere."""
        if os.environ.get("PYTHONBREAKPOINT") == "0":
            return
        if os.getpid() != self._process:
            print("breakpoint(): a process that a rank has started has no prompt, and goes on", file=sys.stderr)
            return
        if header:
            print(header)
        RankPdb(self.prompts, self.own, self.outermost, "breakpoint").stop_at(sys._getframe(1))

    def breakpoint_of_one(self, rank: int = 0, skip: int = 0, timeout_s: int | None = None) -> None:
        """torch.distributed.breakpoint: `rank` asks, and all others wait. timeout_s has no effect: no group has one."""
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
        """A cell begins: nobody looks at the frames of the one before any more, and its tensors are let go."""
        self.failed = None
        self._passed.clear()

    def end(self) -> None:
        """A cell has ended, or a live one within it: what was to stop next is not there any more."""
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
        """Ask for commands in the frames that are kept. Raises LookupError without any."""
        if self.failed is None:
            raise LookupError("no frames of a failed cell are kept on this rank")
        assert threading.current_thread() is threading.main_thread()
        print(f"{self.failed.error} (cell {self.failed.number})")
        RankPdb(self.prompts, self.own, self.outermost, "post-mortem").look_at(self.failed.traceback)
