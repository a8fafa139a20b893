"""Writes the record files of a run, and reads them, also while they are written.

`read_since` reads with a cursor, so it never reads the whole history again. It leaves a line that is still being
written to the next call. If a new part has begun, it goes on there.

`step_at`, `detail_near` and others find single records without reading all files. They search the bytes for the
beginning of a line: 16 MiB take some milliseconds. Steps older than the two parts exist only as means in the overview.

`RecordFile` writes the file of a rank in two parts of limited size. `Overview` writes the whole run. At the default
sizes, the files have a record for each of the newest 70 000 steps or so, and an overview of all steps in at most 1024
lines. When the overview is full, every two neighbouring lines are replaced by their mean, so each line describes twice
as many steps.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar

from nbkit.errors import UsageError
from nbkit.quoting import shell_words
from nbkit.records.records import (
    FORMAT,
    Detail,
    EventRecord,
    Group,
    Header,
    MemoryRecord,
    Record,
    StepRecord,
    Traffic,
    from_line,
    to_line,
)

START = (-1, 0)
"""The cursor that reads everything."""

Cursor = tuple[int, int]  # (part of the file, bytes of it that were read)

_STEP = b'{"kind":"step",'


def rank_files(run_dir: Path) -> dict[int, Path]:
    """Return {rank: its file} for the files that exist."""
    found = {}
    for path in (run_dir / "telemetry").glob("rank*.jsonl"):
        number = path.stem.removeprefix("rank")
        if number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def check_format(run_dir: Path) -> None:
    """Raise UsageError if another release has recorded the run in another format."""
    for path in rank_files(run_dir).values():
        try:
            with path.open("rb") as file:
                written_in = json.loads(file.readline()).get("format", 1)
        except (OSError, ValueError, AttributeError):  # the file does not exist yet, or has no header
            continue
        if written_in != FORMAT:
            raise UsageError(
                f"Another release of nbkit has recorded the run {run_dir.name!r}.",
                numbers=f"its {path.name} is of format {written_in}; this release reads {FORMAT}",
                hint=f"{shell_words('nbkit', 'watch', run_dir)}   with that release",
            )


def old_part(path: Path) -> Path:
    """Return the path of the part before the newest one."""
    return path.with_suffix(".old.jsonl")


def overview_of(path: Path) -> Path:
    """Return the path of the overview of the whole run."""
    return path.with_suffix(".overview.jsonl")


def written(path: Path) -> tuple[float, float]:
    """Return the times at which a rank's overview last grew (0 before the first step), and its file, as Unix time.

    A Trainer that makes no steps still records the traffic of its process, so the second time alone does not show that
    it trains. In a long run the overview grows only every 2, 4, 8, ... steps.
    """
    return changed(overview_of(path)), changed(path)


def changed(path: Path) -> float:
    """Return the time at which a file was last written, as Unix time; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:  # does not exist yet, or is being replaced by a new part
        return 0.0


def read_since(path: Path, cursor: Cursor = START, *, steps: int | None = None) -> tuple[list[Record], Cursor]:
    """Return (records written since `cursor`, the cursor for the next call).

    steps: the largest number of step records to return, the newest ones; they take the most time to read. If more than
    one part was begun since `cursor`, some records are lost, and the returned ones begin with a Header.
    """
    # Read the newest part first. If a new part begins after that, the old part is the one that was just read.
    part, data = _part(path, cursor)
    if part is None:
        part, data = _part(old_part(path), cursor)
        return ([], cursor) if part is None else _parsed(data, part, cursor, steps)
    if part == cursor[0]:
        return _parsed(data, part, cursor, steps)
    before, lines = _part(old_part(path), cursor)
    earlier: list[Record] = []
    if before == part - 1 and lines is not None:
        earlier, _ = _parsed(lines, before, cursor, steps)
    records, cursor = _parsed(data, part, (part, 0), steps)
    return earlier + records, cursor


def cursor_near_end(path: Path, *, num_bytes: int = 256 << 10) -> Cursor:
    """Return a cursor `num_bytes` before the end of the newest part, so that opening a long run is fast.

    Reading from there leaves out Header and Groups. Get them from `read_head`, or from `read_since(path)[0]` for a
    short file.
    """
    try:
        with path.open("rb") as file:
            head = from_line(file.readline())
            size = file.seek(0, 2)
            if not isinstance(head, Header):
                return START
            if size <= num_bytes:
                return START if head.part == 0 else (head.part, 0)
            file.seek(size - num_bytes)
            file.readline()
            return head.part, file.tell()
    except FileNotFoundError:
        return START


