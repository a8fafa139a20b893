"""Delays that are put into a training, and found again in what it has recorded: where, on which rank, how long.

A delay is taken once in each step: in a rank's loader, in its compute, or in a transfer between two ranks. The figure
is by how much the part of the step where it must show is longer, median over steps, than in steps without it. Ranks
that sleep need no cores. Beside it: what is named of the first three steps: of a delay on a rank, who is marked as
late and why; of one in a link, what `largest_loss` names: that link, or the part of the step where all stand at it.
Then pipelines whose stages sleep, by the bubble that the tab shows of their records and that of the ideal timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.forked import Ranks
from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row, absolute
from nbkit import recordfile
from nbkit.advice import largest_loss
from nbkit.lateness import Bar, Late, late_rank
from nbkit.links import Link, links, slow_link
from nbkit.notebook.board.plugin import moments
from nbkit.notebook.board.plugin.following import Run
from nbkit.readings import bars, members_of, usual_bars
from nbkit.records import Detail, Group, Header, Record, StepRecord
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy

SIZE = {"width": 32, "layers": 4, "block": 16, "batch": 8}
DELAY, WITHIN = 0.03, 0.1
ROUNDS, STEPS, NAMED_WITHIN = 3, 8, 3
REMAINDER = 0.05
PARTS = ("data", "compute", "optimizer", "other", "exposed", "link")
STRATEGIES = {2: ("ddp", "zero3", "tp", "pp"), 4: ("dp=2 tp=2", "dp=2 pp=2", "tp=2 pp=2", "zero3")}
PIPELINES = (("gpipe", 4, 8), ("1f1b", 2, 8), ("1f1b", 4, 8), ("interleaved", 4, 8), ("zb", 4, 8), ("zbv", 4, 8))
UNIT, POINTS, PIPELINE_STEPS = 0.05, 0.02, 4  # at 20 ms, what the executor takes is 3 points


@dataclass(frozen=True)
class Delay:
    """where: as telemetry_ranks' train takes it. part: of the step, where it must show on `ranks`."""

    where: str
    ranks: tuple[int, ...]
    part: str

    @property
    def words(self) -> str:
        if self.part in ("data", "compute"):
            return f"in the {'loader' if self.part == 'data' else 'compute'} of rank {self.ranks[0]}"
        return f"in a transfer between ranks {self.ranks[0]} and {self.ranks[-1]} on {self.where}"


class Recorded:
    """The records of every rank of a run."""

    def __init__(self, folder: Path) -> None:
        every: dict[int, list[Record]] = {
            rank: recordfile.read_since(path)[0] for rank, path in recordfile.rank_files(folder).items()
        }
        self.members = members_of(one for those in every.values() for one in those if isinstance(one, Group))
        self.offsets = {
            rank: one.offset_ns for rank, those in every.items() for one in those if isinstance(one, Header)
        }
        self.steps = _by_step(every, StepRecord)
        self.details = _by_step(every, Detail)

    def told(self, steps: Sequence[int], delay: Delay) -> Link | Late | str:
        """What the tab names of these steps: of a rank's delay, who is marked as late; of a link's, what the sentence
        says costs the most, by the last one's moments."""
        of = usual_bars([self.steps[step] for step in steps], self.members)
        if delay.part in ("data", "compute"):
            return late_rank(of) or "nobody"
        return largest_loss(of, slow=slow_link(self.links(steps[-1]), median(bar.seconds for bar in of)))

    def links(self, step: int) -> list[Link]:
        """Between the stages of a pipeline."""
        return links(self.details[step], self.offsets)

    def seconds(self, step: int, rank: int, source: int) -> dict[str, float]:
        """Part of the step -> seconds; "link": of transfers from `source` that this rank stood still for."""
        bar: Bar = next(bar for bar in bars(self.steps[step], self.members) if bar.rank == rank)
        stood = sum(link.seconds for link in self.links(step) if (link.source, link.target) == (source, rank))
        return {part: stood if part == "link" else getattr(bar, part) for part in PARTS}


def run(settings: Settings) -> list[Row]:
    """A row for each strategy and delay, one for each pipeline."""
    rows = []
    for num in settings.sizes(tuple(STRATEGIES)):
        with Ranks("telemetry_truth_ranks", num, folder=settings.folder, **SIZE) as ranks:
            for name in STRATEGIES[num]:
                rows += _found(settings, ranks, num, name)
            for schedule, stages, micros in PIPELINES:
                if stages == num:
                    rows.append(_bubble(settings, ranks, schedule, stages, micros))
    return rows


def delays(strategy: Strategy) -> list[Delay]:
    """One of each kind, on ranks at different places, and one in a transfer along each axis."""
    last = strategy.mesh.size - 1
    found = [Delay("data", (last,), "data"), Delay("compute", (0,), "compute"), Delay("compute", (last,), "compute")]
    for axis in ("dp", "tp", "pp"):
        group = strategy.mesh.groups(axis)[0]
        if len(group) > 1:
            ends = (group[0], group[1]) if axis == "pp" else group
            found.append(Delay(axis, ends, "link" if axis == "pp" else "exposed"))
    return found


