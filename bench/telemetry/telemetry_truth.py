"""Delays that are put into a training, and found again in what it has recorded: where, on which rank, how long.

A delay is taken once in each step: in a rank's loader, in its compute, or in a transfer between two ranks. The figure
is by how much the part of the step where it must show is longer, median over three steps, than in those without it
right before and after: what else the machine does slows all of them. Beside it: what is named of these three steps: of
a delay that only some ranks have, who is marked as late and why; of one that all stand at, or in a link between stages,
what `largest_loss` names.

The compute of these steps is known: its ranks sleep, which takes no core, and what the host does meanwhile hides behind
it, as it does behind a device. Where ranks compute on cores that they share, one that is delayed leaves its core to the
others, whose compute is shorter for it, so that nobody knows what is to be found. On two ranks, which may have a core
each, the same delays are put into a GPT that computes as well, and shown without a judgement. What of a step is in none
of the measured parts is held to its bar in both kinds.

Then pipelines whose stages sleep, by the bubble that the tab shows of their records and that of the ideal timeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import nbkit
from bench.pipeline.sleeping_rank import Along, Beside, until
from bench.rigs.forked import Ranks
from bench.rigs.jobs import config, data, token_loss
from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row, absolute
from nbkit.notebook.run import step_picture
from nbkit.notebook.run.follower import Run
from nbkit.rank.comm.delegating_group import COLLECTIVES, DelegatingGroup, live
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.world.world import World
from nbkit.records import record_file
from nbkit.records.readings import Bar, Late, bars, late_rank, members_of, usual_bars
from nbkit.records.records import Detail, Group, Header, Record, StepRecord
from nbkit.records.run_advice import PipelineLink, largest_loss, links, slow_link
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy

SIZE = {"width": 32, "layers": 4, "block": 16, "batch": 8}
COMPUTE = 0.09
"""Seconds of each rank's step in which its compute sleeps."""
DELAY, WITHIN = 0.03, 0.1
ROUNDS, STEPS = 6, 3
REMAINDER = 0.05
PARTS = ("data", "compute", "optimizer", "other", "exposed", "link")
STRATEGIES = {2: ("ddp", "zero3", "tp", "pp"), 4: ("dp=2 tp=2", "dp=2 pp=2", "tp=2 pp=2", "zero3")}
PIPELINES = (("gpipe", 4, 8), ("1f1b", 2, 8), ("1f1b", 4, 8), ("interleaved", 4, 8), ("zb", 4, 8), ("zbv", 4, 8))
UNIT, POINTS, PIPELINE_STEPS = 0.05, 0.02, 4  # at 20 ms, what the executor takes is 3 points


@dataclass(frozen=True)
class Delay:
    """where: as Worker.train of `telemetry` takes it. part: of the step, where it must show on `ranks`."""

    where: str
    ranks: tuple[int, ...]
    part: str

    @property
    def words(self) -> str:
        if self.part in ("data", "compute"):
            return f"in the {'loader' if self.part == 'data' else 'compute'} of rank {self.ranks[0]}"
        return f"in a transfer between ranks {self.ranks[0]} and {self.ranks[-1]} on {self.where}"


Span = tuple[Delay | None, range]
"""Steps that were trained one after the other, with this delay in each."""


class Recorded:
    """The records of every rank of a run."""

    def __init__(self, folder: Path) -> None:
        every: dict[int, list[Record]] = {
            rank: record_file.read_since(path)[0] for rank, path in record_file.rank_files(folder).items()
        }
        self.members = members_of(one for those in every.values() for one in those if isinstance(one, Group))
        self.offsets = {
            rank: one.offset_ns for rank, those in every.items() for one in those if isinstance(one, Header)
        }
        self.steps = _by_step(every, StepRecord)
        self.details = _by_step(every, Detail)

    def told(self, steps: Sequence[int], delay: Delay) -> PipelineLink | Late | str:
        """What the tab names of these steps: who is marked as late; where all stand at a link, and of one between
        stages, what the sentence says costs the most, by the last one's moments."""
        of = usual_bars([self.steps[step] for step in steps], self.members)
        if delay.part != "link" and len(delay.ranks) < len(of):
            return late_rank(of) or "nobody"
        return largest_loss(of, slow=slow_link(self.links(steps[-1]), median(bar.seconds for bar in of)))

    def links(self, step: int) -> list[PipelineLink]:
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
        with Ranks("telemetry.telemetry_truth", num, folder=settings.folder, **SIZE) as ranks:
            for name in STRATEGIES[num]:
                recorded, spans = _delayed(settings, ranks, num, name, COMPUTE)
                of = f"{name}, {num} ranks"
                rows.append(_remainder(recorded, spans, f"{of}, compute that sleeps {COMPUTE * 1e3:g} ms of it"))
                rows += [_row(each, of) for each in _findings(recorded, spans, Strategy.parse(name, num))]
                if num == 2:
                    recorded, spans = _delayed(settings, ranks, num, name, 0.0)
                    of = f"{of}, a GPT that computes"
                    rows.append(_remainder(recorded, spans, of))
                    rows.append(_shown(_findings(recorded, spans, Strategy.parse(name, num)), of))
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


