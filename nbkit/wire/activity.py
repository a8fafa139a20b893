"""The activity of a rank, as it reports it: the running line, what it waits for, and the operations that it issued."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ANYONE = -1
"""The peer of a receive that takes a message from any rank."""


@dataclass(frozen=True)
class CodeLine:
    """A line of the user's own code. cell: the number of its cell; 0 for a file. calls: the function called, or ""."""

    file: str
    line: int
    function: str = ""
    cell: int = 0
    calls: str = ""

    def __str__(self) -> str:
        return f"cell {self.cell} line {self.line}" if self.cell else f"{Path(self.file).name} line {self.line}"


@dataclass(frozen=True)
class Operation:
    """A collective, a message, or the creation of a group ("new_group"), as one rank has issued it.

    group: the label of the group, the same on all ranks. members: its global ranks. number: the number of this
    operation among the collectives of the group, or among the messages of the pair. peer: the global rank at the other
    end of a message. bytes: contributed by this rank. root: the global rank of the root of a broadcast or a similar
    operation. seconds: since it was issued.
    """

    op: str
    group: str
    axis: str
    members: tuple[int, ...]
    number: int
    peer: int | None = None
    bytes: int = 0
    dtype: str = ""
    tag: int = 0
    root: int | None = None
    seconds: float = 0.0
    line: CodeLine | None = None

    @property
    def where(self) -> str:
        """Return the axis, or "group N" for a group that the user made. N is torch's number."""
        return f"group {self.axis}" if self.axis.isdigit() else self.axis

    @property
    def name(self) -> str:
        """Return the operation in words: "all_reduce #17 on dp", "recv #2 from rank 3"."""
        if self.peer is None:
            return f"{self.op} #{self.number}" + (f" on {self.where}" if self.axis else "")
        whom = "any rank" if self.peer == ANYONE else f"rank {self.peer}"
        return f"{self.op} #{self.number} {'to' if self.op == 'send' else 'from'} {whom}"


@dataclass(frozen=True)
class GroupLog:
    """The operations that a rank has issued in one group since this generation of the world began.

    issued: number of collectives. sent, received: global rank of the peer -> number of messages. operations, messages:
    the newest collectives and messages, the oldest first.
    """

    axis: str
    members: tuple[int, ...]
    issued: int
    sent: Mapping[int, int] = field(default_factory=dict)
    received: Mapping[int, int] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()
    messages: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Activity:
    """The state of one rank at a moment: what it runs and what it waits for.

    cell: the number of the running cell, or None. line: the innermost line of the user's own code. waits: the operation
    that it waits for. on_device: True if only its device waits, and the host has gone on. step: the step of its
    training, or None. prompt: the kind of prompt at which it waits for a person ("breakpoint", "post-mortem"), or "".
    stacks: the stacks of all threads; "" unless they were requested. cells: file -> cell number. split_call: the user's
    line that calls a split model outside of a step. split_by: the strategy that has split the model. unfinished: the
    entries of torch's flight recorder for operations between devices that have not ended.
    """

    rank: int
    cell: int | None = None
    seconds: float = 0.0
    line: CodeLine | None = None
    reads_data: bool = False
    waits: Operation | None = None
    on_device: bool = False
    step: int | None = None
    prompt: str = ""
    groups: Mapping[str, GroupLog] = field(default_factory=dict)
    stacks: str = ""
    cells: Mapping[str, int] = field(default_factory=dict)
    split_call: CodeLine | None = None
    split_by: str = ""
    unfinished: tuple[str, ...] = ()
