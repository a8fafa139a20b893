"""Looks at every strategy of some hardware, and keeps those that fit, the fastest first.

Seconds are cheap and come first; memory is computed in the order of seconds until `ROWS` strategies fit, and on few
devices for all. What cannot fit by its parameters, gradients and optimizer state alone is refused by that sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from typing import Protocol

from nbkit.errors import StrategyError
from nbkit.levers import Levers
from nbkit.node_levels import BETWEEN, WITHIN, levels_of
from nbkit.planner.choose.hardware import Hardware
from nbkit.planner.choose.ranked_strategies import Plan, Refused, Row
from nbkit.planner.choose.seconds import Load, Parts, Rates, interval, seconds, spans
from nbkit.planner.job_facts import Facts
from nbkit.planner.memory import Rest
from nbkit.planner.peak.activations import Line, Piece
from nbkit.planner.peak.peak import Peak, Weights, peak
from nbkit.planner.stage_partition import ranks_of_stages
from nbkit.planner.validate import validate
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy, divisors

ROWS = 16
USABLE = 0.92
"""Of a device's memory: the rest is taken by CUDA, NCCL and the gaps of the allocator."""
LEAST_POSITIONS = 1024
"""Of a rank of a context axis: with fewer, what it sends takes longer than what it saves."""
_SMALL = 64
_MICROS = (1, 2, 4, 8, 16)
_ALIKE = 200
"""Steps that differ by less than 1 / _ALIKE count as equal: then the simpler strategy comes first."""


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

    flops, touched: of a row's forward, on a rank of these axes. refused: why it cannot be split so, (what, numbers);
    None where it can.
    """

    @property
    def name(self) -> str: ...
    @property
    def each(self) -> PerElement: ...
    @property
    def element(self) -> int: ...
    def recomputing(self, recompute: bool) -> Subject: ...
    def pieces(self, tp: int, cp: int) -> tuple[Piece, ...]: ...
    def weights(self, tp: int, cp: int) -> list[Weights]: ...
    def facts(self, batch: int) -> Facts: ...
    def flops(self, tp: int, cp: int) -> float: ...
    def touched(self, tp: int, cp: int) -> float: ...
    def refused(self, strategy: Strategy) -> tuple[str, str] | None: ...


@dataclass(frozen=True)
class _Candidate:
    strategy: Strategy
    rows: int
    micros: int
    recompute: bool

    @property
    def kind(self) -> tuple[int, ...]:
        """What one row stands for: of schedules and micro-batches, with or without recompute, the best has it."""
        of = self.strategy
        return of.dp, of.tp, of.pp, of.cp, of.zero, of.shard

    @property
    def microbatch_size(self) -> int | None:
        return self.rows if self.strategy.pp == 1 and self.micros > 1 else None


def search(subject: Subject, batch: int, on: Hardware, *, rates: Rates | None = None, memory: float = 0.0) -> Plan:
    """The plan of a global batch of `batch` rows. memory: usable bytes of a device; 0: USABLE of what it has."""
    rates = rates or Rates()
    usable = memory or USABLE * on.device.memory
    facts = replace(subject.facts(batch), world=on.devices, node=on.node)
    subjects = {recompute: _Known(subject.recomputing(recompute)) for recompute in (False, True)}
    timed: list[tuple[tuple[float, ...], _Candidate, Load, Rest]] = []
    refused: list[Refused] = []
    for strategy in _strategies(facts, on):
        if why := next((finding for finding in validate(strategy, facts) if finding.error), None):
            refused.append(Refused(str(strategy), why.what, why.numbers))
            continue
        if (cannot := subject.refused(strategy)) is not None:
            refused.append(Refused(str(strategy), *cannot))
            continue
        rest = _rest(subjects[False], strategy)
        if rest.total > usable:
            refused.append(_too_large(strategy, rest, usable))
            continue
        for candidate in _candidates(strategy, batch, facts.blocks or 1):
            load = _load(subjects[candidate.recompute], candidate, facts)
            took = seconds(load, candidate.strategy, on, rates).total
            timed.append((_order(took, candidate, len(timed)), candidate, load, rest))
    timed.sort(key=lambda one: one[0])
    rows: list[Row] = []
    found: set[tuple[int, ...]] = set()
    short: dict[tuple[int, ...], tuple[int, Refused]] = {}
    for _, candidate, load, rest in timed:
        kind = candidate.kind
        if kind in found or (len(rows) >= ROWS and on.devices > _SMALL):
            continue
        least = _least(subjects[candidate.recompute], candidate, rest)
        top = _peak(subjects[candidate.recompute], candidate, rest) if least.total <= usable else least
        if top.total <= usable:
            found.add(kind)
            rows.append(_row(candidate, load, top, on, rates, facts))
        elif kind not in short or top.total < short[kind][0]:
            short[kind] = top.total, _over(candidate, top, usable)
    refused += [one for kind, (_, one) in short.items() if kind not in found]
    unit = "tokens" if facts.sequence else "rows"
    return Plan(
        subject.name, batch, str(on), on.devices, on.device.memory, usable, unit, tuple(rows), tuple(refused),
        len(timed) + len(refused),
    )  # fmt: skip


def _order(took: float, candidate: _Candidate, number: int) -> tuple[float, ...]:
    of = candidate.strategy
    axes = sum(degree > 1 for degree in (of.dp, of.tp, of.pp, of.cp))
    return round(_ALIKE * log(took)), of.cp > 1, candidate.recompute, axes, of.zero, number


class _Known:
    """Pieces and weights by axes, asked for once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.of = lru_cache(maxsize=None)(lambda tp, cp: (subject.pieces(tp, cp), subject.weights(tp, cp)))
        self._kept: dict[tuple[int, ...], Line] = {}
        self._found: dict[tuple[int, ...], list[tuple[tuple[int, int], ...]]] = {}

    def ranges(self, strategy: Strategy) -> list[tuple[tuple[int, int], ...]]:
        """Blocks of the places of a pipeline: of the first and the last, where most is held."""
        key = strategy.tp, strategy.pp, strategy.cp, len(ranks_of_stages(strategy))
        if key not in self._found:
            self._found[key] = self._ranges(strategy)
        return self._found[key]

    def stages(self, strategy: Strategy) -> tuple[tuple[int, int], ...]:
        """Of the first place: as many blocks for each stage."""
        return self.ranges(strategy)[0]

    def _ranges(self, strategy: Strategy) -> list[tuple[tuple[int, int], ...]]:
        if strategy.pp == 1:
            return [((0, len(self.of(strategy.tp, strategy.cp)[0])),)]
        homes, count = ranks_of_stages(strategy), len(self.of(strategy.tp, strategy.cp)[0])
        cut = [count * i // len(homes) for i in range(len(homes) + 1)]
        return [
            tuple((cut[i], cut[i + 1]) for i, rank in enumerate(homes) if rank == place)
            for place in (0, strategy.pp - 1)
        ]

    def kept(self, strategy: Strategy) -> Line:
        """What a forward of the first place keeps, less what it hands on."""
        key = strategy.tp, strategy.pp, strategy.cp, len(ranks_of_stages(strategy))
        if key not in self._kept:
            pieces = self.of(strategy.tp, strategy.cp)[0]
            own = [pieces[i] for start, stop in self.stages(strategy)[:1] for i in range(start, stop)]
            handed = own[-1].carried
            fixed, row = (sum(getattr(one.kept, name) for one in own) for name in ("fixed", "row"))
            self._kept[key] = Line(fixed - handed.fixed, row - handed.row)
        return self._kept[key]

    def held(self, strategy: Strategy) -> int:
        """Bytes of the parameters of the first place, whole along dp."""
        return sum(weights.total for weights in self._of_first(strategy))

    def gathered(self, strategy: Strategy) -> int:
        """The same as zero 3 gathers them."""
        return sum(weights.gathered for weights in self._of_first(strategy))

    def _of_first(self, strategy: Strategy) -> list[Weights]:
        weights = self.of(strategy.tp, strategy.cp)[1]
        return [weights[i] for start, stop in self.stages(strategy) for i in range(start, stop)]


def _strategies(facts: Facts, on: Hardware) -> Iterator[Strategy]:
    world, blocks = on.devices, facts.blocks or 1
    for tp in divisors(world):
        if tp > on.node or (facts.heads is not None and facts.heads % tp):
            continue
        for pp in divisors(world // tp):
            if pp > blocks or (world > _SMALL and blocks % pp):
                continue
            for cp in divisors(world // (tp * pp)):
                if cp > 1 and (facts.sequence is None or facts.sequence // cp < LEAST_POSITIONS):
                    continue
                dp = world // (tp * pp * cp)
                # With a pipeline, zero 3 keeps all gathered: it saves little beside zero 2.
                stages = range(4) if pp == 1 or world <= _SMALL else range(3)
                groups = [(0, dp)] if dp == 1 else [(stage, dp) for stage in stages]
                if dp * tp * cp > on.node and dp > 1 and 1 < on.node // (tp * cp) < dp and pp == 1:
                    groups.append((3, on.node // (tp * cp)))
                for zero, shard in groups:
                    if dp % shard == 0:
                        yield Strategy(dp, tp, pp, cp, zero, shard, "1f1b" if pp > 1 else None, 2 * pp)


def _candidates(strategy: Strategy, batch: int, blocks: int) -> Iterator[_Candidate]:
    rows = batch // strategy.dp
    sizes = [size for size in _MICROS if rows % size == 0] if strategy.pp > 1 or rows > 1 else [rows]
    if strategy.pp == 1 and rows not in sizes:
        sizes.append(rows)
    # The fewer forwards the better, where nothing waits for them.
    for size in sorted(sizes, reverse=True):
        for recompute in (False, True):
            if strategy.pp == 1:
                yield _Candidate(strategy, size, rows // size, recompute)
                continue
            for schedule in ("1f1b", "interleaved") if strategy.pp > 1 else (None,):
                if schedule == "interleaved" and ((rows // size) % strategy.pp or 2 * strategy.pp > blocks):
                    continue
                made = replace(strategy, schedule=schedule, microbatches=rows // size)
                yield _Candidate(made, size, rows // size, recompute)


def _rest(known: _Known, strategy: Strategy) -> Rest:
    each, held = known.subject.each, known.held(strategy)
    numel = held / each.parameter
    parts = (each.parameter, 3), (each.gradient, 2), (each.optimizer, 1)
    return Rest(*(round(numel * size / (strategy.shard if strategy.zero >= stage else 1)) for size, stage in parts))


def _least(known: _Known, candidate: _Candidate, rest: Rest) -> Peak:
    """States, and what forward keeps of the micro-batches that are under way at least: quicker than the peak."""
    kept = known.kept(candidate.strategy).at(candidate.rows) * min(candidate.strategy.pp, candidate.micros)
    gradients = rest.gradients if candidate.strategy.dp > 1 else 0
    return Peak(rest.parameters, gradients, rest.optimizer, round(kept), 0, "backward")


def _peak(known: _Known, candidate: _Candidate, rest: Rest) -> Peak:
    strategy = candidate.strategy
    pieces, weights = known.of(strategy.tp, strategy.cp)
    places = dict(zip((0, strategy.pp - 1), known.ranges(strategy), strict=False))
    return max(
        (
            peak(strategy, place, pieces, weights, own, rest, rows=candidate.rows, micros=candidate.micros)
            for place, own in places.items()
        ),
        key=lambda one: one.total,
    )


def _load(known: _Known, candidate: _Candidate, facts: Facts) -> Load:
    strategy, subject = candidate.strategy, known.subject
    tp, pp, cp = strategy.tp, strategy.pp, strategy.cp
    rows = candidate.rows * candidate.micros
    part = rows / pp
    sent, calls = _sent(known, candidate, facts)
    held = _rest(known, strategy)
    return Load(
        flops=subject.flops(tp, cp) * part,
        touched=subject.touched(tp, cp) * part,
        again=1.0 if candidate.recompute else 0.0,
        sent=sent,
        calls=calls,
        # Parameters and state are read and written, gradients read.
        updated=(2 * held.parameters + held.gradients) / (strategy.shard if 1 <= strategy.zero < 3 else 1)
        + 2 * held.optimizer,
        idle=_idle(strategy) if pp > 1 else 0.0,
    )


def _sent(known: _Known, candidate: _Candidate, facts: Facts) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes and calls of the busiest rank, by axis: what nbkit.planner.traffic says of each weight, summed."""
    strategy, subject = candidate.strategy, known.subject
    dp, tp, pp, cp = strategy.dp, strategy.tp, strategy.pp, strategy.cp
    held, micros, rows = known.held(strategy), candidate.micros, candidate.rows * candidate.micros
    blocks = (facts.blocks or 1) / pp
    hidden = rows * (facts.sequence or 1) * (facts.width or 1) * subject.element / cp
    sent: dict[str, float] = {}
    calls: dict[str, float] = {}
    if dp > 1:
        shard, across = strategy.shard, dp // strategy.shard
        axis = "dp" if across == 1 else "shard"
        rounds = micros if strategy.zero == 3 and pp == 1 else 1
        # Gathered before forward and backward and reduced behind it; reduced and gathered; or both in one.
        times = (2 if pp > 1 else 3) if strategy.zero == 3 else 2
        gathered = known.gathered(strategy) if strategy.zero == 3 else held
        if strategy.zero:
            sent[axis] = rounds * (shard - 1) / shard * ((times - 1) * gathered + held)
            calls[axis] = times * rounds * blocks if strategy.zero == 3 else 0.0
        sent |= _summed(strategy, held / shard if strategy.zero else held, facts.node)
    if tp > 1:
        once = 2 if candidate.recompute else 0
        # Four gathers and four scatters of a block; embedding and head one pair each.
        sent["tp"] = (tp - 1) / tp * hidden * ((8 + once) * blocks + 4 / pp)
        calls["tp"] = micros * ((8 + once) * blocks + 4 / pp)
    if pp > 1:
        stages = 2 if strategy.schedule == "interleaved" else 1
        sent["pp"] = 2 * stages * hidden / tp
        calls["pp"] = 2.0 * stages * micros
    if cp > 1:
        whole = hidden * cp
        both = 2 * whole * (facts.kv_heads or 1) / (facts.heads or 1) / tp
        # Keys and values and their gradients, the ends of the chain, gradients that are sums.
        sent["cp"] = (cp - 1) / cp * (2 * both * blocks + (1 if pp > 1 else 2) * whole + 2 * held)
        calls["cp"] = 4.0 * micros * blocks
    return sent, calls


def _summed(strategy: Strategy, size: float, node: int | None) -> dict[str, float]:
    """Bytes that a rank sends for the all-reduce of `size` bytes of gradients, in one level or two."""
    axis, group = strategy.summed_axis, strategy.summed_group(0)
    levels = levels_of(group, [rank // (node or strategy.mesh.size) for rank in range(strategy.mesh.size)])
    if levels is None:
        return {axis: 2 * (len(group) - 1) / len(group) * size} if axis else {}
    near, far = len(levels.within[0]), len(levels.between[0])
    return {
        f"{axis} {WITHIN}": 2 * (near - 1) / near * size,
        f"{axis} {BETWEEN}": 2 * (far - 1) / far * size / near,
    }


@lru_cache(maxsize=4096)
def _bubble(schedule: str, ranks: int, micros: int) -> float:
    if schedule == "interleaved":
        # Narayanan et al. 2021, 2.2: two stages a rank halve it; small cases are simulated.
        if ranks <= 8 and micros <= 32:
            return min(simulate(Schedule.of(schedule, ranks, micros)).idle)
        return (ranks - 1) / (2 * micros + ranks - 1)
    return (ranks - 1) / (micros + ranks - 1)


def _idle(strategy: Strategy) -> float:
    return _bubble(strategy.schedule or "1f1b", strategy.pp, strategy.microbatches or 1)


def _row(candidate: _Candidate, load: Load, top: Peak, on: Hardware, rates: Rates, facts: Facts) -> Row:
    strategy, parts = candidate.strategy, seconds(load, candidate.strategy, on, rates)
    low, high = interval(load, strategy, on, rates)
    units = (facts.batch or 0) * (facts.sequence or 1)
    return Row(
        str(strategy),
        strategy.label,
        candidate.microbatch_size,
        candidate.recompute,
        top,
        parts.total,
        min(low, parts.total),
        max(high, parts.total),
        parts,
        load.sent,
        units / parts.total,
        parts.total * on.devices / units * 1e6,
        _limit(parts, load, strategy, on),
        dict(_relieved(parts, load, strategy, on, rates)),
    )


def _relieved(parts: Parts, load: Load, strategy: Strategy, on: Hardware, rates: Rates) -> Iterator[tuple[str, float]]:
    """What a step would take with levers of the data axis that save at least a twentieth of it."""
    if strategy.zero or strategy.dp < strategy.mesh.size or strategy.dp == 1:
        return
    # What is rounded goes over all ranks at once: a ring's bytes.
    whole = sum(_summed(strategy, 1.0, None).values()) / sum(_summed(strategy, 1.0, on.node).values())
    for lever in (Levers(compress="bf16"), Levers(compress="int8"), Levers(sync_every=8)):
        if lever.compress:
            sent = {"dp": sum(load.sent.values()) * whole * lever.share}
        else:
            sent = {axis: size / lever.sync_every for axis, size in load.sent.items()}
        took = seconds(replace(load, sent=sent), strategy, on, rates).total
        if took <= 0.95 * parts.total:
            yield str(lever), took


def _limit(parts: Parts, load: Load, strategy: Strategy, on: Hardware) -> str:
    named = {name: getattr(parts, name) for name in ("compute", "exposed", "bubble", "optimizer")}
    most = max(named, key=lambda name: named[name])
    if most == "exposed" and load.sent:
        axis = max(load.sent, key=lambda one: load.sent[one])
        name = axis.partition(" ")[0]
        return f"{name} {'between nodes' if spans(strategy, axis, on.node) else 'within a node'}"
    return most


def _too_large(strategy: Strategy, rest: Rest, usable: float) -> Refused:
    sizes = f"parameters {_gb(rest.parameters)} + gradients {_gb(rest.gradients)} + optimizer {_gb(rest.optimizer)}"
    return Refused(str(strategy), "It does not fit, even without activations.", f"{sizes} > {_gb(usable)}")


def _over(candidate: _Candidate, top: Peak, usable: float) -> Refused:
    sizes = f"parameters {_gb(top.parameters)} + gradients {_gb(top.gradients)} + optimizer {_gb(top.optimizer)}"
    more = f" + activations {_gb(top.activations)} + working {_gb(top.working)} = {_gb(top.total)} > {_gb(usable)}"
    how = f" with {candidate.rows} row{'s' * (candidate.rows > 1)} a forward" + " and recompute" * candidate.recompute
    return Refused(str(candidate.strategy), f"It does not fit{how}.", sizes + more)


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def chosen(plan: Plan) -> Row:
    """The recommendation. Raises StrategyError, with the closest miss, where nothing fits."""
    if plan.rows:
        return plan.rows[0]
    near = plan.refused[-1] if plan.refused else None
    raise StrategyError(
        f"No strategy of {plan.devices} devices fits {plan.model} with a batch of {plan.batch}.",
        numbers=f"{near.strategy}: {near.numbers}" if near else f"{plan.considered} looked at",
        hint="more devices, or a smaller batch",
    )