def _delayed(settings: Settings, ranks: Ranks, num: int, name: str, compute: float) -> tuple[Recorded, list[Span]]:
    """The records of a training that is delayed in each way in turn, and its steps; between two, as many without."""
    folder = settings.folder / ranks.ask("prepare", strategy=name, compute=compute)[0]
    ranks.ask("train", steps=3)
    wanted = delays(Strategy.parse(name, num)) * settings.count(ROUNDS)
    spans: list[Span] = []
    for one in (None, *(each for delay in wanted for each in (delay, None))):
        order = {"where": one.where, "seconds": DELAY, "ranks": one.ranks} if one else {}
        first, last = ranks.ask("train", steps=STEPS + 1, **order)[0]
        # The first step of a run also waits for what every run begins with.
        spans.append((one, range(first + 1, last + 1)))
    return Recorded(folder), spans


def _remainder(recorded: Recorded, spans: Sequence[Span], of: str) -> Row:
    """What of a step without a delay is in none of the measured parts."""
    steps = [step for delay, those in spans if delay is None for step in those]
    every = [bar for step in steps for bar in bars(recorded.steps[step], recorded.members)]
    other, whole = (median(getattr(bar, name) for bar in every) * 1e3 for name in ("other", "seconds"))
    shares = [bar.other / bar.seconds for bar in every]
    return absolute(
        f"remainder of a step, {of}", shares, REMAINDER, "x", peer=f"{other:.2f} ms of a step of {whole:.1f} ms"
    )


@dataclass(frozen=True)
class Finding:
    """What was found of one delay. longer: seconds by round and rank. right: no other part of the step grew more.

    hits: how often the right one was named.
    """

    delay: Delay
    longer: list[float]
    right: bool
    named: list[PipelineLink | Late | str]
    hits: int

    @property
    def near(self) -> bool:
        return abs(quantile(self.longer).middle / DELAY - 1) <= WITHIN


def _findings(recorded: Recorded, spans: Sequence[Span], strategy: Strategy) -> list[Finding]:
    return [_finding(recorded, spans, delay, strategy) for delay in delays(strategy)]


def _finding(recorded: Recorded, spans: Sequence[Span], delay: Delay, strategy: Strategy) -> Finding:
    source = delay.ranks[0]
    shown = delay.ranks[-1:] if delay.part == "link" else delay.ranks
    grown: dict[str, list[float]] = {part: [] for part in PARTS}
    named = []
    for (_, before), (which, slow), (_, after) in zip(spans[:-1:2], spans[1::2], spans[2::2], strict=True):
        if which != delay:
            continue
        for rank in shown:
            usual, delayed = (_medians(recorded, steps, rank, source) for steps in ([*before, *after], slow))
            for part, seconds in grown.items():
                seconds.append(delayed[part] - usual[part])
        named.append(recorded.told(slow, delay))
    right = max(grown, key=lambda part: median(grown[part])) == delay.part
    return Finding(delay, grown[delay.part], right, named, sum(map(expected(delay, strategy), named)))


def _row(found: Finding, of: str) -> Row:
    delay, figure = found.delay, quantile(found.longer)
    return Row(
        f"{DELAY * 1e3:g} ms {delay.words}, {of}: {'of it found' if found.right else 'NOT found'} in {delay.part}",
        f"{figure.middle * 1e3:.1f} ms [{figure.low * 1e3:.1f}, {figure.high * 1e3:.1f}]",
        f"named of {STEPS} steps: {', '.join(map(_spoken, found.named))}",
        f"{figure.middle / DELAY:.3f}",
        "",
        f"1 ± {WITHIN:g}; named each time",
        found.near and found.right and found.hits == len(found.named),
        {"seconds": found.longer},
    )


def _shown(found: Sequence[Finding], of: str) -> Row:
    """Delays whose truth is not known to a tenth: what was found of them all, without a judgement."""
    near = sum(one.near for one in found)
    hits, names = sum(one.hits for one in found), sum(len(one.named) for one in found)
    each = {one.delay.words: quantile(one.longer).middle / DELAY for one in found}
    return Row(
        f"{DELAY * 1e3:g} ms {', '.join(each)}, {of}: {sum(one.right for one in found)} found in the right part",
        ", ".join(f"{share:.2f}" for share in each.values()),
        f"{near} of {len(found)} within {WITHIN:g}; named {hits} times of {names}",
        "",
        "",
        "",
        None,
        {one.delay.words: one.longer for one in found},
    )


