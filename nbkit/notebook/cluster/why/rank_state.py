"""What one rank does, as far as anybody can tell: it says so itself, or it is seen from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nbkit.wire.activity import Activity, CodeLine, GroupLog, Operation

Kind = Literal["answers", "native", "stopped", "silent", "dead"]


@dataclass(frozen=True)
class RankState:
    """kind: "native" is a rank that keeps the interpreter to itself, "stopped" one that the system has stopped.

    how: in words, what is known of one that does not answer. line: of the user's code. activity: of one that answers.
    stacks: text, "" where it was not asked for.
    """

    rank: int
    kind: Kind
    how: str = ""
    line: CodeLine | None = None
    activity: Activity | None = None
    stacks: str = ""

    @property
    def waits(self) -> Operation | None:
        """What it waits in."""
        return self.activity.waits if self.activity else None

    def log(self, group: str) -> GroupLog | None:
        """What it has issued in a group; None where that is not known."""
        return self.activity.groups.get(group) if self.activity else None

    @property
    def idle(self) -> bool:
        """Whether it runs no cell."""
        return self.activity is not None and self.activity.cell is None

    @property
    def prompt(self) -> str:
        """What for it asks for a line that a person types; "" for none."""
        return self.activity.prompt if self.activity else ""

    def is_doing(self) -> str:
        """What it does, for a sentence that begins with the rank: "is in time.sleep, cell 9 line 4"."""
        if self.kind != "answers" or self.activity is None:
            return f"{self.how}, {self.line}" if self.line else self.how
        if self.prompt:
            at = f", {self.line}" if self.line else ""
            return f"is at a breakpoint{at}" if self.prompt == "breakpoint" else "is looked at with %nbkit debug"
        if self.idle:
            return "has ended its cell"
        if self.waits:
            return f"waits in {self.waits.name}"
        line = self.line
        where = f", {line}" if line else ""
        if self.activity.reads_data:
            return f"reads data{where}"
        if line is None:
            return "runs code that is no user's"
        return f"is in {line.calls}{where}" if line.calls else f"runs {line}"
