"""One record out of the files of a run, wherever in them it lies, without reading them all.

The files are searched as bytes for how a line begins: 16 MiB take some milliseconds. What is older than the two parts
is there as the overview's mean.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from nbkit.records.record_file import old_part, overview_lines
from nbkit.records.records import Detail, EventRecord, Group, MemoryRecord, Record, StepRecord, from_line

_AT_MOST = 2000

R = TypeVar("R", bound=Record)


def step_at(path: Path, step: int) -> StepRecord | None:
    """The record of a step; an overview's mean over the steps around it where that is all there is; or None."""
    if (exact := _newest(path, StepRecord, b'"step":%d,' % step)) is not None:
        return exact
    for line in overview_lines(path):
        last = _step_in(line)
        if last is not None and last >= step:
            found = from_line(line)
            return found if isinstance(found, StepRecord) and last - found.span < step else None
    return None


def detail_near(path: Path, step: int) -> Detail | None:
    """The detailed record of the last step up to `step` that has one, else of the first after it."""
    before: tuple[int, Record | None] | None = None
    after: tuple[int, Record | None] | None = None
    for data in _parts(path):
        for at in _all(data, b'\n{"kind":"detail","step":'):
            number = _step_in(data[at + 1 : at + 60])
            if number is None:
                continue
            if number <= step and (before is None or number >= before[0]):
                before = number, _line(data, at + 1)
            elif number > step and (after is None or number < after[0]):
                after = number, _line(data, at + 1)
    best = before or after
    return best[1] if best is not None and isinstance(best[1], Detail) else None


def newest_memory(path: Path) -> MemoryRecord | None:
    """The last time that memory was counted."""
    return _newest(path, MemoryRecord)


def events_of(path: Path) -> list[EventRecord]:
    """Every event of a rank's two parts, the oldest first."""
    found: list[EventRecord] = []
    for data in _parts(path):
        found = _every(data, EventRecord) + found
    return found[-_AT_MOST:]


def groups_of(path: Path) -> list[Group]:
    """The groups that a rank has made calls on: a part begins with those that were known, later ones follow."""
    found = {one.label: one for data in _parts(path) for one in _every(data, Group)}
    return list(found.values())


def _newest(path: Path, kind: type[R], field: bytes = b"") -> R | None:
    """The last record of a kind that begins with `field`, of the newest part that has one."""
    for data in _parts(path):
        at = data.rfind(_beginning(kind) + field)
        if at >= 0 and isinstance(found := _line(data, at + 1), kind):
            return found
    return None


def _every(data: mmap.mmap, kind: type[R]) -> list[R]:
    those = [_line(data, at + 1) for at in _all(data, _beginning(kind))]
    return [one for one in those if isinstance(one, kind)]


def _beginning(kind: type[Record]) -> bytes:
    return b'\n{"kind":"%b",' % kind.kind.encode()


def _parts(path: Path) -> Iterator[mmap.mmap]:
    """The newest part, then the one before it."""
    for part in (path, old_part(path)):
        try:
            with part.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data
        except (FileNotFoundError, ValueError):  # ValueError: it is empty
            continue


def _all(data: mmap.mmap, needle: bytes) -> Iterator[int]:
    at = data.find(needle)
    while at >= 0:
        yield at
        at = data.find(needle, at + len(needle))


def _line(data: mmap.mmap, start: int) -> Record | None:
    stop = data.find(b"\n", start)
    return from_line(data[start:stop]) if stop >= 0 else None


def _step_in(line: bytes) -> int | None:
    number = line.partition(b'"step":')[2].partition(b",")[0]
    return int(number) if number.isdigit() else None
