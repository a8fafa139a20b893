"""What a strategy gives the ranks to do and to send, of a model as formulas or as it was measured.

Of a model as it is cut along tp and cp the pieces are asked for once (`Known`). What is sent follows from sums over its
weights, for thousands of candidates; nbkit.planner.traffic says the same of each weight, and a test compares.

Hardware described in a line: "128 x 8 H100" is 128 nodes of 8 devices each; "8 A100" is one node.

Figures are those of the makers' public data sheets: dense bf16 (fp16 of the V100), one direction of a link. The network
is what such nodes commonly have for each device; `net=` in the line says otherwise: "2 x 8 H100 net=12.5GB/s".

Seconds of a step from the figures of data sheets, and how sure they are: the sum is nbkit/planner/step.py.

compute   multiplications at the share of the data sheet's rate that large ones reach, and the bytes that everything
          else reads and writes at that of the memory
links     bytes at the share of their rate, within a node and between nodes
optimizer reading and writing parameters, gradients and state

`Rates` are the three shares; one measured step calibrates the first (`calibrated`). The interval's ends are a data axis
that is hidden wholly or not at all, and shares that are some percent better or worse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Protocol

from nbkit.errors import UsageError
from nbkit.node_levels import BETWEEN
from nbkit.planner.job_facts import Facts
from nbkit.planner.link_speed import OperationSpeed
from nbkit.planner.peak import ModelPiece, PeakLine, Weights
from nbkit.planner.stages import partition, ranks_of_stages
from nbkit.planner.step import DATA, Lines, OperationPath, Parts, StepUnit, Work, step_parts
from nbkit.planner.traffic import Rest, TrafficTerm, summed
from nbkit.schedules import type_of
from nbkit.strategy import Strategy


@dataclass(frozen=True)
class Device:
    """flops: per second. memory: bytes. bandwidth: of its memory; near, far: bytes per second that it sends within a
    node, and to others."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    near: float
    far: float


DEVICES = {
    device.name: device
    for device in (
        Device("V100", 125e12, 32e9, 0.9e12, 150e9, 12.5e9),
        Device("A100", 312e12, 80e9, 2.039e12, 300e9, 25e9),
        Device("A100-40GB", 312e12, 40e9, 1.555e12, 300e9, 25e9),
        Device("H100", 989e12, 80e9, 3.35e12, 450e9, 50e9),
        Device("H200", 989e12, 141e9, 4.8e12, 450e9, 50e9),
        Device("B200", 2250e12, 180e9, 8e12, 900e9, 50e9),
        Device("L40S", 362e12, 48e9, 0.864e12, 32e9, 12.5e9),
        Device("RTX4090", 165e12, 24e9, 1.008e12, 32e9, 12.5e9),
        Device("MI300X", 1307e12, 192e9, 5.3e12, 448e9, 50e9),
    )
}
"""By name."""

_LINE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*x?\s*([a-z][\w-]*)((?:\s+\w+=\S+)*)", re.IGNORECASE)
_SPEED = re.compile(r"net=([\d.]+)\s*(GB/s|Gbit/s)", re.IGNORECASE)


@dataclass(frozen=True)
class Hardware:
    """nodes of `node` devices each."""

    nodes: int
    node: int
    device: Device

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.node

    @classmethod
    def parse(cls, text: str) -> Hardware:
        """Raises UsageError for a line that says no hardware, or a device that is not in the table."""
        found = _LINE.fullmatch(text.strip())
        names = {name.lower(): name for name in DEVICES}
        if found is None or found[3].lower() not in names or not int(found[2]) or found[1] == "0":
            raise UsageError(
                f"{text!r} says no hardware that is known.",
                numbers=f"devices: {', '.join(DEVICES)}",
                hint='on="128 x 8 H100", 128 nodes of 8; on="8 A100", one node',
            )
        device = DEVICES[names[found[3].lower()]]
        if found[4].strip():
            speed = _SPEED.fullmatch(found[4].strip())
            if speed is None or not float(speed[1]):
                raise UsageError(
                    f"{found[4].strip()!r} says no speed of a network.",
                    numbers="net=50GB/s or net=400Gbit/s, of each device",
                    hint=f'on="{text.removesuffix(found[4])} net=50GB/s"',
                )
            far = float(speed[1]) * (1e9 if speed[2].lower() == "gb/s" else 1e9 / 8)
            device = Device(device.name, device.flops, device.memory, device.bandwidth, device.near, far)
        return cls(int(found[1] or 1), int(found[2]), device)

    def __str__(self) -> str:
        return f"{self.nodes} x {self.node} {self.device.name}" if self.nodes > 1 else f"{self.node} {self.device.name}"


