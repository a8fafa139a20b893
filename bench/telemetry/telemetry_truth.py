"""Put delays into a training, and check that its records show them: where, on which rank, how long.

A delay is taken once in each step: in a rank's loader, in its compute, or in a transfer between two ranks. The figure
is how much longer the part of the step is in which the delay must show. It is the median of three steps, compared with
the steps without a delay right before and after, because load of the machine slows all of them. The row also shows what
the tab names in these steps. If only some ranks have the delay, that is the late rank and why. If all ranks have it, or
if it is in a link between stages, that is what `largest_loss` names.

The compute of these steps is known: the ranks sleep, which takes no core. Work of the host hides behind the sleep, as
it does behind a device. If ranks computed on shared cores, a delayed rank would leave its core to the others, whose
compute would become shorter, and nobody would know the right answer. Two ranks may have a core each. There the same
delays are also put into a GPT that computes, and shown without a judgement. In both kinds, the remainder of a step,
which is in none of the measured parts, has to meet a bar.

Pipelines whose stages sleep follow: the bubble that the tab shows from their records, and that of the ideal
timeline.
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
UNIT, POINTS, PIPELINE_STEPS = 0.05, 0.02, 4  # at 20 ms, the executor itself would take 3 points


@dataclass(frozen=True)
class Delay:
    """A delay to find. where: as `Worker.train` takes it. part: the part of the step in which it shows on `ranks`."""

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
        """Return what the tab names for these steps.

        If only some ranks have the delay: the rank that is marked as late. If all ranks have it, or if it is in a link
        between stages: what the tab's sentence says costs the most, by the moments of the last step.
        """
        of = usual_bars([self.steps[step] for step in steps], self.members)
        if delay.part != "link" and len(delay.ranks) < len(of):
            return late_rank(of) or "nobody"
        return largest_loss(of, slow=slow_link(self.links(steps[-1]), median(bar.seconds for bar in of)))

    def links(self, step: int) -> list[PipelineLink]:
        """Return the links between the stages of a pipeline in this step."""
        return links(self.details[step], self.offsets)

    def seconds(self, step: int, rank: int, source: int) -> dict[str, float]:
        """Return part of the step -> seconds. "link": seconds that this rank waited for transfers from `source`."""
        bar: Bar = next(bar for bar in bars(self.steps[step], self.members) if bar.rank == rank)
        stood = sum(link.seconds for link in self.links(step) if (link.source, link.target) == (source, rank))
        return {part: stood if part == "link" else getattr(bar, part) for part in PARTS}


def run(settings: Settings) -> list[Row]:
    """Return rows: for each strategy its remainder and each delay, for each pipeline its bubble."""
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
    """Return one delay of each kind, on ranks at different places, and one in a transfer along each axis."""
    last = strategy.mesh.size - 1
    found = [Delay("data", (last,), "data"), Delay("compute", (0,), "compute"), Delay("compute", (last,), "compute")]
    for axis in ("dp", "tp", "pp"):
        group = strategy.mesh.groups(axis)[0]
        if len(group) > 1:
            ends = (group[0], group[1]) if axis == "pp" else group
            found.append(Delay(axis, ends, "link" if axis == "pp" else "exposed"))
    return found


def _delayed(settings: Settings, ranks: Ranks, num: int, name: str, compute: float) -> tuple[Recorded, list[Span]]:
    """Train with each delay in turn, and as many steps without delay between them. Return records and steps."""
    folder = settings.folder / ranks.ask("prepare", strategy=name, compute=compute)[0]
    ranks.ask("train", steps=3)
    wanted = delays(Strategy.parse(name, num)) * settings.count(ROUNDS)
    spans: list[Span] = []
    for one in (None, *(each for delay in wanted for each in (delay, None))):
        order = {"where": one.where, "seconds": DELAY, "ranks": one.ranks} if one else {}
        first, last = ranks.ask("train", steps=STEPS + 1, **order)[0]
        # Leave out the first step of a run, which also has the start-up of the run.
        spans.append((one, range(first + 1, last + 1)))
    return Recorded(folder), spans


def _remainder(recorded: Recorded, spans: Sequence[Span], of: str) -> Row:
    """Return the row of the remainder: the share of a step without a delay that is in none of the measured parts."""
    steps = [step for delay, those in spans if delay is None for step in those]
    every = [bar for step in steps for bar in bars(recorded.steps[step], recorded.members)]
    other, whole = (median(getattr(bar, name) for bar in every) * 1e3 for name in ("other", "seconds"))
    shares = [bar.other / bar.seconds for bar in every]
    return absolute(
        f"remainder of a step, {of}", shares, REMAINDER, "x", peer=f"{other:.2f} ms of a step of {whole:.1f} ms"
    )


@dataclass(frozen=True)
class Finding:
    """The result of one delay. longer: seconds by round and rank. right: no other part of the step grew more.

    hits: how often the right rank and cause were named.
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
        f"{DELAY * 1e3:g} ms {delay.words}, {of}: delay {'found' if found.right else 'NOT found'} in {delay.part}",
        f"{figure.middle * 1e3:.1f} ms [{figure.low * 1e3:.1f}, {figure.high * 1e3:.1f}]",
        f"named in blocks of {STEPS} steps: {', '.join(map(_spoken, found.named))}",
        f"{figure.middle / DELAY:.3f}",
        "",
        f"1 ± {WITHIN:g}; named each time",
        found.near and found.right and found.hits == len(found.named),
        {"seconds": found.longer},
    )


