"""Computes the work and the traffic that a strategy gives the ranks, and predicts the step time from data sheets.

The model is given as formulas or as measurements (`Subject`). `Known` asks for its pieces and weights once for each
pair of tp and cp degrees. The bytes to send are sums over the weights, which is fast enough for thousands of
candidates. nbkit.planner.traffic has the formulas, and computes the same bytes weight by weight for a training.

A line describes the hardware: "128 x 8 H100" is 128 nodes of 8 devices each; "8 A100" is one node. The figures come
from the makers' public data sheets: dense bf16 (fp16 for the V100), and one direction of a link. The network speed is
the one that such nodes commonly have per device. `net=` in the line overrides it: "2 x 8 H100 net=12.5GB/s".

nbkit/planner/step.py adds up the seconds of these parts:

compute   matrix products, at a share of the data sheet's flops; and the bytes that all other operations read and
          write, at a share of the memory bandwidth
links     bytes that are sent within a node and between nodes, at a share of the links' bandwidth
optimizer reading and writing of parameters, gradients and state

`Rates` holds the three shares. One measured step calibrates the share of the flops (`calibrated`). For the bounds of
the `interval`, compute hides the data axis completely or not at all, and the shares are some percent higher or lower.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Protocol

from nbkit.errors import UsageError
from nbkit.mesh import BETWEEN
from nbkit.planner.job_facts import Facts
from nbkit.planner.link_speed import OperationSpeed
from nbkit.planner.peak import ModelPiece, PeakLine, Weights
from nbkit.planner.stages import partition, ranks_of_stages
from nbkit.planner.step import DATA, Lines, OperationPath, Parts, StepUnit, Work, step_parts
from nbkit.planner.traffic import (
    DataSizes,
    Rest,
    TrafficTerm,
    block_pieces,
    block_terms,
    data_terms,
    key_value_terms,
)
from nbkit.schedules import type_of
from nbkit.strategy import Strategy


@dataclass(frozen=True)
class Device:
    """Figures of one device.

    flops: per second. memory: bytes. bandwidth: of its memory, in bytes per second. near, far: bytes per second that it
    can send within its node, and to other nodes.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    near: float
    far: float


DEVICES = {
    device.name: device
    for device in (
        Device("T4", 65e12, 16e9, 0.32e12, 16e9, 12.5e9),
        Device("L4", 121e12, 24e9, 0.3e12, 32e9, 12.5e9),
        Device("A10", 125e12, 24e9, 0.6e12, 32e9, 12.5e9),
        Device("V100", 125e12, 32e9, 0.9e12, 150e9, 12.5e9),
        Device("A100", 312e12, 80e9, 2.039e12, 300e9, 25e9),
        Device("A100-40GB", 312e12, 40e9, 1.555e12, 300e9, 25e9),
        Device("H100", 989e12, 80e9, 3.35e12, 450e9, 50e9),
        Device("H200", 989e12, 141e9, 4.8e12, 450e9, 50e9),
        Device("B200", 2250e12, 180e9, 8e12, 900e9, 50e9),
        Device("L40S", 362e12, 48e9, 0.864e12, 32e9, 12.5e9),
        Device("RTX3090", 71e12, 24e9, 0.936e12, 32e9, 12.5e9),
        Device("RTX4090", 165e12, 24e9, 1.008e12, 32e9, 12.5e9),
        Device("RTX5090", 209e12, 32e9, 1.792e12, 64e9, 12.5e9),
        Device("MI300X", 1307e12, 192e9, 5.3e12, 448e9, 50e9),
    )
}
"""Known devices by name. flops: dense, 16-bit, accumulated in 32 bits. The bandwidth of a link is for one direction."""

NODE = 8
"""Devices of a node, if a line names more devices than this and no nodes."""

_LINE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*x?\s*([a-z][\w-]*)((?:\s+\w+=\S+)*)", re.IGNORECASE)
_SPEED = re.compile(r"net=([\d.]+)\s*(GB/s|Gbit/s)", re.IGNORECASE)


