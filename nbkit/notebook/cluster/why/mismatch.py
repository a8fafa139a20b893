"""Where the ranks of a group have not issued the same: another operation, size, type, order or number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbkit.notebook.cluster.why.rank_state import RankState
from nbkit.wire.activity import Operation

# Some backends take tensors of several sizes here. Elsewhere nccl hangs, and gloo mixes them up or ends the process.
_SEVERAL_SIZES = ("all_gather", "gather", "scatter", "reduce_scatter")


@dataclass(frozen=True)
class Mismatch:
    """A place at which ranks differ. what: in which respect. sides: operation -> its ranks, the most common first.

    missing: ranks that have not issued what the first side has issued, and have gone on.
    """

    what: str
    sides: tuple[tuple[Operation, tuple[int, ...]], ...]
    missing: tuple[int, ...] = ()

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that are not with the most; with as many on both sides all of them."""
        if self.missing:
            return self.missing
        most = len(self.sides[0][1])
        tied = sum(len(ranks) == most for _, ranks in self.sides) > 1
        return tuple(sorted(rank for _, ranks in self.sides[0 if tied else 1 :] for rank in ranks))


def first_mismatch(states: Mapping[int, RankState], group: str) -> Mismatch | None:
    """The first collective of a group that differs between ranks, as far back as they remember."""
    by_number: dict[int, dict[int, Operation]] = {}
    for rank, state in states.items():
        for operation in log.operations if (log := state.log(group)) is not None else ():
            by_number.setdefault(operation.number, {})[rank] = operation
    waited = {each.waits.number for each in states.values() if each.waits is not None and each.waits.group == group}
    for number, issued in sorted(by_number.items()):
        what = _difference(list(issued.values()))
        harmless = what == "size" and number not in waited and issued[min(issued)].op in _SEVERAL_SIZES
        if what and not harmless:
            return skipped(states, group) or Mismatch(what, _sides(issued))
    return None


def message_mismatch(sent: Operation, received: Operation, sender: int, receiver: int) -> Mismatch | None:
    """Whether the two ends of a message differ."""
    if sent.tag != received.tag:
        what = "tag"
    elif sent.bytes != received.bytes:
        what = "size"
    elif sent.dtype != received.dtype:
        what = "dtype"
    else:
        return None
    return Mismatch(what, ((sent, (sender,)), (received, (receiver,))))


def _difference(operations: Sequence[Operation]) -> str:
    """In what they differ, "" if they are alike."""
    first = operations[0]
    if any(other.op != first.op for other in operations):
        return "operation"
    if any(other.root != first.root for other in operations):
        return "root"
    # A barrier has no tensor; whoever gives one none has no type either.
    if len({other.dtype for other in operations if other.dtype}) > 1:
        return "dtype"
    if first.op != "all_to_all" and any(other.bytes != first.bytes for other in operations):
        return "size"
    return ""


def _sides(issued: Mapping[int, Operation]) -> tuple[tuple[Operation, tuple[int, ...]], ...]:
    found: dict[tuple[object, ...], list[int]] = {}
    for rank, operation in sorted(issued.items()):
        found.setdefault((*_kind(operation), operation.root), []).append(rank)
    return tuple(
        (issued[ranks[0]], tuple(ranks)) for ranks in sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))
    )


def skipped(states: Mapping[int, RankState], group: str) -> Mismatch | None:
    """What some ranks have left out: they have issued fewer, and what they lack is one stretch of what the others have
    issued, in the same lines, and not at its end."""
    logs = {rank: log for rank, state in states.items() if (log := state.log(group)) is not None and log.operations}
    most = max((log.issued for log in logs.values()), default=0)
    full = next((log for log in logs.values() if log.issued == most), None)
    if full is None:
        return None
    found: dict[int, list[int]] = {}
    for rank, log in logs.items():
        lacking = most - log.issued
        if lacking and (at := _stretch_left_out(full.operations, log.operations, lacking)) is not None:
            found.setdefault(at, []).append(rank)
    if not found:
        return None
    at, missing = min(found.items())
    left_out = full.operations[at]
    have = tuple(rank for rank, log in logs.items() if rank not in missing and log.issued >= left_out.number)
    return Mismatch("number", ((left_out, have),), tuple(missing))


def _stretch_left_out(full: Sequence[Operation], short: Sequence[Operation], lacking: int) -> int | None:
    """Where in `full` the `lacking` operations begin without which it is `short`; None: nowhere but at its end."""
    start = max(full[0].number, short[0].number)
    long = [operation for operation in full if operation.number >= start]
    less = [operation for operation in short if operation.number >= start]
    if len(long) - len(less) != lacking:
        return None
    at = next((i for i, (one, other) in enumerate(zip(long, less, strict=False)) if _kind(one) != _kind(other)), None)
    if at is None or list(map(_kind, long[at + lacking :])) != list(map(_kind, less[at:])):
        return None
    return at + len(full) - len(long)


def _kind(operation: Operation) -> tuple[object, ...]:
    return operation.op, operation.bytes, operation.dtype, _place(operation)


def _place(operation: Operation) -> tuple[object, ...]:
    line = operation.line
    return () if line is None else (line.cell, line.cell or line.file, line.line)
