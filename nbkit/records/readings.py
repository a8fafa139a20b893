"""Figures from the records of all ranks: the parts of each rank's step, late ranks with the cause, traffic per axis.

This is arithmetic on nbkit.records.records. The widget, TensorBoard, the terminal and a report all use it.

`late_rank` finds the rank that the others wait for. A rank is late if its own work takes longer than that of the ranks
that do the same work, and these are idle for as long. Ranks along dp, cp and tp do the same work. Stages of a pipeline
do not: a rank with more work than other stages is named only if it costs much more time than a rank that is late
compared to its peers. If no rank works longer, but transfers of some ranks take longer, all ranks at that slow link are
named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from nbkit.records.records import Group, StepRecord, Traffic

_OWN = ("data", "compute", "optimizer", "other")
_MUCH_MORE = 3.0  # a late stage is named if it costs this factor more than any rank that is late among its peers
_SHARE = 0.5  # the share of the others' waiting that a cause must explain


@dataclass(frozen=True)
class Bar:
    """Seconds of one rank's step. All parts add up to `seconds`.

    exposed: idle during transfers. waiting: idle because another rank of the group had not begun the operation yet.
    bubble: idle in the pipeline's schedule. other: everything else. peers: the ranks that do the same work, including
    this one; empty if unknown. examining: seconds for which nbkit examined strategies at the same time; they are not
    part of the step. faults: pages of memory that were read from disk.
    """

    rank: int
    seconds: float
    compute: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    peers: tuple[int, ...] = ()
    examining: float = 0.0
    faults: float = 0.0

    @property
    def idle(self) -> float:
        """Return the seconds for which the rank waited for other ranks."""
        return self.waiting + self.bubble

    @property
    def own(self) -> float:
        """Return the seconds of the rank's own work."""
        return self.data + self.compute + self.optimizer + self.other


@dataclass(frozen=True)
class Late:
    """The rank that the others wait for. seconds: their wait, per step. cause: the part of its step that is longer.

    beside: the other ranks at the same slow link, if the cause is "exposed". took: seconds of that part on the rank.
    twins: the other ranks that do the same work. twins_took: seconds of the part on the twins; 0 if there are none.
    others_took: seconds of the part on the ranks that do other work, or on all others if there are none. All seconds
    are those of the bars. examining: how many seconds longer nbkit examined strategies on this rank than on the others.
    faults: how many more pages of memory were read from disk on it.
    """

    rank: int
    seconds: float
    cause: str
    beside: tuple[int, ...] = ()
    took: float = field(default=0.0, compare=False)
    twins: tuple[int, ...] = field(default=(), compare=False)
    twins_took: float = field(default=0.0, compare=False)
    others_took: float = field(default=0.0, compare=False)
    examining: float = field(default=0.0, compare=False)
    faults: float = field(default=0.0, compare=False)

    @property
    def by_nbkit(self) -> bool:
        """Return True if the time for which nbkit examined strategies on the rank explains why it is late."""
        return self.examining >= self.longer and self.cause not in ("exposed", "data")

    @property
    def by_disk(self) -> bool:
        """Return True if the rank is late because the system reads its memory from disk."""
        return self.cause in ("compute", "optimizer", "other") and faults_take(self.faults) >= self.longer / 4

    @property
    def alone(self) -> bool:
        """Return True if its twins are not late too. Then its share of the work is not the cause."""
        return bool(self.twins) and self.took - self.twins_took >= self.seconds / 2

    @property
    def elsewhere(self) -> float:
        """Return the seconds of the part on its twins, or on others if the twins are late too."""
        return self.twins_took if self.alone else self.others_took

    @property
    def longer(self) -> float:
        """Return the seconds by which the part is longer than `elsewhere`.

        Both are first rounded to three digits, as they are shown, so that the shown numbers have this difference.
        """
        return _shown(self.took) - _shown(self.elsewhere)


_FAULT_S = 1e-4
"""The least seconds to read a page from a fast disk."""


def faults_take(faults: float) -> float:
    """Return the least seconds to read this number of pages from disk."""
    return faults * _FAULT_S