@dataclass(frozen=True)
class Hardware:
    """A number of nodes with `node` devices each."""

    nodes: int
    node: int
    device: Device

    @property
    def devices(self) -> int:
        """Return the number of devices on all nodes."""
        return self.nodes * self.node

    @classmethod
    def parse(cls, text: str) -> Hardware:
        """Parse a line such as "2 x 8 H100".

        "64 H100" means nodes of `NODE` devices each. Raises UsageError if the line names no hardware, or a device that
        is not in `DEVICES`, or more than `NODE` devices that do not fill such nodes.
        """
        found = _LINE.fullmatch(text.strip())
        names = {name.lower(): name for name in DEVICES}
        if found is None or found[3].lower() not in names or not int(found[2]) or found[1] == "0":
            raise UsageError(
                f"{text!r} does not name known hardware.",
                numbers=f"devices: {', '.join(DEVICES)}",
                hint='on="128 x 8 H100", 128 nodes of 8; on="8 A100", one node',
            )
        nodes, node = int(found[1] or 0), int(found[2])
        if not nodes:
            nodes, node = (1, node) if node <= NODE else (node // NODE, NODE)
            if nodes * node != int(found[2]):
                raise UsageError(
                    f"{text!r} does not say how many devices a node has.",
                    numbers=f"{found[2]} devices do not fill nodes of {NODE}",
                    hint=f'on="1 x {found[2]} {found[3]}", one node; on="2 x 6 H100", two nodes of 6',
                )
        device = DEVICES[names[found[3].lower()]]
        if found[4].strip():
            speed = _SPEED.fullmatch(found[4].strip())
            if speed is None or not float(speed[1]):
                raise UsageError(
                    f"{found[4].strip()!r} does not give the speed of a network.",
                    numbers="net=50GB/s or net=400Gbit/s, of each device",
                    hint=f'on="{text.removesuffix(found[4])} net=50GB/s"',
                )
            far = float(speed[1]) * (1e9 if speed[2].lower() == "gb/s" else 1e9 / 8)
            device = Device(device.name, device.flops, device.memory, device.bandwidth, device.near, far)
        return cls(nodes, node, device)

    def __str__(self) -> str:
        nodes = f"{self.nodes} x " if self.nodes > 1 or self.node > NODE else ""
        return f"{nodes}{self.node} {self.device.name}"


_DELAY = 20e-6
"""Seconds that a collective needs to start."""
_CALIBRATED = 0.13
"""The largest error of a calibrated prediction, for all steps in docs/evidence/published.md but one."""
_BACK = 2.0
"""A backward pass computes this many times the flops of its forward pass."""


@dataclass(frozen=True)
class Rates:
    """The shares of the data sheet's figures that a job reaches: of flops, memory bandwidth and link bandwidth.

    spread: the relative error of the shares, in each direction.
    """

    flops: float = 0.65
    bandwidth: float = 0.8
    links: float = 0.75
    spread: float = 0.15


@dataclass(frozen=True)
class Load:
    """The work that a step gives the ranks.

    flops: of the forward passes of all blocks, for one rank's part of each block. touched: bytes that all other
    operations in these passes read and write. again: the share of `flops` that backward computes once more.
    touched_again: the share of `touched` that backward reads and writes once more. stages: each stage's share of the
    compute. terms: the traffic of the busiest rank. units, passes: see nbkit.planner.step.Work. updated: bytes that the
    optimizer reads and writes.
    """

    flops: float
    touched: float
    again: float
    touched_again: float
    stages: Sequence[float]
    terms: Sequence[TrafficTerm]
    updated: float
    units: Sequence[StepUnit] = ()
    passes: int = 1

    @property
    def sent(self) -> dict[str, float]:
        """Return the bytes that the busiest rank sends, by axis. An axis with two levels has a key for each level."""
        found: dict[str, float] = {}
        for term in self.terms:
            name = f"{term.axis} {term.level}".strip()
            found[name] = found.get(name, 0.0) + term.wire
        return found


def spans(strategy: Strategy, axis: str, node: int) -> bool:
    """Return True if neighbours along `axis` are on different nodes.

    axis: its name, followed by the level if it has two levels.
    """
    mesh = strategy.mesh
    axis, _, level = axis.partition(" ")
    if level:
        return level == BETWEEN
    if axis in ("ep", "edp"):
        inner, outer = mesh.stride("dp"), mesh.stride("dp") * strategy.ep
        return (outer if axis == "ep" else inner * strategy.dp) > node
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
    """Return the seconds of a step by part.

    hidden: True if compute hides all traffic of the data axis, False if it hides none, None to simulate it.
    lines: the result of `lines_of` for the same arguments, if it is known already.
    """
    device = on.device
    products, rest = load.flops / (device.flops * rates.flops), load.touched / (device.bandwidth * rates.bandwidth)
    forward = products + rest
    again = load.again * products + load.touched_again * rest
    passes = 1 + _BACK + again / forward
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
    """Return the function that gives the path of each term. All schedules and micro-batches of a mesh can share it."""
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
    """Return how many links to other nodes a group uses for `term`.

    A collective uses one link for each of the group's ranks on a node, since rings can leave the node at each of them.
    A single message uses one link.
    """
    if term.op == "send" or term.level:
        return 1
    inner = strategy.mesh.stride("dp" if term.axis in DATA else term.axis)
    stride = inner * strategy.shard if term.axis == "replicate" else inner
    return max(node // stride, 1)


def interval(load: Load, strategy: Strategy, on: Hardware, rates: Rates) -> tuple[float, float]:
    """Return the lower and the upper bound of the step time, in seconds."""
    best, worst = (
        replace(rates, **{name: getattr(rates, name) * factor for name in ("flops", "bandwidth", "links")})
        for factor in (1 + rates.spread, 1 - rates.spread)
    )
    lines = lines_of(strategy, on, best)
    # Even if compute hides the data axis, the rank needs time to send its bytes.
    leaving = sum(lines(term).seconds(term) for term in load.terms if term.axis in DATA)
    least = max(seconds(load, strategy, on, best, hidden=True).total, leaving)
    return least, seconds(load, strategy, on, worst, hidden=False).total


def calibrated(load: Load, strategy: Strategy, on: Hardware, measured: float, *, rates: Rates | None = None) -> Rates:
    """Return `rates` with another share of flops, so that a step with this load takes `measured` seconds."""
    rates = rates or Rates()
    low, high = 0.01, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        took = seconds(load, strategy, on, replace(rates, flops=middle)).total
        low, high = (middle, high) if took > measured else (low, middle)
    return replace(rates, flops=high, spread=_CALIBRATED)


class PerElement(Protocol):
    """Bytes per element of a parameter, of its gradient and of its optimizer state. Averages are allowed."""

    @property
    def parameter(self) -> float: ...
    @property
    def gradient(self) -> float: ...
    @property
    def optimizer(self) -> float: ...


class Subject(Protocol):
    """A model, given by formulas or by measurements. recompute: as in nbkit.Compute.

    flops, touched: for the forward of one row, on a rank with these degrees; see Load. costs: the compute of each
    piece, in any unit. refused: why the model cannot be split like this, as (what, numbers); None if it can.
    """

    @property
    def name(self) -> str: ...
    @property
    def each(self) -> PerElement: ...
    @property
    def element(self) -> int: ...
    def recomputing(self, recompute: bool | str) -> Subject: ...
    def pieces(self, tp: int, cp: int) -> tuple[ModelPiece, ...]: ...
    def weights(self, tp: int, cp: int) -> list[Weights]: ...
    def facts(self, batch: int) -> Facts: ...
    def flops(self, tp: int, cp: int) -> float: ...
    def touched(self, tp: int, cp: int) -> float: ...
    def costs(self) -> tuple[float, ...]: ...
    def refused(self, strategy: Strategy) -> tuple[str, str] | None: ...


@dataclass(frozen=True)
class Candidate:
    """A strategy with its batch sizes.

    rows: rows per rank in one forward. micros: forwards in a step. recompute: as in nbkit.Compute.
    """

    strategy: Strategy
    rows: int
    micros: int
    recompute: bool | str

    @property
    def kind(self) -> tuple[int, ...]:
        """Return the key of this candidate's row in the plan.

        Candidates that differ only in schedule, micro-batches or recompute have the same key. The plan has the best.
        """
        of = self.strategy
        return of.dp, of.tp, of.pp, of.cp, of.zero, of.shard

    @property
    def microbatch_size(self) -> int | None:
        return self.rows if self.strategy.pp == 1 and self.micros > 1 else None


class Known:
    """A cache of the pieces and weights of a model, by degrees of tp and cp."""

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
        """Return the blocks at the pipeline places that may need the most memory: {place: ranges of blocks}.

        These are the first place, which has the most micro-batches under way; the last place; and the places with the
        most blocks and with the most bytes of parameters.
        """
        key = strategy.tp, strategy.pp, strategy.cp, len(ranks_of_stages(strategy))
        if key not in self._found:
            self._found[key] = self._ranges(strategy)
        return self._found[key]

    def stages(self, strategy: Strategy) -> tuple[tuple[int, int], ...]:
        """Return the ranges of blocks at the first place, one for each of its stages."""
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
        """Return the bytes that a forward at the first place keeps for backward, without the output that it sends."""
        key = strategy.tp, strategy.pp, strategy.cp, len(ranks_of_stages(strategy))
        if key not in self._kept:
            pieces = self.pieces(strategy.tp, strategy.cp)
            own = [pieces[i] for start, stop in self.stages(strategy)[:1] for i in range(start, stop)]
            handed = own[-1].carried
            fixed, row = (sum(getattr(one.kept, name) for one in own) for name in ("fixed", "row"))
            self._kept[key] = PeakLine(fixed - handed.fixed, row - handed.row)
        return self._kept[key]

    def held(self, strategy: Strategy) -> int:
        """Return the bytes of the parameters at the place that has the most, not divided along dp."""
        return self._of_fullest(strategy)[0]

    def gathered(self, strategy: Strategy) -> int:
        """Return the bytes that zero 3 gathers for the same parameters."""
        return self._of_fullest(strategy)[1]

    def gathered_inside(self, strategy: Strategy) -> int:
        """Return the bytes that zero 3 gathers for the same parameters, only for those in blocks."""
        return self._of_fullest(strategy)[2]

    def shares(self, strategy: Strategy) -> tuple[float, ...]:
        """Return each stage's share of the compute."""
        key = len(ranks_of_stages(strategy))
        if key not in self._shares:
            whole, cuts = sum(self.costs), pairwise(self._cut(strategy))
            self._shares[key] = tuple(sum(self.costs[start:stop]) / whole for start, stop in cuts)
        return self._shares[key]

    def units(self, strategy: Strategy) -> tuple[StepUnit, ...]:
        """Return the units of the whole model without a pipeline. All parameters of a block count as one."""
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
        """Return bytes of parameters at the fullest place: held, gathered by zero 3, and gathered in blocks only."""
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
        """Return the bytes of the parameters of these blocks."""
        key = strategy.tp, strategy.cp
        if key not in self._before:
            self._before[key] = [0, *accumulate(weights.total for weights in self.weights(*key))]
        return sum(self._before[key][stop] - self._before[key][start] for start, stop in own)


def rest_of(known: Known, strategy: Strategy) -> Rest:
    """Return the bytes that the fullest rank holds at the end of a step."""
    each, held = known.subject.each, known.held(strategy)
    numel = held / each.parameter
    parts = (each.parameter, 3), (each.gradient, 2), (each.optimizer, 1)
    return Rest(*(round(numel * size / (strategy.shard if strategy.zero >= stage else 1)) for size, stage in parts))


def load_of(known: Known, candidate: Candidate, facts: Facts) -> Load:
    """Return the load of a step with all rows of `candidate`."""
    strategy, subject = candidate.strategy, known.subject
    rows = candidate.rows * candidate.micros
    held = rest_of(known, strategy)
    return Load(
        flops=subject.flops(strategy.tp, strategy.cp) * rows,
        touched=subject.touched(strategy.tp, strategy.cp) * rows,
        again=1.0 if candidate.recompute is True else 0.0,
        touched_again=1.0 if candidate.recompute else 0.0,
        stages=known.shares(strategy),
        terms=tuple(term for term in _terms(known, candidate, facts) if term.bytes),
        # Parameters and state are read and written; gradients are only read.
        updated=(2 * held.parameters + held.gradients) / (strategy.shard if 1 <= strategy.zero < 3 else 1)
        + 2 * held.optimizer,
        units=known.units(strategy) if strategy.pp == 1 and strategy.dp > 1 else (),
        passes=candidate.micros if strategy.pp == 1 else 1,
    )


def _terms(known: Known, candidate: Candidate, facts: Facts) -> Iterator[TrafficTerm]:
    """Yield the traffic of the busiest rank in a step."""
    strategy, subject = candidate.strategy, known.subject
    tp, pp, cp = strategy.tp, strategy.pp, strategy.cp
    micros, rows = candidate.micros, candidate.rows * candidate.micros
    blocks = -(-(facts.blocks or 1) // pp)
    hidden = rows * (facts.sequence or 1) * (facts.width or 1) * subject.element / cp
    if strategy.dp > 1:
        yield from data_terms_of(known, strategy, micros, facts.node)
    if tp > 1:
        pieces = block_pieces(strategy, candidate.rows, -(-(facts.sequence or 1) // cp))
        yield from block_terms(tp, hidden, blocks, micros, again=candidate.recompute is True, pieces=pieces)
        for op in ("all_gather", "reduce_scatter"):  # embedding and head, averaged over the pipeline places
            yield TrafficTerm("tp", op, tp, round(2 * micros / pp), round(2 * hidden / pp), "embedding and head")
    if pp > 1:
        stages = type_of(strategy.schedule or "1f1b").stages_per_rank
        size = round(2 * stages * hidden / tp)
        yield TrafficTerm("pp", "send", 2, 2 * stages * micros, size, "hidden states and their gradients")
    if cp > 1:
        whole, held = hidden * cp, known.held(strategy)
        yield from key_value_terms(strategy, facts, whole, blocks, micros, again=candidate.recompute is True)
        yield TrafficTerm("cp", "all_gather", cp, micros, round((1 if pp > 1 else 2) * whole), "ends of the blocks")
        yield TrafficTerm("cp", "all_reduce", cp, 1, held, "gradients that are partial sums")


def data_terms_of(known: Known, strategy: Strategy, micros: int, node: int | None) -> Iterator[TrafficTerm]:
    """Yield the terms of the data axis. node: ranks on each node; None if all ranks are on one."""
    held, each = known.held(strategy), known.subject.each
    gradients = round(held * each.gradient / each.parameter)
    sizes = DataSizes(
        elements=held / each.parameter,
        gradients=gradients,
        weights=held,
        shard=gradients // strategy.shard,
        gathered=known.gathered(strategy),
        gathered_again=known.gathered_inside(strategy),
    )
    yield from data_terms(strategy, sizes, micros, 0, _node_of(strategy.mesh.size, node or strategy.mesh.size))


@lru_cache(maxsize=64)  # recompute does not change where a model is cut
def _cut(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Return the first block of each stage, then the end of the last stage. A training uses the same costs."""
    return 0, *(stop for _, stop in partition(costs, stages))


@lru_cache(maxsize=16)
def _node_of(size: int, node: int) -> tuple[int, ...]:
    return tuple(rank // node for rank in range(size))