_DELAY = 20e-6
"""Seconds until a collective is under way."""
_CALIBRATED = 0.13
"""How far off a calibrated prediction may be: of the published steps in docs/plan.md, all but one are within it."""
_BACK = 2.0
"""A backward pass multiplies twice as much as its forward."""


@dataclass(frozen=True)
class Rates:
    """Shares of the data sheet's figures that are reached: of flops, of the memory's and of the links' bytes.

    spread: how far off they may be, each way.
    """

    flops: float = 0.65
    bandwidth: float = 0.8
    links: float = 0.75
    spread: float = 0.15


@dataclass(frozen=True)
class Load:
    """What a step gives the ranks to do.

    flops: of the forward passes of all blocks, of what one replica has of each. touched: bytes that the rest of them
    reads and writes. again: forwards that are computed once more in backward, as a share. stages: of the blocks, the
    share of each stage. terms: what the busiest rank sends. units, passes: see step_time.Work. updated: bytes that the
    optimizer reads and writes.
    """

    flops: float
    touched: float
    again: float
    stages: Sequence[float]
    terms: Sequence[TrafficTerm]
    updated: float
    units: Sequence[StepUnit] = ()
    passes: int = 1

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that leave the busiest rank, by axis, and its level where it has two."""
        found: dict[str, float] = {}
        for term in self.terms:
            name = f"{term.axis} {term.level}".strip()
            found[name] = found.get(name, 0.0) + term.wire
        return found


def spans(strategy: Strategy, axis: str, node: int) -> bool:
    """Return True if neighbours along `axis` sit on different nodes. axis: with its level behind it, where it has
    two."""
    mesh = strategy.mesh
    axis, _, level = axis.partition(" ")
    if level:
        return level == BETWEEN
    if axis in ("shard", "replicate"):
        inner, outer = mesh.stride("dp"), mesh.stride("dp") * strategy.shard
        return (outer if axis == "shard" else inner * strategy.dp) > node
    return mesh.stride(axis) * mesh.degree(axis) > node


def seconds(
    load: Load,
    strategy: Strategy,
    on: Hardware,
    rates: Rates,
    *,
    hidden: bool | None = None,
    lines: Lines | None = None,
) -> Parts:
    """Of a step. hidden: whether all of the data axis is, or nothing; None: as it is simulated.

    lines: `lines_of` the others, where they are there already.
    """
    device = on.device
    forward = load.flops / (device.flops * rates.flops) + load.touched / (device.bandwidth * rates.bandwidth)
    passes = 1 + _BACK + load.again
    work = Work(
        [[forward * passes * share for share in load.stages]],
        load.terms,
        () if hidden is False else load.units,
        load.passes,
        1 / passes,
        load.updated / (device.bandwidth * rates.bandwidth),
        waiting=0.0 if hidden else 1.0,
    )
    return step_parts(work, strategy, lines or lines_of(strategy, on, rates))


def lines_of(strategy: Strategy, on: Hardware, rates: Rates) -> Lines:
    """Return the way of each term, the same for all schedules and micro-batches of a mesh."""
    found: dict[tuple[str, str, str], OperationPath] = {}

    def line(term: TrafficTerm) -> OperationPath:
        key = term.axis, term.op, term.level
        if key not in found:
            far = spans(strategy, f"{term.axis} {term.level}".strip(), on.node)
            speed = min(on.device.near, on.device.far * _rails(strategy, term, on.node)) if far else on.device.near
            found[key] = OperationPath(OperationSpeed(_DELAY, speed * rates.links), int(far))
        return found[key]

    return line


def _rails(strategy: Strategy, term: TrafficTerm, node: int) -> int:
    """Links to other nodes that a group has: one for each of its ranks on a node. A ring goes through the ranks of a
    node one after the other, so that what a collective sends to other nodes leaves by all of them; a message by one."""
    if term.op == "send" or term.level:
        return 1
    inner = strategy.mesh.stride("dp" if term.axis in DATA else term.axis)
    stride = inner * strategy.shard if term.axis == "replicate" else inner
    return max(node // stride, 1)


def interval(load: Load, strategy: Strategy, on: Hardware, rates: Rates) -> tuple[float, float]:
    """The least and the most that a step may take."""
    best, worst = (
        replace(rates, **{name: getattr(rates, name) * factor for name in ("flops", "bandwidth", "links")})
        for factor in (1 + rates.spread, 1 - rates.spread)
    )
    lines = lines_of(strategy, on, best)
    # Whatever hides the data axis, its bytes have to leave.
    leaving = sum(lines(term).seconds(term) for term in load.terms if term.axis in DATA)
    least = max(seconds(load, strategy, on, best, hidden=True).total, leaving)
    return least, seconds(load, strategy, on, worst, hidden=False).total


def calibrated(load: Load, strategy: Strategy, on: Hardware, measured: float, *, rates: Rates | None = None) -> Rates:
    """`rates` with the share of flops at which the step of this load takes `measured` seconds."""
    rates = rates or Rates()
    low, high = 0.01, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        took = seconds(load, strategy, on, replace(rates, flops=middle)).total
        low, high = (middle, high) if took > measured else (low, middle)
    return replace(rates, flops=high, spread=_CALIBRATED)


class PerElement(Protocol):
    """Bytes of a parameter's element, its gradient and what the optimizer keeps of it; an average is as good."""

    @property
    def parameter(self) -> float: ...
    @property
    def gradient(self) -> float: ...
    @property
    def optimizer(self) -> float: ...