def _shown(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def late_rank(of: Sequence[Bar], *, at_least: float = 0.05) -> Late | None:
    """Return the rank that the others wait for, if the median of their idle times exceeds its own by enough.

    at_least: the share of a step by which it must exceed that.
    """
    if len(of) < 2:
        return None
    floor = at_least * median(bar.seconds for bar in of)
    by_peers: dict[tuple[int, ...], list[Bar]] = {}
    for bar in of:
        by_peers.setdefault(bar.peers, []).append(bar)
    found = [late for those in by_peers.values() if (late := _late_among(those, floor)) is not None]
    overall = _late_among(of, floor)
    usual = max((late.seconds for late in found), default=0.0)
    if overall is not None and (overall.cause == "exposed" or overall.seconds >= _MUCH_MORE * usual):
        found.append(overall)
    late = max(found, key=lambda late: late.seconds, default=None)
    return _beside_others(late, of) if late is not None else None


def _beside_others(late: Late, of: Sequence[Bar]) -> Late:
    by_rank = {bar.rank: bar for bar in of}
    here = by_rank[late.rank]
    twins = [by_rank[rank] for rank in here.peers if rank in by_rank and rank not in (late.rank, *late.beside)]
    others = [bar for bar in of if bar.rank not in (late.rank, *late.beside)]
    rest = [bar for bar in others if bar not in twins] or others

    def usual(bars: Sequence[Bar]) -> float:
        return median(getattr(bar, late.cause) for bar in bars) if bars else 0.0

    return replace(
        late,
        took=getattr(here, late.cause),
        twins=tuple(bar.rank for bar in twins),
        twins_took=usual(twins),
        others_took=usual(rest),
        examining=here.examining - (median(bar.examining for bar in others) if others else 0.0),
        faults=here.faults - (median(bar.faults for bar in others) if others else 0.0),
    )


def _late_among(of: Sequence[Bar], floor: float) -> Late | None:
    if len(of) < 2:
        return None
    first = min(of, key=lambda bar: bar.idle)
    others = [bar for bar in of if bar is not first]
    behind = median(bar.idle for bar in others) - first.idle
    if behind <= floor:
        return None
    if first.own - median(bar.own for bar in others) >= _SHARE * behind:
        excess = {part: getattr(first, part) - median(getattr(bar, part) for bar in others) for part in _OWN}
        return Late(first.rank, behind, max(excess, key=lambda part: excess[part]))
    # No rank works longer. But some have longer transfers, and the others wait for them.
    usual = min(bar.exposed for bar in others)
    if first.exposed - usual < _SHARE * behind:
        return None
    beside = tuple(bar.rank for bar in others if bar.exposed - usual >= _SHARE * behind)
    return Late(first.rank, behind, "exposed", beside)


MESSAGES = ("send", "recv", "batch")
BACKUP = "backup"
"""The axis of the messages that back up the state of a rank. They do not count as sent by a strategy."""
_ALIKE = ("dp", "shard", "replicate", "ep", "edp", "cp", "tp")

Steps = Mapping[int, StepRecord]  # rank -> its record, all of the same step
Members = Mapping[str, Sequence[int]]  # label of a group -> global ranks in it


@dataclass(frozen=True)
class TrafficRow:
    """An operation on one axis, per step, summed over groups and ranks. calls: the average number of calls of a rank.

    bytes: the size of the tensors that ranks give to it. sent: bytes that they send for it, see `sent_bytes`; for
    receives, the bytes received. seconds: mean duration of a call, including the wait for late peers; None if no call
    was timed. algbw, busbw: bytes/s as nccl-tests define them (busbw: the load of each link). overlap: the share of the
    duration in which the rank did something else; None if no call was timed. blocked: seconds for which the ranks were
    idle because of it.
    """

    op: str
    axis: str
    calls: float
    bytes: float
    seconds: float | None
    algbw: float | None
    busbw: float | None
    overlap: float | None
    blocked: float = 0.0
    sent: float = 0.0


@dataclass(frozen=True)
class TrafficMatrix:
    """Bytes from rank to rank in a step. sent: of messages, exact. modelled: of collectives, as if all were rings."""

    sent: tuple[tuple[float, ...], ...]
    modelled: tuple[tuple[float, ...], ...]


def members_of(groups: Iterable[Group]) -> dict[str, tuple[int, ...]]:
    """Return {label: global ranks}."""
    return {group.label: group.members for group in groups}


def bars(steps: Steps, members: Members) -> list[Bar]:
    """Return the bar of each rank whose step was measured.

    Waiting is separated from transfer in this way: the rank of a group that was idle the least for an operation came
    last, so its idle time was transfer. The additional idle time of other ranks was waiting for peers. This is a lower
    bound if different ranks are late in turn within one step.
    """
    least: dict[tuple[str, str], float] = {}
    here: dict[str, int] = {}
    for record in steps.values():
        for row in record.traffic:
            if _collective(row):
                key = row.op, row.group
                least[key] = min(least.get(key, row.blocked), row.blocked)
    for label, ranks in members.items():
        here[label] = sum(rank in steps for rank in ranks)
    peers = _peers(steps, members)
    made = []
    for rank, record in sorted(steps.items()):
        if not record.parts:
            continue
        waiting = sum(
            row.blocked - least[row.op, row.group]
            for row in record.traffic
            # If records of other ranks are missing, it is unknown which rank was late.
            if _collective(row) and row.group in members and here[row.group] == len(members[row.group])
        )
        parts = dict(record.parts)
        exposed = parts.pop("exposed", 0.0)
        waiting = min(waiting, exposed)
        times = {
            "exposed": exposed - waiting,
            "waiting": waiting,
            "examining": record.examining,
            "faults": record.faults,
        }
        made.append(Bar(rank, record.seconds, peers=peers[rank], **times, **parts))
    return made


MEDIAN_OF = 20  # steps
STANDS = 5  # steps for which a figure is shown unchanged


def usual_steps(newest: int, first: int) -> range:
    """Return the numbers of the steps whose medians describe a strategy as of step `newest`.

    first: the first step under the strategy. This step also does work that later steps need not repeat, so it counts
    only if it is the only one. Every view uses these steps. They stay the same for five steps, so that views that are
    drawn at different times show the same numbers.
    """
    first, ends = min(first + 1, newest), newest - newest % STANDS
    return range(max(ends - MEDIAN_OF + 1, first), ends + 1) if ends >= first else range(first, newest + 1)


def usual_bars(steps: Sequence[Steps], members: Members) -> list[Bar]:
    """Return the median of each part over several steps, for each rank, so that one unusual step changes nothing.

    The length of a bar is the seconds from step to step, as in tokens per second. Time between two steps is in "other".
    Medians of parts do not add up to the median of the step, so all are scaled by the same factor to do so.
    """
    usual = median(clock(one) for one in steps) if steps and all(map(clock, steps)) else None
    every: dict[int, list[Bar]] = {}
    for one in steps:
        for bar in bars(one, members):
            every.setdefault(bar.rank, []).append(bar)
    names = [name for name in Bar.__dataclass_fields__ if name not in ("rank", "peers")]
    return [
        adding_up(
            Bar(rank, peers=those[-1].peers, **{name: median(getattr(bar, name) for bar in those) for name in names}),
            usual,
        )
        for rank, those in sorted(every.items())
    ]


def clock(of: Steps) -> float:
    """Return the seconds from the previous step to this one; 0 if they were not recorded."""
    seconds = of[min(of)].numbers.get("seconds")
    return float(seconds) if isinstance(seconds, (int, float)) else 0.0


def adding_up(bar: Bar, by_clock: float | None) -> Bar:
    """Return `bar` with parts that add up to its seconds. These are `by_clock` if that is known."""
    names = set(Bar.__dataclass_fields__) - {"rank", "seconds", "peers", "examining", "faults"}
    parts = {name: getattr(bar, name) for name in names}
    whole, seconds = sum(parts.values()), bar.seconds if by_clock is None else by_clock
    if whole <= 0:
        return bar
    measured = min(bar.seconds, seconds)
    parts = {name: value * measured / whole for name, value in parts.items()}
    return replace(bar, seconds=seconds, **{**parts, "other": parts["other"] + seconds - measured})


def table(steps: Steps, members: Members, *, near: Iterable[Steps] = ()) -> list[TrafficRow]:
    """Return the operations by axis, the most bytes first. Messages count on the rank that sends them.

    near: other steps of the same strategy. An operation that was not timed in `steps` gets its time from the first of
    these steps in which it was timed.
    """
    every: dict[tuple[str, str], list[Traffic]] = {}
    for record in steps.values():
        for row in record.traffic:
            every.setdefault((row.op, row.axis), []).append(row)
    made = []
    for (op, axis), rows in every.items():
        calls, size = sum(row.calls for row in rows), sum(row.bytes for row in rows)
        timed, seconds = sum(row.timed for row in rows), sum(row.seconds for row in rows)
        # Bytes and waiting of the timed calls, under the assumption that calls of one kind are equal.
        moved = [(row.bytes * row.timed / row.calls, len(members.get(row.group, (0,)))) for row in rows if row.calls]
        alg = sum(size * _whole(op, n) for size, n in moved)
        bus = sum(size * _whole(op, n) * _bus_factor(op, n) for size, n in moved)
        stood = sum(row.blocked * row.timed / row.calls for row in rows if row.calls)
        overlap = max(0.0, 1 - stood / seconds) if timed and seconds > 0 else None
        made.append(
            TrafficRow(
                op,
                axis,
                calls / max(len(steps), 1),
                size,
                seconds / timed if timed else None,
                alg / seconds if timed and seconds > 0 else None,
                bus / seconds if timed and seconds > 0 else None,
                overlap,
                sum(row.blocked for row in rows),
                sum(row.bytes if row.op == "recv" else sent_by(row, members) for row in rows),
            )
        )
    for other in near:
        if all(row.seconds is not None for row in made):
            break
        known = {(row.op, row.axis): row for row in table(other, members)}
        made = [_timed_as(row, known.get((row.op, row.axis))) for row in made]
    return sorted(made, key=lambda row: -row.bytes)


def _timed_as(row: TrafficRow, other: TrafficRow | None) -> TrafficRow:
    """Return `row` with the times of the same operation in another step, scaled to the size of its calls."""
    if row.seconds is not None or other is None or other.seconds is None:
        return row
    larger = (row.bytes / row.calls) / (other.bytes / other.calls) if row.calls and other.bytes else 1.0
    alg, bus = (None if rate is None else rate * larger for rate in (other.algbw, other.busbw))
    return replace(row, seconds=other.seconds, algbw=alg, busbw=bus, overlap=other.overlap)


def sent_bytes(op: str, given: float, ranks: int) -> float:
    """Return the bytes that a rank sends for an operation of a group of `ranks` ranks.

    given: bytes of the tensors that the rank gives to it. A message is sent as it is. A collective counts as a ring; an
    all-to-all sends to each peer. Every view of "sent" uses this function, and so do the planner's formulas.
    """
    if op in ("recv", "batch"):  # a receive, and the wait for several messages
        return 0.0
    if op == "send":
        return given
    return given * _whole(op, ranks) * _bus_factor(op, ranks) if ranks > 1 else 0.0


def sent_by(row: Traffic, members: Members) -> float:
    """Return the bytes that a rank sends for a row of its traffic; see `sent_bytes`."""
    return sent_bytes(row.op, row.bytes, len(members.get(row.group, ())))


def busiest(steps: Steps, members: Members) -> float:
    """Return the bytes that the busiest rank sends in a step, without backups."""
    return max((sum(sent_by(row, members) for row in one.traffic if row.axis != BACKUP) for one in steps.values()),
               default=0.0)  # fmt: skip


def traffic_matrix(steps: Steps, members: Members, world_size: int) -> TrafficMatrix:
    """Return the bytes from each rank (row) to each other rank (column) in this step.

    world_size: the current one; the step may have had more ranks.
    """
    rows = [row for record in steps.values() for row in record.traffic]
    named = [*steps, *(row.peer or 0 for row in rows), *(one for row in rows for one in members.get(row.group, ()))]
    size = max([world_size, *(rank + 1 for rank in named)])
    sent = [[0.0] * size for _ in range(size)]
    modelled = [[0.0] * size for _ in range(size)]
    for rank, record in steps.items():
        for row in record.traffic:
            if row.op == "send" and row.peer is not None and row.peer >= 0:
                sent[rank][row.peer] += row.bytes
            elif _collective(row):
                _model(row, rank, members, modelled)
    return TrafficMatrix(tuple(map(tuple, sent)), tuple(map(tuple, modelled)))


def _peers(steps: Steps, members: Members) -> dict[int, tuple[int, ...]]:
    """Return {rank: the ranks that do the same work, including itself}. Groups of axes other than pp connect them."""
    axes = {row.group: row.axis for record in steps.values() for row in record.traffic}
    if "pp" not in axes.values():
        return dict.fromkeys(steps, tuple(sorted(steps)))
    # Groups of the whole world contain all stages, so they do not count.
    joined = [set(members.get(group, ())) for group, axis in axes.items() if axis in _ALIKE]
    found: dict[int, tuple[int, ...]] = {}
    for rank in steps:
        if rank not in found:
            those = {rank}
            while more := {one for group in joined if group & those for one in group} - those:
                those |= more
            found |= dict.fromkeys(those, tuple(sorted(those)))
    return found


def _collective(row: Traffic) -> bool:
    return row.op not in MESSAGES


def _whole(op: str, n: int) -> float:
    """Return the factor from one rank's bytes to the bytes that nccl-tests count, such as a whole all-gather."""
    return n if op in ("all_gather", "gather", "scatter") else 1


def _bus_factor(op: str, n: int) -> float:
    if op == "all_reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter") else 1.0


def _model(row: Traffic, rank: int, members: Members, into: list[list[float]]) -> None:
    """Add the bytes that this rank sends to its right neighbour in a ring, or to everyone in an all-to-all."""
    those, sent = members.get(row.group, ()), sent_by(row, members)
    if len(those) < 2 or rank not in those:
        return
    if row.op == "all_to_all":
        for other in those:
            if other != rank:
                into[rank][other] += sent / (len(those) - 1)
        return
    into[rank][those[(those.index(rank) + 1) % len(those)]] += sent
