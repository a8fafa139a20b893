"""Records of measurements, and their form as JSON lines. Each rank writes a file, which can be read while the job runs.

<run>/telemetry/rank3.jsonl is the newest part of rank 3's file, and rank3.old.jsonl the part before it. Older parts are
deleted. Each part begins with a Header and the Groups, so that it can be read alone. rank3.overview.jsonl holds the
whole run in a limited number of lines, each the mean of `span` steps. Times are in ns of the rank's perf_counter;
`Header.unix` converts those of all ranks to the same clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

FORMAT = 1
"""The number of the format of a record file, in its Header. Files without a number have this format too. New fields and
kinds of records do not change it, since readers skip unknown ones."""

OUTSIDE = "outside"
"""The state of the training thread while it does work that is not part of a step."""

LISTEN_EVERY = 5
"""The end of asynchronous collectives is measured in one of this number of steps, and in steps with a Detail."""


@dataclass(frozen=True)
class Record:
    """The base class of all records. Each record is a line. kind: the name of its class in the file."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Header(Record):
    """The first line of a record file. When the file of a rank is full, the rank begins a new one, the next part.

    part: number of this part, from 0. clock: "host", or the kind of device that timed the steps. unix_s: seconds since
    1970 by the host's clock. clock_ns: the rank's perf_counter in ns, read at the same moment as `unix_s`. offset_ns:
    add this to the rank's perf_counter to get the perf_counter of rank 0. base_bytes: bytes of the process in memory
    before the job.
    """

    kind: ClassVar[str] = "header"
    rank: int
    world_size: int
    part: int
    host: str = ""
    clock: str = "host"
    strategy: str = ""
    clock_ns: int = 0
    offset_ns: int = 0
    unix_s: float = 0.0
    base_bytes: int = 0
    format: int = FORMAT

    def aligned(self, ns: int) -> int:
        """Return a time `ns` of this rank on rank 0's clock, in ns."""
        return ns + self.offset_ns

    def unix(self, ns: int) -> float:
        """Return a time `ns` of this rank as Unix time, in seconds."""
        return self.unix_s + (ns - self.clock_ns) / 1e9


@dataclass(frozen=True)
class Group(Record):
    """A group of ranks. label: the group's name, the same on all its ranks. members: global ranks, in the group's
    order."""

    kind: ClassVar[str] = "group"
    label: str
    axis: str
    members: tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """The sum of a rank's calls that have the same operation, group and peer.

    peer: for messages, the global rank at the other end, or -1 if this rank receives from any rank; None for a
    collective. bytes: bytes that this rank contributed. timed: number of calls with a measured duration. seconds: sum
    of these durations, including the wait for late ranks. blocked: seconds in which this rank did nothing but wait for
    the operation.
    """

    op: str
    axis: str
    group: str
    peer: int | None
    calls: float
    bytes: float
    timed: float
    seconds: float
    blocked: float