class Subject(Protocol):
    """A model, as formulas or as it was measured. recompute: of its blocks.

    flops, touched: of a row's forward, on a rank of these axes. costs: of the pieces, in any unit. refused: why it
    cannot be split so, (what, numbers); None where it can.
    """

    @property
    def name(self) -> str: ...
    @property
    def each(self) -> PerElement: ...
    @property
    def element(self) -> int: ...
    def recomputing(self, recompute: bool) -> Subject: ...
    def pieces(self, tp: int, cp: int) -> tuple[ModelPiece, ...]: ...
    def weights(self, tp: int, cp: int) -> list[Weights]: ...
    def facts(self, batch: int) -> Facts: ...
    def flops(self, tp: int, cp: int) -> float: ...
    def touched(self, tp: int, cp: int) -> float: ...
    def costs(self) -> tuple[float, ...]: ...
    def refused(self, strategy: Strategy) -> tuple[str, str] | None: ...


@dataclass(frozen=True)
class Candidate:
    """A strategy with its rows. rows: of a forward. micros: forwards of a step. recompute: of the blocks."""

    strategy: Strategy
    rows: int
    micros: int
    recompute: bool

    @property
    def kind(self) -> tuple[int, ...]:
        """Return what one row stands for: of schedules and micro-batches, with or without recompute, the best has
        it."""
        of = self.strategy
        return of.dp, of.tp, of.pp, of.cp, of.zero, of.shard

    @property
    def microbatch_size(self) -> int | None:
        return self.rows if self.strategy.pp == 1 and self.micros > 1 else None


