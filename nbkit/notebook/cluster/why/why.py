"""What `%nbkit why` shows: the sentence, a row for each rank, and the stacks if they were asked for."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from dataclasses import dataclass

from nbkit.durations import text_of
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.output.root_cause import Death
from nbkit.notebook.cluster.registry import Entry
from nbkit.notebook.cluster.status import html_table, text_table
from nbkit.notebook.cluster.why.collect import collect
from nbkit.notebook.cluster.why.rank_state import RankState
from nbkit.notebook.cluster.why.verdict import Verdict, verdict
from nbkit.wire.activity import Operation

COLUMNS = ("rank", "does", "operation", "ranks of the group", "bytes", "since", "line")


@dataclass(frozen=True)
class Why:
    """Who is stuck where, at one moment. seconds: that it took to find out."""

    states: Mapping[int, RankState]
    verdict: Verdict
    seconds: float

    @property
    def sentence(self) -> str:
        """What it comes to."""
        return self.verdict.sentence

    def _rows(self) -> list[tuple[str, ...]]:
        return [_row(state) for state in self.states.values()]

    def _stacks(self) -> str:
        return "\n".join(f"rank {rank}, {state.stacks}" for rank, state in self.states.items() if state.stacks)

    def __repr__(self) -> str:
        table = text_table(COLUMNS, self._rows())
        return "\n\n".join(part for part in (self.sentence, table, self._stacks()) if part)

    def _repr_html_(self) -> str:
        stacks = f"<pre>{html.escape(self._stacks())}</pre>" if self._stacks() else ""
        return f"<b>{html.escape(self.sentence)}</b>{html_table(COLUMNS, self._rows())}{stacks}"


def ask_why(entry: Entry, client: Client, deaths: Mapping[int, Death], *, stacks: bool = False) -> Why:
    """Ask all ranks of a cluster. stacks: with the stack of every thread. Answers within 5 s."""
    began = time.monotonic()
    states = collect(entry, client, deaths, stacks=stacks)
    return Why(states, verdict(states), time.monotonic() - began)


def _row(state: RankState) -> tuple[str, ...]:
    activity, operation = state.activity, state.waits
    line = operation.line if operation is not None and operation.line is not None else state.line
    told = _told(operation) if operation is not None else ("", "", "", "")
    where = f"{line}{f', in {line.calls}' if line.calls else ''}" if line else ""
    if state.kind != "answers" or activity is None:
        does = state.how.removeprefix("is ")
    elif state.prompt:
        does = "at a prompt"
    elif state.idle:
        does, where = "idle", ""
    elif operation is not None:
        does = "waits on its device" if activity.on_device else "waits"
    elif activity.reads_data:
        does = "reads data"
    else:
        does = f"trains, step {activity.step}" if activity.step is not None else "runs"
    return (str(state.rank), does, *told, where)


def _told(operation: Operation) -> tuple[str, ...]:
    size = f"{operation.bytes:,} {operation.dtype}".strip() if operation.dtype else ""
    members = ",".join(map(str, operation.members[:8])) + (",…" if len(operation.members) > 8 else "")
    return operation.name, members, size, text_of(operation.seconds) if operation.seconds else ""