@dataclass(frozen=True)
class StepRecord(Record):
    """A finished step. In an overview file, a line is the mean of `span` steps, and `step` is the last of them.

    start_ns: time when the step began, in ns. seconds: duration of the step on this rank. parts: seconds of each
    activity of the training thread: compute, exposed (waiting for communication), bubble (waiting for another stage of
    a pipeline), data, optimizer, other. They add up to `seconds`. Empty if not measured. numbers: loss, lr, tokens and
    the other values of the history. cpu_seconds: CPU time of all threads of this process. own_seconds: seconds in which
    nbkit measured and wrote records. examining: seconds in which the process examined other strategies for the strategy
    panel. This ran in parallel with the step. lost: number of collectives and messages that are missing in `traffic`,
    because newer ones overwrote them. faults: number of memory pages that the system read from disk while the process
    waited. experts: for each expert of this rank, the number of tokens that it computed, over all layers.
    """

    kind: ClassVar[str] = "step"
    step: int
    start_ns: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    traffic: tuple[Traffic, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    own_seconds: float = 0.0
    lost: int = 0
    span: int = 1
    examining: float = 0.0
    faults: float = 0.0
    experts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outside(Record):
    """Traffic between two steps, or without a training. step: number of finished steps at that time."""

    kind: ClassVar[str] = "outside"
    step: int
    traffic: tuple[Traffic, ...] = ()


@dataclass(frozen=True)
class TimedCall:
    """A collective or message in a step.

    place: number of the call in its group, from 1, the same on all ranks of the group. Messages from one rank to
    another have their own numbers. issued: time of the call, in ns. waited: time when this rank began to wait for it,
    in ns; None: not known. done: time when the call was complete, in ns; None: not known.
    """

    op: str
    group: str
    peer: int | None
    place: int
    bytes: int
    issued: int
    waited: int | None = None
    done: int | None = None
    blocked: int = 0


@dataclass(frozen=True)
class PipelineOp:
    """A forward ("F") of a micro-batch, a backward ("B"), or half of a backward. Times are in ns.

    The halves are the gradient of the input ("I") and the gradients of the weights ("W").
    """

    op: str
    stage: int
    micro: int
    start_ns: int
    stop_ns: int


@dataclass(frozen=True)
class Detail(Record):
    """All operations of one step. Only some steps are recorded in such detail.

    laps: (activity, start_ns, stop_ns) of the training thread, without gaps. calls: a row for each collective and
    message.
    """

    kind: ClassVar[str] = "detail"
    step: int
    laps: tuple[tuple[str, int, int], ...] = ()
    calls: tuple[TimedCall, ...] = ()
    pipeline: tuple[PipelineOp, ...] = ()

    @property
    def inside(self) -> tuple[tuple[str, int, int], ...]:
        """Return the laps without those outside of the step, such as a live cell. Later laps move to close the gap."""
        kept, away = [], 0
        for state, start, stop in self.laps:
            if state == OUTSIDE:
                away += stop - start
            else:
                kept.append((state, start - away, stop - away))
        return tuple(kept)

    @property
    def span(self) -> float:
        """Return the seconds from the beginning of the first lap to the end of the last one."""
        laps = self.inside
        return (laps[-1][2] - laps[0][1]) / 1e9 if laps else 0.0


@dataclass(frozen=True)
class MemoryPart:
    """A part of the memory at the peak of a step.

    kind: "parameters", "gradients", "optimizer" or "buffers"; "activations": tensors that forward keeps for backward;
    "buckets": tensors that are sent, received or gathered; "working": gradients of activations, and temporary tensors
    of an operation or of the optimizer; "other": unknown. module: the module that the part belongs to, such as
    "blocks.*.mlp", or "". The same module of all blocks counts as one, with a star instead of the number. bytes: the
    size of the part.
    """

    kind: str
    module: str
    bytes: int


MEMORY_KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations", "buckets", "working", "other")
"""The kinds of a MemoryPart."""


@dataclass(frozen=True)
class MemoryRecord(Record):
    """Bytes of a rank after a backward pass. Tensors that share memory count once.

    peak: the largest number of bytes during a step; 0 if not counted. On a GPU, these are bytes in its allocator. On
    the CPU, they are bytes of torch's storages. now: on a GPU, bytes in its allocator. On the CPU, bytes of the
    process, including Header.base_bytes. source: the kind of the device; on the CPU, "storages". In records of older
    releases, source is "rss", and peak is the peak of the process. named: the parts of the peak, the largest first;
    empty if only the sum is known.
    """

    kind: ClassVar[str] = "memory"
    step: int
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    now: int = 0
    peak: int = 0
    source: str = "storages"
    named: tuple[MemoryPart, ...] = ()

    @property
    def at_rest(self) -> int:
        """Return the bytes that the rank holds between two steps, including gradients."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def activations(self) -> int | None:
        """Return the bytes at the peak above `at_rest`: activations, buffers, padding. None if not counted."""
        return max(0, self.peak - self.at_rest) if self.peak and self.source != "rss" else None


@dataclass(frozen=True)
class GpuHealth:
    """The state of a GPU. None: not reported by the driver. busy: share of time in use. slowed: why its clocks are
    low."""

    uuid: str
    index: int
    mhz: float | None = None
    top_mhz: float | None = None
    celsius: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    busy: float | None = None
    slowed: str = ""


@dataclass(frozen=True)
class HealthRecord(Record):
    """The state of a rank at one moment. The first rank of a host also records load, cores, mhz and gpus.

    cpu: number of cores that this process used on average since the last record. rss: bytes of the process in memory.
    gpu: UUID of the rank's GPU, or "". load: number of processes of the host that run or are ready to run, averaged
    over a minute. mhz: mean clock of the cores, in MHz.
    """

    kind: ClassVar[str] = "health"
    step: int
    ns: int = 0
    cpu: float = 0.0
    rss: int = 0
    gpu: str = ""
    load: float | None = None
    cores: int = 0
    mhz: float | None = None
    gpus: tuple[GpuHealth, ...] = ()


@dataclass(frozen=True)
class EventRecord(Record):
    """An event, such as a switch or a failure. event: "kind", and the fields of its class in nbkit.records.events."""

    kind: ClassVar[str] = "event"
    step: int
    ns: int = 0
    event: dict[str, Any] = field(default_factory=dict)


_KINDS: dict[str, type[Record]] = {
    cls.kind: cls for cls in (Header, Group, StepRecord, Outside, Detail, MemoryRecord, HealthRecord, EventRecord)
}
_ROWS: dict[str, type] = {
    "traffic": Traffic,
    "calls": TimedCall,
    "pipeline": PipelineOp,
    "gpus": GpuHealth,
    "named": MemoryPart,
}
_FIELDS = {kind: tuple(column.name for column in fields(kind)) for kind in _KINDS.values()}
_COLUMNS = {row: tuple(column.name for column in fields(row)) for row in _ROWS.values()}
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode  # json.dumps would make an encoder for each line


def to_line(record: Record) -> str:
    """Return a line of JSON with its newline. Rows of tables are lists. Seconds are rounded to 0.1 microseconds."""
    values: dict[str, Any] = {"kind": record.kind}
    for column in _FIELDS[type(record)]:
        value = getattr(record, column)
        if (row := _ROWS.get(column)) is not None:
            value = [[_short(getattr(one, name)) for name in _COLUMNS[row]] for one in value]
        elif isinstance(value, dict):
            value = {key: _short(one) for key, one in value.items()}
        values[column] = _short(value)
    return _encode(values) + "\n"


def from_line(line: str | bytes) -> Record | None:
    """Return the record of a line.

    Returns None if the line is incomplete, or if another release has written a kind or format that is unknown here.
    """
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("kind")]
        if kind is Header and values.get("format", 1) != FORMAT:
            return None
        known = _FIELDS[kind]
        for name, row in _ROWS.items():
            if name in values:
                width = len(_COLUMNS[row])
                values[name] = tuple(row(*one[:width]) for one in values[name])
        if "laps" in values:
            values["laps"] = tuple((state, start, stop) for state, start, stop in values["laps"])
        if "members" in values:
            values["members"] = tuple(values["members"])
        return kind(**{name: value for name, value in values.items() if name in known})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _short(value: Any) -> Any:
    # Small numbers, such as learning rates, keep their digits. Seconds need no picoseconds.
    if not isinstance(value, float) or value != value or value == 0.0:
        return value
    return round(value, 7) if abs(value) >= 1e-3 else float(f"{value:.6g}")