def expected(delay: Delay, strategy: Strategy) -> Callable[[PipelineLink | Late | str], bool]:
    """Whether the right rank is named for the right cause. Where all ranks stand at the slow link, none is late."""
    if delay.part in ("data", "compute"):
        return lambda told: isinstance(told, Late) and (told.rank, told.cause) == (delay.ranks[0], delay.part)
    if delay.part == "link":
        return lambda told: isinstance(told, PipelineLink) and (told.source, told.target) == delay.ranks
    if len(delay.ranks) == strategy.mesh.size:
        return lambda told: told == "exposed"
    return lambda told: (
        isinstance(told, Late) and told.cause == "exposed" and {told.rank, *told.beside} == set(delay.ranks)
    )


def _spoken(told: PipelineLink | Late | str) -> str:
    if isinstance(told, Late):
        return f"{'+'.join(map(str, sorted((told.rank, *told.beside))))} ({told.cause})"
    return f"link {told.source} to {told.target}" if isinstance(told, PipelineLink) else told


def _medians(recorded: Recorded, steps: Sequence[int], rank: int, source: int) -> Mapping[str, float]:
    every = [recorded.seconds(step, rank, source) for step in steps]
    return {part: median(one[part] for one in every) for part in PARTS}


def _bubble(settings: Settings, ranks: Ranks, schedule: str, stages: int, micros: int) -> Row:
    text = f"pp={stages} schedule={schedule} microbatches={micros}"
    folder = settings.folder / ranks.ask("prepare", strategy=text, unit=UNIT)[0]
    first, last = ranks.ask("train", steps=PIPELINE_STEPS)[0]
    found = Run(folder)
    found.refresh()
    seen = []
    for step in range(first + 1, last + 1):
        shown = step_picture.of_step(found, step, text)
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


_LATE = ("allreduce", "_allgather_base", "allgather", "alltoall_base")

ANYONE, NOBODY = -1, -2

BLOCKS = 2
"""Of the model that sleeps: one for each stage of a pipeline."""