def _shown(found: Sequence[Finding], of: str) -> Row:
    """Return one row for all delays, without a verdict, because the right answer is known only roughly."""
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
    """Return a check that the right rank is named with the right cause. If all ranks wait at a link, none is late."""
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
"""Blocks of the model that sleeps: one for each stage of a pipeline."""


class Worker:
    """A rank that trains one job after another. `train` says which delay its steps have."""

    def __init__(self, *, width: int, layers: int, block: int, batch: int) -> None:
        World.join_from_env()
        self._config, self._batch = config(width, layers, block=block), batch
        self._delay = dict.fromkeys(("data", "compute", "link"), 0.0)
        self._undo: list[Callable[[], None]] = []
        self._taken: set[str] = set()
        self._busy_until = 0.0  # the end of the compute so far, in seconds of perf_counter

    def prepare(self, strategy: str, *, compute: float = 0.0, unit: float = 0.0) -> str:
        """Make a training of `strategy` for the next steps, and return the directory of the run.

        compute: seconds. The model sleeps so long in each rank's step, a third of it in forward, and does next to
        nothing else. 0: a GPT, which computes. unit: seconds. The model has stages that sleep so long.
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
        session._detail_every = 1  # record the moments of every step
        return str(self._trainer.run_dir)

    def train(
        self, steps: int, *, where: str = "", seconds: float = 0.0, ranks: tuple[int, ...] = ()
    ) -> tuple[int, int]:
        """Train `steps` steps with a delay of `seconds` in each on `ranks`, and return the (first, last) step.

        where: "data", "compute", or an axis. On the axis, the next transfer of a step in the group of `ranks` arrives
        later: a collective on all of them, a message from the first one on the last one.
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
        # Lambdas: a copy of a model also copies the object that a bound method belongs to.
        model: Any = Small(self._config, lambda *args: self._compute(*args)) if compute else nbkit.GPT(self._config)
        for each in model.blocks:
            each.register_forward_pre_hook(lambda module, args: self._sleep("compute"))
        return model  # type: ignore[no-any-return]

    def _compute(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Sleep for the compute of a block on these rows: here, and twice as long before its backward."""
        seconds = self._per_row * len(output)
        self._take(seconds)
        if output.requires_grad:
            output.register_hook(lambda grad: self._take(2 * seconds))

    def _take(self, seconds: float) -> None:
        """Sleep for `seconds` of compute, counted from the end of the compute before.

        Work of the host is hidden behind it, as with a device. How long that work takes depends on who else uses the
        cores, and does not belong to a delay.
        """
        done = self._busy_until + seconds
        self._busy_until = max(done, time.perf_counter())
        until(done)

    def _ready(self) -> None:
        """Record that there was nothing to compute until now."""
        self._busy_until = time.perf_counter()

    def _collate(self, samples: list[Any]) -> Any:
        self._taken.clear()  # a step begins
        self._sleep("data")
        batch = default_collate(samples)
        self._ready()
        return batch

    def _sleep(self, where: str) -> None:
        """Sleep for the delay, once a step."""
        if self._delay[where] and where not in self._taken:
            self._taken.add(where)
            if where != "compute" or not self._per_row:
                self._ready()
            self._take(self._delay[where])

    def _wrap(self, axis: str, ranks: tuple[int, ...]) -> None:
        """Watch all waits of every group. Delay what arrives over the group of `ranks` on `axis`."""
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
        """Return whose messages arrive late here. ANYONE: all collectives. NOBODY: none."""
        if axis != "pp":
            return ANYONE
        return group.members.index(ranks[0]) if dist.get_rank() == ranks[-1] else NOBODY

    def _heal(self) -> None:
        while self._undo:
            self._undo.pop()()
        for where in self._delay:
            self._delay[where] = 0.0


class Small(nn.Module):
    """Blocks of a tiny MLP. Nearly all of their compute is the sleep of `compute`.

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
    """A block per stage. Forward, the gradient of the input and that of the weight each sleep `unit` seconds."""

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
    """An inner group that calls `arrived` when something has arrived, with True (late) if it is from `source`."""

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