def read_head(path: Path) -> list[Record]:
    """Return the Header of the newest part, and the Groups that were known when it began."""
    head: list[Record] = []
    try:
        with path.open("rb") as file:
            for line in file:
                record = from_line(line)
                if record is None or record.kind not in ("header", "group"):
                    break
                head.append(record)
    except FileNotFoundError:
        pass
    return head


def read_overview(path: Path, *, about: int | None = None) -> list[StepRecord]:
    """Return records of the whole run, the oldest first. Each is the mean of `span` steps.

    about: return about this number of records, evenly spaced.
    """
    lines = overview_lines(path)
    if about is not None:
        # Count from the end, so that all ranks choose the same steps, and the newest is among them.
        lines = lines[::-1][:: max(1, len(lines) // about)][::-1]
    return [record for line in lines if isinstance(record := from_line(line), StepRecord)]


def overview_lines(path: Path) -> list[bytes]:
    """Return the lines of the overview; [] if there is none."""
    try:
        return overview_of(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []


def newest_run(parent: Path) -> Path | None:
    """Return the run in a directory that has the newest step, or the directory itself if it is a run, or None."""
    return next(iter(runs_in(parent)), None)


def runs_in(parent: Path) -> list[Path]:
    """Return the runs in a directory, and the directory itself if it is a run. The newest step comes first."""
    folders = [parent, *parent.glob("*")] if parent.is_dir() else []
    files = {folder: list(folder.glob("telemetry/rank*.jsonl")) for folder in folders}
    newest = sorted(((max(map(written, of)), folder) for folder, of in files.items() if of), reverse=True)
    return [folder for _, folder in newest]


def _part(path: Path, cursor: Cursor) -> tuple[int | None, bytes | None]:
    """Return (number of this part, its bytes after the cursor). Return all its bytes if the cursor is elsewhere."""
    try:
        with path.open("rb") as file:
            head = from_line(file.readline())
            if not isinstance(head, Header):
                return None, None
            file.seek(cursor[1] if head.part == cursor[0] else 0)
            return head.part, file.read()
    except FileNotFoundError:
        return None, None


def _parsed(data: bytes | None, part: int, cursor: Cursor, steps: int | None) -> tuple[list[Record], Cursor]:
    whole = data[: data.rfind(b"\n") + 1] if data else b""
    lines = whole.splitlines()
    if steps is not None:
        steps_at = [i for i, line in enumerate(lines) if line.startswith(_STEP)]
        old = set(steps_at[: max(len(steps_at) - steps, 0)])
        lines = [line for i, line in enumerate(lines) if i not in old]
    records = [record for line in lines if (record := from_line(line)) is not None]
    read = cursor[1] if part == cursor[0] else 0
    return records, (part, read + len(whole))


_AT_MOST = 2000

R = TypeVar("R", bound=Record)


def step_at(path: Path, step: int) -> StepRecord | None:
    """Return the record of a step. If it was deleted, return the overview's mean of the steps around it, or None."""
    if (exact := _newest(path, StepRecord, b'"step":%d,' % step)) is not None:
        return exact
    for line in overview_lines(path):
        last = _step_in(line)
        if last is not None and last >= step:
            found = from_line(line)
            return found if isinstance(found, StepRecord) and last - found.span < step else None
    return None


def detail_near(path: Path, step: int) -> Detail | None:
    """Return the detailed record of the last step up to `step` that has one, else of the first step after it."""
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
    """Return the newest record of memory, or None."""
    return _newest(path, MemoryRecord)


def events_of(path: Path) -> list[EventRecord]:
    """Return the events of a rank's two parts, the oldest first, at most the newest _AT_MOST."""
    found: list[EventRecord] = []
    for data in _parts(path):
        found = _every(data, EventRecord) + found
    return found[-_AT_MOST:]


def groups_of(path: Path) -> list[Group]:
    """Return the groups that a rank has used. A part begins with the groups known by then; later ones follow."""
    found = {one.label: one for data in _parts(path) for one in _every(data, Group)}
    return list(found.values())


def _newest(path: Path, kind: type[R], field: bytes = b"") -> R | None:
    """Return the last record of a kind that begins with `field`, from the newest part that has one."""
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
    """Yield the newest part, then the one before it."""
    for part in (path, old_part(path)):
        try:
            with part.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data
        except (FileNotFoundError, ValueError):  # ValueError: the file is empty
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


PART_BYTES = 16 << 20
OVERVIEW_LINES = 1024


class RecordFile:
    """Appends records to `path`. Only one thread may use it. head(part): returns the first records of a part."""

    def __init__(self, path: Path, head: Callable[[int], Sequence[Record]], *, part_bytes: int = PART_BYTES) -> None:
        self.path, self._head, self._part_bytes = path, head, part_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process that takes over a rank begins a new part. It never writes into the file of the previous process.
        self._part = next((one.part for one in read_head(path) if isinstance(one, Header)), -1)
        self._file: IO[str] | None = None
        self._begin_part()

    def write(self, records: Sequence[Record]) -> list[str]:
        """Append records, and return their lines.

        They are handed to the operating system at once, so readers find whole lines, also after a crash.
        """
        lines = [to_line(record) for record in records]
        if self._file is None:
            return lines
        self._file.write("".join(lines))
        self._file.flush()
        if self._file.tell() > self._part_bytes:
            self._begin_part()
        return lines

    def close(self) -> None:
        """Close the file. Nothing more is written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_part(self) -> None:
        self.close()
        self._part += 1
        young = self.path.with_suffix(".new")
        young.write_text("".join(to_line(record) for record in self._head(self._part)))
        # Both replacements are atomic. Between them, a reader finds no newest part, and waits.
        if self.path.exists():
            os.replace(self.path, old_part(self.path))
        os.replace(young, self.path)
        self._file = self.path.open("a")


class Overview:
    """Writes all steps of a run as at most `lines` means. Rewrites the file only when it halves their number."""

    def __init__(self, path: Path, *, lines: int = OVERVIEW_LINES) -> None:
        self._path, self._lines = overview_of(path), lines
        self._file: IO[str] | None = None
        self._full: list[StepRecord] = []
        self._open: list[StepRecord] = []
        self.span = 1

    def add(self, step: StepRecord, line: str = "") -> None:
        """Add a finished step. line: the same as a line of JSON, if the caller has it."""
        self._open.append(step)
        if len(self._open) < self.span:
            return
        self._full.append(mean_of(self._open))
        self._open = []
        if len(self._full) < self._lines:
            self._append(line if line and self.span == 1 else to_line(self._full[-1]))
            return
        self._full = [mean_of(self._full[i : i + 2]) for i in range(0, len(self._full), 2)]
        self.span *= 2
        self.close()
        young = self._path.with_suffix(".new")
        young.write_text("".join(to_line(step) for step in self._full))
        os.replace(young, self._path)

    def close(self) -> None:
        """Close the file for now."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, line: str) -> None:
        if self._file is None:
            self._file = self._path.open("a" if len(self._full) > 1 else "w")
        self._file.write(line)
        self._file.flush()


def mean_of(steps: Sequence[StepRecord]) -> StepRecord:
    """Return one record for neighbouring steps.

    Numbers are means, weighted by the spans. A number that some steps lack is the mean over the others. Texts (the
    strategy) and the step number come from the newest step, the start from the oldest.
    """
    if len(steps) == 1:
        return steps[0]
    total = sum(step.span for step in steps)

    def mean(read: Callable[[StepRecord], float]) -> float:
        return sum(read(step) * step.span for step in steps) / total

    def means(of: str) -> dict[str, float]:
        names = dict.fromkeys(name for step in steps for name in getattr(step, of))
        return {name: mean(lambda step, name=name: getattr(step, of).get(name, 0.0)) for name in names}  # type: ignore[misc]

    last = steps[-1]
    numbers: dict[str, object] = {}
    for name in {name: None for step in steps for name in step.numbers}:
        those = [(step.numbers[name], step.span) for step in steps if name in step.numbers]
        if all(isinstance(value, (int, float)) for value, _ in those):
            numbers[name] = sum(value * span for value, span in those) / sum(span for _, span in those)
        else:
            numbers[name] = those[-1][0]
    numbers["step"] = last.step
    return StepRecord(
        last.step,
        start_ns=steps[0].start_ns,
        seconds=mean(lambda step: step.seconds),
        parts=means("parts"),
        traffic=_mean_traffic(steps, total),
        numbers=numbers,
        cpu_seconds=mean(lambda step: step.cpu_seconds),
        own_seconds=mean(lambda step: step.own_seconds),
        examining=mean(lambda step: step.examining),
        faults=mean(lambda step: step.faults),
        lost=sum(step.lost for step in steps),
        span=total,
        experts=means("experts"),
    )


def _mean_traffic(steps: Sequence[StepRecord], total: int) -> tuple[Traffic, ...]:
    sums: dict[tuple[str, str, str, int | None], list[float]] = {}
    for step in steps:
        for row in step.traffic:
            into = sums.setdefault((row.op, row.axis, row.group, row.peer), [0.0] * 5)
            for i, value in enumerate((row.calls, row.bytes, row.timed, row.seconds, row.blocked)):
                into[i] += value * step.span / total
    return tuple(Traffic(*key, *values) for key, values in sums.items())
