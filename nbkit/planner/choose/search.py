"""Looks at every strategy of some hardware, and keeps those that fit, the fastest first.

Seconds are cheap and come first; memory is computed in the order of seconds until `ROWS` strategies fit, and on few
devices for all. What cannot fit by its parameters, gradients and optimizer state alone is refused by that sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log

from nbkit.errors import StrategyError
from nbkit.planner.choose.hardware import Hardware
from nbkit.planner.choose.levers_that_help import levers_that_help
from nbkit.planner.choose.load import Candidate, Known, Subject, data_terms, load_of, rest_of
from nbkit.planner.choose.ranked_strategies import Plan, Refused, Row
from nbkit.planner.choose.seconds import Load, Rates, interval, lines_of, seconds, spans
from nbkit.planner.job_facts import Facts
from nbkit.planner.memory import Rest
from nbkit.planner.peak.peak import Peak, peak
from nbkit.planner.step.step_time import Parts
from nbkit.planner.validate import validate
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


def search(subject: Subject, batch: int, on: Hardware, *, rates: Rates | None = None, memory: float = 0.0) -> Plan:
    """The plan of a global batch of `batch` rows. memory: usable bytes of a device; 0: USABLE of what it has."""
    rates = rates or Rates()
    usable = memory or USABLE * on.device.memory
    facts = replace(subject.facts(batch), world=on.devices, node=on.node)
    subjects = {recompute: Known(subject.recomputing(recompute)) for recompute in (False, True)}
    timed: list[tuple[tuple[float, ...], Candidate, Load, Rest]] = []
    refused: list[Refused] = []
    for strategy in _strategies(facts, on):
        if why := next((finding for finding in validate(strategy, facts) if finding.error), None):
            refused.append(Refused(str(strategy), why.what, why.numbers))
            continue
        if (cannot := subject.refused(strategy)) is not None:
            refused.append(Refused(str(strategy), *cannot))
            continue
        rest = rest_of(subjects[False], strategy)
        if rest.total > usable:
            refused.append(_too_large(strategy, rest, usable))
            continue
        lines = lines_of(strategy, on, rates)
        for candidate in _candidates(strategy, batch, facts.blocks or 1):
            load = load_of(subjects[candidate.recompute], candidate, facts)
            took = seconds(load, candidate.strategy, on, rates, lines=lines).total
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
            rows.append(_row(subjects[candidate.recompute], candidate, load, top, on, rates, facts))
        elif kind not in short or top.total < short[kind][0]:
            short[kind] = top.total, _over(candidate, top, usable)
    refused += [one for kind, (_, one) in short.items() if kind not in found]
    unit = "tokens" if facts.sequence else "rows"
    return Plan(
        subject.name, batch, str(on), on.devices, on.device.memory, usable, unit, tuple(rows), tuple(refused),
        len(timed) + len(refused),
    )  # fmt: skip


def _order(took: float, candidate: Candidate, number: int) -> tuple[float, ...]:
    of = candidate.strategy
    axes = sum(degree > 1 for degree in (of.dp, of.tp, of.pp, of.cp))
    return round(_ALIKE * log(took)), of.cp > 1, candidate.recompute, axes, of.zero, number


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
                        made = Strategy(dp, tp, pp, cp, zero, shard, "1f1b" if pp > 1 else None, 2 * pp)
                        yield made
                        if on.nodes > 1 and dp > 1 and pp > 1:  # pp crosses nodes, or dp does
                            yield replace(made, order="dp")


def _candidates(strategy: Strategy, batch: int, blocks: int) -> Iterator[Candidate]:
    rows = batch // strategy.dp
    sizes = [size for size in _MICROS if rows % size == 0] if strategy.pp > 1 or rows > 1 else [rows]
    if strategy.pp == 1 and rows not in sizes:
        sizes.append(rows)
    # The fewer forwards the better, where nothing waits for them.
    for size in sorted(sizes, reverse=True):
        for recompute in (False, True):
            if strategy.pp == 1:
                yield Candidate(strategy, size, rows // size, recompute)
                continue
            for schedule in ("1f1b", "interleaved") if strategy.pp > 1 else (None,):
                if schedule == "interleaved" and ((rows // size) % strategy.pp or 2 * strategy.pp > blocks):
                    continue
                made = replace(strategy, schedule=schedule, microbatches=rows // size)
                yield Candidate(made, size, rows // size, recompute)


def _least(known: Known, candidate: Candidate, rest: Rest) -> Peak:
    """States, and what forward keeps of the micro-batches that are under way at least: quicker than the peak."""
    kept = known.kept(candidate.strategy).at(candidate.rows) * min(candidate.strategy.pp, candidate.micros)
    gradients = rest.gradients if candidate.strategy.dp > 1 else 0
    return Peak(rest.parameters, gradients, rest.optimizer, round(kept), 0, "backward")


def _peak(known: Known, candidate: Candidate, rest: Rest) -> Peak:
    strategy = candidate.strategy
    pieces, weights = known.pieces(strategy.tp, strategy.cp), known.weights(strategy.tp, strategy.cp)
    return max(
        (
            peak(strategy, place, pieces, weights, own, rest, rows=candidate.rows, micros=candidate.micros)
            for place, own in known.ranges(strategy).items()
        ),
        key=lambda one: one.total,
    )


def _row(known: Known, candidate: Candidate, load: Load, top: Peak, on: Hardware, rates: Rates, facts: Facts) -> Row:
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
        _relieved(known, parts, load, candidate, on, rates),
        sum(size for axis, size in load.sent.items() if spans(strategy, axis, on.node)),
    )


def _relieved(
    known: Known, parts: Parts, load: Load, candidate: Candidate, on: Hardware, rates: Rates
) -> dict[str, float]:
    """What a step would take with levers of the data axis."""

    def predict(strategy: Strategy) -> float:
        terms = tuple(data_terms(known, strategy, candidate.micros, on.node))
        return seconds(replace(load, terms=terms), strategy, on, rates).total

    return levers_that_help(candidate.strategy, parts.total, predict)


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


def _over(candidate: Candidate, top: Peak, usable: float) -> Refused:
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
