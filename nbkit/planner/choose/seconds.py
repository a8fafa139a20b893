"""Seconds of a step from the figures of data sheets, and how sure they are: the sum is nbkit/planner/step.py.

compute   multiplications at the share of the data sheet's rate that large ones reach, and the bytes that everything
          else reads and writes at that of the memory
links     bytes at the share of their rate, within a node and between nodes
optimizer reading and writing parameters, gradients and state

`Rates` are the three shares; one measured step calibrates the first (`calibrated`). The interval's ends are a data axis
that is hidden wholly or not at all, and shares that are some percent better or worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbkit.node_levels import BETWEEN
from nbkit.planner.choose.hardware import Hardware
from nbkit.planner.link_speed import OperationSpeed
from nbkit.planner.step import DATA, Lines, OperationPath, Parts, StepUnit, Work, step_parts
from nbkit.planner.traffic import TrafficTerm
from nbkit.strategy import Strategy

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
    """Whether neighbours along `axis` sit on different nodes. axis: with its level behind it, where it has two."""
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
    """The way of each term, the same for all schedules and micro-batches of a mesh."""
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