class Known:
    """Pieces and weights by axes, asked for once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.pieces = lru_cache(maxsize=None)(subject.pieces)
        self.weights = lru_cache(maxsize=None)(subject.weights)
        self._kept: dict[tuple[int, ...], PeakLine] = {}
        self._found: dict[tuple[int, ...], dict[int, tuple[tuple[int, int], ...]]] = {}
        self._fullest: dict[tuple[int, ...], tuple[int, int, int]] = {}
        self._units: dict[tuple[int, int], tuple[StepUnit, ...]] = {}
        self._before: dict[tuple[int, int], list[int]] = {}
        self._shares: dict[int, tuple[float, ...]] = {}
        self.costs = subject.costs()

    def ranges(self, strategy: Strategy) -> dict[int, tuple[tuple[int, int], ...]]:
        """Blocks of the places of a pipeline where most may be held: of the first, which has most micro-batches under
        way, of the last, and of those with most blocks and most bytes of parameters."""
        key = strategy.tp, strategy.pp, strategy.cp, len(ranks_of_stages(strategy))
        if key not in self._found:
            self._found[key] = self._ranges(strategy)
        return self._found[key]

    def stages(self, strategy: Strategy) -> tuple[tuple[int, int], ...]:
        """Of the first place: as many blocks for each stage."""
        return self.ranges(strategy)[0]

    def _ranges(self, strategy: Strategy) -> dict[int, tuple[tuple[int, int], ...]]:
        if strategy.pp == 1:
            return {0: ((0, len(self.costs)),)}
        homes, cut = ranks_of_stages(strategy), self._cut(strategy)
        every = [
            tuple((cut[i], cut[i + 1]) for i, rank in enumerate(homes) if rank == place) for place in range(strategy.pp)
        ]
        blocks = [sum(stop - start for start, stop in own) for own in every]
        sizes = [self._size(strategy, own) for own in every]
        places = (0, strategy.pp - 1, blocks.index(max(blocks)), sizes.index(max(sizes)))
        return {place: every[place] for place in places}

    def _cut(self, strategy: Strategy) -> tuple[int, ...]:
        return _cut(self.costs, len(ranks_of_stages(strategy)))

    def kept(self, strategy: Strategy) -> PeakLine:
        """Return what a forward of the first place keeps, less what it hands on."""
        key = strategy.tp, strategy.pp, strategy.cp, len(ranks_of_stages(strategy))
        if key not in self._kept:
            pieces = self.pieces(strategy.tp, strategy.cp)
            own = [pieces[i] for start, stop in self.stages(strategy)[:1] for i in range(start, stop)]
            handed = own[-1].carried
            fixed, row = (sum(getattr(one.kept, name) for one in own) for name in ("fixed", "row"))
            self._kept[key] = PeakLine(fixed - handed.fixed, row - handed.row)
        return self._kept[key]

    def held(self, strategy: Strategy) -> int:
        """Bytes of the parameters of the place that has most, whole along dp."""
        return self._of_fullest(strategy)[0]

    def gathered(self, strategy: Strategy) -> int:
        """The same as zero 3 gathers them."""
        return self._of_fullest(strategy)[1]

    def gathered_inside(self, strategy: Strategy) -> int:
        """Of those that are in blocks."""
        return self._of_fullest(strategy)[2]

    def shares(self, strategy: Strategy) -> tuple[float, ...]:
        """Of the computing, that of each stage."""
        key = len(ranks_of_stages(strategy))
        if key not in self._shares:
            whole, cuts = sum(self.costs), pairwise(self._cut(strategy))
            self._shares[key] = tuple(sum(self.costs[start:stop]) / whole for start, stop in cuts)
        return self._shares[key]

    def units(self, strategy: Strategy) -> tuple[StepUnit, ...]:
        """Of the whole model, without a pipeline; parameters of a block as one."""
        key = strategy.tp, strategy.cp
        if key not in self._units:
            weights = self.weights(*key)
            self._units[key] = tuple(
                StepUnit(
                    cost / sum(self.costs),
                    (sum(own.inside), *own.outside),
                    sum(own.outside),
                    own.gathered_inside / max(sum(own.inside), 1),
                )
                for own, cost in zip(weights, self.costs, strict=True)
            )
        return self._units[key]

    def _of_fullest(self, strategy: Strategy) -> tuple[int, int, int]:
        """Bytes that it holds, that zero 3 gathers, and of these, in blocks."""
        key = strategy.tp, strategy.pp, strategy.cp, len(ranks_of_stages(strategy))
        if key not in self._fullest:
            places, weights = self.ranges(strategy).values(), self.weights(strategy.tp, strategy.cp)
            fullest = max(places, key=lambda own: self._size(strategy, own))
            own = [weights[i] for start, stop in fullest for i in range(start, stop)]
            self._fullest[key] = (
                sum(one.total for one in own),
                sum(one.gathered for one in own),
                sum(one.gathered_inside for one in own),
            )
        return self._fullest[key]

    def _size(self, strategy: Strategy, own: Iterable[tuple[int, int]]) -> int:
        """Return bytes of the parameters of these blocks."""
        key = strategy.tp, strategy.cp
        if key not in self._before:
            self._before[key] = [0, *accumulate(weights.total for weights in self.weights(*key))]
        return sum(self._before[key][stop] - self._before[key][start] for start, stop in own)


def rest_of(known: Known, strategy: Strategy) -> Rest:
    """Bytes of the fullest rank at the end of a step."""
    each, held = known.subject.each, known.held(strategy)
    numel = held / each.parameter
    parts = (each.parameter, 3), (each.gradient, 2), (each.optimizer, 1)
    return Rest(*(round(numel * size / (strategy.shard if strategy.zero >= stage else 1)) for size, stage in parts))


def load_of(known: Known, candidate: Candidate, facts: Facts) -> Load:
    """Of a step of all its rows."""
    strategy, subject = candidate.strategy, known.subject
    rows = candidate.rows * candidate.micros
    held = rest_of(known, strategy)
    return Load(
        flops=subject.flops(strategy.tp, strategy.cp) * rows,
        touched=subject.touched(strategy.tp, strategy.cp) * rows,
        again=1.0 if candidate.recompute else 0.0,
        stages=known.shares(strategy),
        terms=tuple(term for term in _terms(known, candidate, facts) if term.bytes),
        # Parameters and state are read and written, gradients read.
        updated=(2 * held.parameters + held.gradients) / (strategy.shard if 1 <= strategy.zero < 3 else 1)
        + 2 * held.optimizer,
        units=known.units(strategy) if strategy.pp == 1 and strategy.dp > 1 else (),
        passes=candidate.micros if strategy.pp == 1 else 1,
    )


def _terms(known: Known, candidate: Candidate, facts: Facts) -> Iterator[TrafficTerm]:
    """What the busiest rank sends in a step."""
    strategy, subject = candidate.strategy, known.subject
    tp, pp, cp = strategy.tp, strategy.pp, strategy.cp
    micros, rows = candidate.micros, candidate.rows * candidate.micros
    blocks = -(-(facts.blocks or 1) // pp)
    hidden = rows * (facts.sequence or 1) * (facts.width or 1) * subject.element / cp
    if strategy.dp > 1:
        yield from data_terms(known, strategy, micros, facts.node)
    if tp > 1:
        once = 1 if candidate.recompute else 0
        # Of a block and of its backward two each, computed again one more; embedding and head one each.
        calls, size = (4 + once) * blocks + 2 / pp, hidden
        for op in ("all_gather", "reduce_scatter"):
            yield TrafficTerm("tp", op, tp, round(micros * calls), round(size * calls), "hidden states")
    if pp > 1:
        stages = type_of(strategy.schedule or "1f1b").stages_per_rank
        size = round(2 * stages * hidden / tp)
        yield TrafficTerm("pp", "send", 2, 2 * stages * micros, size, "hidden states and their gradients")
    if cp > 1:
        whole, held = hidden * cp, known.held(strategy)
        both = 2 * whole * (facts.kv_heads or 1) / (facts.heads or 1) / tp
        for op in ("all_gather", "reduce_scatter"):
            yield TrafficTerm("cp", op, cp, 2 * micros * blocks, round(both * blocks), "keys and values")
        yield TrafficTerm("cp", "all_gather", cp, micros, round((1 if pp > 1 else 2) * whole), "ends of the blocks")
        yield TrafficTerm("cp", "all_reduce", cp, 1, held, "gradients that are partial sums")


def data_terms(known: Known, strategy: Strategy, micros: int, node: int | None) -> Iterator[TrafficTerm]:
    """Of the data axis. node: ranks on each; None: all are on one."""
    dp, shard, levers, held = strategy.dp, strategy.shard, strategy.levers, known.held(strategy)
    gradients = round(held * known.subject.each.gradient / known.subject.each.parameter)
    axis = "dp" if shard == dp else "shard"
    node_of = _node_of(strategy.mesh.size, node or strategy.mesh.size)
    if levers.compress:
        for op in ("all_to_all", "all_gather"):
            yield TrafficTerm(axis, op, dp, 1, round(levers.share * gradients), "gradients, rounded")
    elif levers.sync_every > 1:
        averaged = round(held / levers.sync_every)
        yield from summed(strategy, averaged, "weights, averaged now and then", 0, node_of)
    elif not strategy.zero:
        yield from summed(strategy, gradients, "gradients", 0, node_of)
    else:
        # Gathered before forward and backward and reduced behind it; a pipeline keeps what it has gathered.
        passes = micros if strategy.zero == 3 and strategy.pp == 1 else 1
        yield TrafficTerm(axis, "reduce_scatter", shard, passes, passes * gradients, "gradients")
        size = held
        if strategy.zero == 3:
            size = passes * (known.gathered(strategy) + (known.gathered_inside(strategy) if strategy.pp == 1 else 0))
        yield TrafficTerm(axis, "all_gather", shard, passes, size, "parameters")
        if shard < dp:
            yield from summed(strategy, passes * gradients // shard, "gradients", 0, node_of)


@lru_cache(maxsize=64)  # whether or not its blocks are recomputed, a model is cut alike
def _cut(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Where stages begin, and where the last one ends: as a training divides them, by their costs."""
    return 0, *(stop for _, stop in partition(costs, stages))


@lru_cache(maxsize=16)
def _node_of(size: int, node: int) -> tuple[int, ...]:
    return tuple(rank // node for rank in range(size))
