"""Seconds of a step by arithmetic, in the parts that a dashboard's bars have, and how sure they are.

compute   multiplications at the share of the data sheet's rate that large ones reach, and the bytes that everything
          else reads and writes at that of the memory
exposed   what is waited for: all that tp and cp send, what of dp backward does not hide
bubble    what the schedule leaves idle
optimizer reading and writing parameters, gradients and state

`Rates` are the three shares; one measured step calibrates the first (`calibrated`). The interval's ends are a dp that
hides behind backward wholly or not at all, and shares that are some percent better or worse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbkit.node_levels import BETWEEN
from nbkit.planner.choose.hardware import Hardware
from nbkit.strategy import Strategy

_DELAY = 20e-6
"""Seconds until a collective is under way."""
_CALIBRATED = 0.1
"""How far off a calibrated prediction may be: the worst of the published steps in docs/plan.md."""
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
class Parts:
    """Seconds of a step by part."""

    compute: float
    exposed: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.compute + self.exposed + self.bubble + self.optimizer


@dataclass(frozen=True)
class Load:
    """What a step gives the fullest rank to do.

    flops: of its forward passes. touched: bytes that the rest of a forward reads and writes. again: forwards that are
    computed once more in backward, as a share. sent: bytes that leave it, by axis; calls: how often it waits, by axis.
    updated: bytes that the optimizer reads and writes. idle: of the step of a pipeline, the share that it waits.
    """

    flops: float
    touched: float
    again: float
    sent: dict[str, float]
    calls: dict[str, float]
    updated: float
    idle: float


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


def seconds(load: Load, strategy: Strategy, on: Hardware, rates: Rates, *, hidden: float | None = None) -> Parts:
    """Of a step. hidden: the share of dp that backward hides at most; None: as far as backward is long."""
    device = on.device
    forward = load.flops / (device.flops * rates.flops) + load.touched / (device.bandwidth * rates.bandwidth)
    compute = forward * (1 + _BACK + load.again)
    waits: dict[str, float] = {}
    for axis, size in load.sent.items():
        speed = (device.far if spans(strategy, axis, on.node) else device.near) * rates.links
        waits[axis] = size / speed + load.calls.get(axis, 0.0) * _DELAY
    data = sum(waits.pop(axis) for axis in list(waits) if axis.partition(" ")[0] in ("dp", "shard", "replicate"))
    behind = _BACK * forward if hidden is None else data * hidden
    exposed = sum(waits.values())
    inner = compute + exposed
    return Parts(
        compute,
        exposed + max(data - behind, 0.05 * data),
        inner * load.idle / (1 - load.idle),
        load.updated / (device.bandwidth * rates.bandwidth),
    )


def interval(load: Load, strategy: Strategy, on: Hardware, rates: Rates) -> tuple[float, float]:
    """The least and the most that a step may take."""
    best, worst = (
        replace(rates, **{name: getattr(rates, name) * factor for name in ("flops", "bandwidth", "links")})
        for factor in (1 + rates.spread, 1 - rates.spread)
    )
    return seconds(load, strategy, on, best, hidden=1.0).total, seconds(load, strategy, on, worst, hidden=0.0).total


def calibrated(load: Load, strategy: Strategy, on: Hardware, measured: float, *, rates: Rates | None = None) -> Rates:
    """`rates` with the share of flops at which the step of this load takes `measured` seconds."""
    rates = rates or Rates()
    low, high = 0.01, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        took = seconds(load, strategy, on, replace(rates, flops=middle)).total
        low, high = (middle, high) if took > measured else (low, middle)
    return replace(rates, flops=high, spread=_CALIBRATED)