def _found(settings: Settings, ranks: Ranks, num: int, name: str) -> list[Row]:
    strategy = Strategy.parse(name, num)
    wanted = delays(strategy)
    folder = settings.folder / ranks.ask("prepare", strategy=name)[0]
    ranks.ask("train", steps=3)
    spans: list[tuple[Delay | None, int, int]] = []
    for _ in range(settings.count(ROUNDS)):
        for delay in wanted:
            spans.append((None, *ranks.ask("train", steps=STEPS)[0]))
            order = {"where": delay.where, "seconds": DELAY, "ranks": delay.ranks}
            spans.append((delay, *ranks.ask("train", steps=STEPS, **order)[0]))
    recorded = Recorded(folder)
    plain = [range(first + 1, last + 1) for which, first, last in spans if which is None]
    of = f"{name}, {num} ranks"
    return [_remainder(recorded, plain, of), *(_row(recorded, spans, delay, of, strategy) for delay in wanted)]


def _remainder(recorded: Recorded, plain: Sequence[range], of: str) -> Row:
    """What of a step is in none of the measured parts, where a step is short."""
    every = [bar for steps in plain for step in steps for bar in bars(recorded.steps[step], recorded.members)]
    step = f"step {median(bar.seconds for bar in every) * 1e3:.1f} ms"
    return absolute(f"remainder of a step, {of}", [bar.other / bar.seconds for bar in every], REMAINDER, "x", peer=step)


def _row(
    recorded: Recorded, spans: Sequence[tuple[Delay | None, int, int]], delay: Delay, of: str, strategy: Strategy
) -> Row:
    source = delay.ranks[0]
    shown = delay.ranks[-1:] if delay.part == "link" else delay.ranks
    longer: list[float] = []
    right = True
    named = []
    for (_, *plain), (which, *slow) in zip(spans[::2], spans[1::2], strict=True):
        if which != delay:
            continue
        for rank in shown:
            # The first step of a run also waits for what every run begins with.
            before, after = (_medians(recorded, first + 1, last, rank, source) for first, last in (plain, slow))
            excess = {part: after[part] - before[part] for part in PARTS}
            longer.append(excess[delay.part])
            right &= max(excess, key=lambda part: excess[part]) == delay.part
        named.append(recorded.told(range(slow[0] + 1, slow[0] + 1 + NAMED_WITHIN), delay))
    right_one = expected(delay, strategy)
    hits = sum(right_one(told) for told in named)
    figure = quantile(longer)
    near = abs(figure.middle / DELAY - 1) <= WITHIN
    return Row(
        f"{DELAY * 1e3:g} ms {delay.words}, {of}: {'of it found' if right else 'NOT found'} in {delay.part}",
        f"{figure.middle * 1e3:.1f} ms [{figure.low * 1e3:.1f}, {figure.high * 1e3:.1f}]",
        f"named in {NAMED_WITHIN} steps: {', '.join(map(_spoken, named))}",
        f"{figure.middle / DELAY:.3f}",
        "",
        f"1 ± {WITHIN:g}; named each time",
        near and right and hits == len(named),
        {"seconds": longer},
    )


def expected(delay: Delay, strategy: Strategy) -> Callable[[Link | Late | str], bool]:
    """Whether the right rank is named for the right cause. Where all ranks stand at the slow link, none is late."""
    if delay.part in ("data", "compute"):
        return lambda told: isinstance(told, Late) and (told.rank, told.cause) == (delay.ranks[0], delay.part)
    if delay.part == "link":
        return lambda told: isinstance(told, Link) and (told.source, told.target) == delay.ranks
    if len(delay.ranks) == strategy.mesh.size:
        return lambda told: told == "exposed"
    return lambda told: (
        isinstance(told, Late) and told.cause == "exposed" and {told.rank, *told.beside} == set(delay.ranks)
    )


def _spoken(told: Link | Late | str) -> str:
    if isinstance(told, Late):
        return f"{'+'.join(map(str, sorted((told.rank, *told.beside))))} ({told.cause})"
    return f"link {told.source} to {told.target}" if isinstance(told, Link) else told


def _medians(recorded: Recorded, first: int, last: int, rank: int, source: int) -> Mapping[str, float]:
    every = [recorded.seconds(step, rank, source) for step in range(first, last + 1)]
    return {part: median(one[part] for one in every) for part in PARTS}


def _bubble(settings: Settings, ranks: Ranks, schedule: str, stages: int, micros: int) -> Row:
    text = f"pp={stages} schedule={schedule} microbatches={micros}"
    folder = settings.folder / ranks.ask("prepare", strategy=text, unit=UNIT)[0]
    first, last = ranks.ask("train", steps=PIPELINE_STEPS)[0]
    found = Run(folder)
    found.refresh()
    seen = []
    for step in range(first + 1, last + 1):
        shown = moments.of_step(found, step, text)
        if shown is not None and shown["step"] == step:
            seen.append(shown["measured_bubble"])
    known = simulate(Schedule.of(schedule, stages, micros)).bubble
    figure = quantile(seen)
    return Row(
        f"bubble of {text}, stages that sleep, as the tab shows it",
        f"{figure.middle:.1%} [{figure.low:.1%}, {figure.high:.1%}]",
        f"ideal timeline {known:.1%}",
        "",
        "",
        f"± {POINTS * 100:g} points",
        abs(figure.middle - known) <= POINTS,
        {"bubble": seen},
    )


def _by_step(every: Mapping[int, Sequence[Record]], kind: type) -> dict[int, dict[int, Record]]:
    found: dict[int, dict[int, Record]] = {}
    for rank, those in every.items():
        for one in those:
            if isinstance(one, kind):
                found.setdefault(one.step, {})[rank] = one  # type: ignore[attr-defined]
    return found
