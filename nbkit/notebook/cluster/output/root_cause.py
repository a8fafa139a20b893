"""Find the failure that caused the others, and make the cell's error from it.

`fault` makes the error for a message of a rank that nbkit could not handle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nbkit.errors import CellError, RankDied
from nbkit.wire import cluster_end
from nbkit.wire.cells import CellRecord, CellRequest, ranks_named, ranks_text
from nbkit.wire.cluster_end import HINT, SAVED
from nbkit.wire.messages import Death


def deaths_in(folder: Path) -> Iterator[Death]:
    """Return the deaths of ranks that no other process has replaced or will replace."""
    return (end for end in cluster_end.read_ranks(folder) if not end.replaced)


def root_of(records: Mapping[int, CellRecord], deaths: Mapping[int, Death]) -> int | None:
    """Return the rank that died, or failed by itself, first. None if every failed rank was released."""
    moments = {death.rank: death.when for death in deaths.values()}
    for rank, record in records.items():
        if record.failure and record.status == "error":
            moments.setdefault(rank, record.failure.moment)
    return min(moments, key=lambda rank: moments[rank]) if moments else None


def twins_of(root: int, records: Mapping[int, CellRecord]) -> tuple[int, ...]:
    """Return `root` and the ranks that failed by themselves in the same way.

    A released rank does not count, even if it failed in the same line with an error of the same class.
    """
    first = records[root]
    return tuple(rank for rank, record in sorted(records.items()) if rank == root or _are_twins(first, record))


def _are_twins(first: CellRecord, other: CellRecord) -> bool:
    cause, failure = first.failure, other.failure
    assert cause is not None
    if failure is None or (failure.ename, failure.line) != (cause.ename, cause.line):
        return False
    # A slower rank may be released just before it raises the same error. Then the message is the same too.
    late = other.status == "released" and failure.ename != "KeyboardInterrupt" and failure.evalue == cause.evalue
    return other.status == first.status or late


def secondary_lines(root: int, records: Mapping[int, CellRecord]) -> list[str]:
    """Return a line for each group of ranks that failed as a result of another rank's failure."""
    groups: dict[str, list[int]] = {}
    same = twins_of(root, records) if root in records and records[root].failure else (root,)
    for rank, record in sorted(records.items()):
        if rank in same or record.failure is None:
            continue
        where = f"line {record.failure.line}" if record.failure.line else "outside the cell's own lines"
        if record.status == "error":
            text = f"failed as well: {record.failure.ename}: {_first_line(record.failure.evalue)} ({where})"
        else:
            text = f"released at {where}" + (f", in {record.failure.where}" if record.failure.where else "")
        groups.setdefault(text, []).append(rank)
    return [f"{ranks_named(ranks)}: {text}" for text, ranks in groups.items()]


def cell_error(
    records: Mapping[int, CellRecord], deaths: Mapping[int, Death], *, hint_names: frozenset[str] = frozenset()
) -> CellError:
    """Return the error of a failed cell. hint_names: names that the notebook defines, for hints on NameErrors."""
    root = root_of(records, deaths)
    if root is None:  # all ranks were released, and no rank died
        root = min((r for r in records if records[r].failure), key=lambda r: _moment(records[r]))
    lines = "\n  ".join(secondary_lines(root, records))
    by_itself = (rank for rank, record in records.items() if record.failure and record.status != "released")
    ranks = tuple(sorted({root, *deaths, *by_itself}))
    if root in deaths:
        return RankDied(
            f"Rank {root} died: {deaths[root].how}.",
            rank=root,
            ranks=ranks,
            numbers=lines,
            hint=_hint_of_death(records),
        )
    cause = records[root].failure
    assert cause is not None
    same = twins_of(root, records)
    place = f", line {cause.line}" if cause.line else ""
    text = _first_line(cause.evalue).removesuffix(".")
    how = "interrupted the cell" if cause.ename == "KeyboardInterrupt" else "failed"
    return CellError(
        f"{ranks_named(same)} {how}: {cause.ename}{text and ': '}{text}{place}",
        rank=root,
        ranks=ranks,
        traceback="\n".join(cause.traceback),
        numbers=lines,
        hint=_hint_of_lost(same, records) if cause.device_lost else _hint(cause.ename, cause.evalue, hint_names),
    )


def _hint_of_death(records: Mapping[int, CellRecord]) -> str:
    return f"%cluster restart   {_goes_on(records) or '(a whole world again; variables of all ranks are lost)'}"


def _hint_of_lost(ranks: tuple[int, ...], records: Mapping[int, CellRecord]) -> str:
    whose = f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"
    what = f"(the CUDA context of {whose} is gone, and with it what is on the GPU)"
    return "   ".join(filter(None, ["%cluster restart", what, _goes_on(records)]))


def _goes_on(records: Mapping[int, CellRecord]) -> str:
    """Return how to continue a training from its newest checkpoint, or "" without one."""
    failures = [record.failure for record in records.values() if record.failure is not None]
    newest = max((each for each in failures if each.saved), key=lambda each: each.saved_step, default=None)
    if newest is None:
        return ""
    return f"then build the Trainer again, and trainer.load({newest.saved!r})   of step {newest.saved_step}"


def _hint(ename: str, evalue: str, names: frozenset[str]) -> str:
    if ename == "Stopped" and SAVED in evalue:
        return HINT
    if ename == "NameError" and evalue.startswith("name '"):
        name = evalue.split("'")[1]
        if name in names:
            return f"{name} is defined in the notebook, not on the ranks: %push {name}"
    return ""


def _moment(record: CellRecord) -> float:
    return record.failure.moment if record.failure else float("inf")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else ""


def fault(request: CellRequest, what: str, rank: int | None, error: BaseException) -> CellError:
    """Return the error for a failure in nbkit. what: the message that was being handled. rank: its sender, or None."""
    whose = f" of rank {rank}" if rank is not None else ""
    made = CellError(
        f"nbkit could not handle {what}{whose}: {type(error).__name__}: {_said(error)}",
        rank=min(request.ranks) if rank is None else rank,
        numbers="variables live on; what was printed is in the cluster's output folder",
        hint="%cluster status   (names the folder)",
    )
    made.__cause__ = error
    return made


def _said(error: BaseException) -> str:
    try:
        return str(error).strip().partition("\n")[0][:300]
    except Exception:
        return "its text cannot be made"