class Worker:
    """One job after the other. Its delay is taken in the steps after `slow` is called with one."""

    def __init__(self, *, width: int, layers: int, block: int, batch: int) -> None:
        World.join_from_env()
        self._config, self._batch = config(width, layers, block=block), batch
        self._delay = dict.fromkeys(("data", "compute", "link"), 0.0)
        self._undo: list[Callable[[], None]] = []
        self._taken: set[str] = set()
        self._busy_until = 0.0  # of what computes, in seconds of perf_counter

    def prepare(self, strategy: str, *, compute: float = 0.0, unit: float = 0.0) -> str:
        """Train `strategy` from here on; returns the directory of the run.

        compute: a model whose compute is so many seconds of sleep in each rank's step, a third of them forward, and
        next to nothing else; 0: a GPT, which computes. unit: a model of stages that sleep, so many seconds each.
        """
        self._heal()
        chosen = Strategy.parse(strategy, dist.get_world_size())
        self._per_row = compute / 3 / (self._batch / chosen.dp) / (BLOCKS / chosen.pp)
        stages = Schedule.of(chosen.schedule or "1f1b", chosen.pp, 1).num_stages if unit else 0
        self._trainer = Trainer(
            model=(lambda: Sleepers(stages, unit)) if unit else lambda: self._model(compute),
            loss=(lambda output, target: output.mean()) if unit else token_loss,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
            data=[(torch.zeros(1), torch.zeros(1))] * 64 if unit else data(self._config, 8 * self._batch),
            batch_size=self._batch,
            strategy=strategy,
            loading=nbkit.Loading(collate=self._collate),
            progress=False,
        )
        session = self._trainer.job.recorder._session
        assert session is not None
        session._detail_every = 1  # the moments of every step
        return str(self._trainer.run_dir)

    def train(
        self, steps: int, *, where: str = "", seconds: float = 0.0, ranks: tuple[int, ...] = ()
    ) -> tuple[int, int]:
        """(first, last) step of so many, with a delay of so many seconds in each on these ranks.

        where: "data", "compute", or the axis of the group of `ranks` whose next transfer of a step arrives that much
        later: a collective's on all of them, a message's on the last one, from the first one.
        """
        first = self._trainer.step + 1
        self._heal()
        slow = ""
        if dist.get_rank() in ranks:
            self._delay[where if where in self._delay else "link"] = seconds
            slow = "" if where in self._delay else where
        self._wrap(slow, ranks)
        self._trainer.fit(steps)
        return first, self._trainer.step

    def _model(self, compute: float) -> nn.Module:
        # Lambdas: a model is copied with what its hooks are bound to.
        model: Any = Small(self._config, lambda *args: self._compute(*args)) if compute else nbkit.GPT(self._config)
        for each in model.blocks:
            each.register_forward_pre_hook(lambda module, args: self._sleep("compute"))
        return model  # type: ignore[no-any-return]

    def _compute(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """The compute of a block on these rows, in which it sleeps: here, and twice as long before its backward."""
        seconds = self._per_row * len(output)
        self._take(seconds)
        if output.requires_grad:
            output.register_hook(lambda grad: self._take(2 * seconds))

    def _take(self, seconds: float) -> None:
        """So much more is computed, from where it was done with what came before.

        What the host does meanwhile is hidden behind it, as with a device: how long that takes hangs on who else is at
        the cores, which is nothing that a delay has to do with.
        """
        done = self._busy_until + seconds
        self._busy_until = max(done, time.perf_counter())
        until(done)

    def _ready(self) -> None:
        """There was nothing to compute until now."""
        self._busy_until = time.perf_counter()

    def _collate(self, samples: list[Any]) -> Any:
        self._taken.clear()  # a step begins
        self._sleep("data")
        batch = default_collate(samples)
        self._ready()
        return batch

    def _sleep(self, where: str) -> None:
        """Once a step."""
        if self._delay[where] and where not in self._taken:
            self._taken.add(where)
            if where != "compute" or not self._per_row:
                self._ready()
            self._take(self._delay[where])

    def _wrap(self, axis: str, ranks: tuple[int, ...]) -> None:
        """Whatever comes over a group is waited for through us; over the one of `ranks` on `axis` it comes late."""
        for group in live():
            slow = bool(axis) and group.seen.axis == axis and set(ranks) <= set(group.members)
            inner = group.inner
            group.inner = _Link(inner, self._arrived, self._source(axis, group, ranks) if slow else None)
            self._undo.append(lambda group=group, inner=inner: setattr(group, "inner", inner))  # type: ignore[misc]

    def _arrived(self, late: bool) -> None:
        if late:
            self._sleep("link")
        self._ready()

    def _source(self, axis: str, group: DelegatingGroup, ranks: tuple[int, ...]) -> int:
        """Whose messages come late here; ANYONE: collectives do; NOBODY."""
        if axis != "pp":
            return ANYONE
        return group.members.index(ranks[0]) if dist.get_rank() == ranks[-1] else NOBODY

    def _heal(self) -> None:
        while self._undo:
            self._undo.pop()()
        for where in self._delay:
            self._delay[where] = 0.0


class Small(nn.Module):
    """Blocks of an MLP of a few numbers each: whatever `compute` adds is what it computes.

    compute: a forward hook of each block's wider half, where every rank of a tensor axis holds all positions.
    """

    def __init__(self, of: nbkit.GPTConfig, compute: Callable[..., None]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(of.vocab, of.width)
        self.blocks = nn.ModuleList(MLP(of.width) for _ in range(BLOCKS))
        self.head = nn.Linear(of.width, of.vocab)
        for each in self.blocks:
            each.get_submodule("up").register_forward_hook(compute)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.relu(self.up(x)))
        return y


class Sleepers(nn.Module):
    """A stage's worth each: forward, the gradient of the input and that of the weight sleep `unit` seconds."""

    def __init__(self, stages: int, unit: float) -> None:
        super().__init__()
        self.begin = nn.Parameter(torch.zeros(1))  # so that the first stage's input has a gradient too
        self.blocks = nn.ModuleList(Sleeper(unit) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.begin
        for block in self.blocks:
            x = block(x)
        return x


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Along.apply(x, self.seconds) + Beside.apply(self.weight, self.seconds)
        return y


class _Link:
    """An inner group that tells `arrived` when something has come, and whether it comes late: what is from `source`."""

    def __init__(self, inner: Any, arrived: Callable[[bool], None], source: int | None) -> None:
        self._inner, self._arrived, self._source = inner, arrived, source

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._inner, name)
        if name in COLLECTIVES:
            late = self._source == ANYONE and name in _LATE
            return lambda *args: _Watched(own(*args), self._arrived, late)
        if name == "recv":
            return lambda tensors, peer, tag: _Watched(own(tensors, peer, tag), self._arrived, peer == self._source)
        return own


class _Watched(dist.Work):
    def __init__(self, inner: Any, arrived: Callable[[bool], None], late: bool) -> None:
        super().__init__()
        self._inner, self._arrived, self._late = inner, arrived, late

    def wait(self, *timeout: Any) -> Any:
        done = self._inner.wait(*timeout)
        self._arrived(self._late)
        return done

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def get_future(self) -> Any:
        return self._inner.get_future()
