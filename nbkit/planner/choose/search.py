"""Tries every strategy on given hardware, and makes a plan of those that fit, the fastest first.

`search` first predicts the step time of each strategy, which is cheap. Then it computes the memory of the fastest ones
until `ROWS` strategies fit, or of all on few devices. A strategy is refused at once if its parameters, gradients and
optimizer state alone do not fit.

A `Plan` holds the rows, the best first, and the refused strategies with the arithmetic. It is shown as text or HTML,
and `why` explains why one row comes before another. `recommended` chooses one of several strategies: by step time, or
if the times are too close, one that saves a switch or memory. `keys_that_help` finds the keys of the data axis
(nbkit/techniques/) that shorten a step which waits for its link.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import Any, Literal, TypeVar

from nbkit import techniques
from nbkit.errors import StrategyError, UsageError
from nbkit.figures import between, html_table, size
from nbkit.figures import seconds as span
from nbkit.planner.choose.load import (
    Candidate,
    Hardware,
    Known,
    Load,
    Rates,
    Subject,
    data_terms_of,
    interval,
    lines_of,
    load_of,
    rest_of,
    seconds,
    spans,
)
from nbkit.planner.job_facts import Facts
from nbkit.planner.peak import Peak, peak
from nbkit.planner.step import Parts
from nbkit.planner.traffic import Rest
from nbkit.planner.validate import validate
from nbkit.strategy import Strategy, divisors
from nbkit.trainer_options import RECOMPUTE

ALIKE = 1.02
"""Step times within this factor count as equal. Then the simpler strategy is recommended."""

AGED = 400  # steps
WIDER = 0.1
"""A step time that was measured more than `AGED` steps ago may now be longer or shorter by this share: the ranks, their
links and their other load may have changed since."""

T = TypeVar("T")


def fastest(seconds: Mapping[T, float]) -> T | None:
    """Return the first key whose seconds are within `ALIKE` of the least. The order is that of Strategy.every."""
    least = min(seconds.values(), default=0.0)
    return next((one for one, took in seconds.items() if took <= ALIKE * least), None)


@dataclass(frozen=True)
class Choice:
    """A recommendation. strategy: "" if too little is known. why: the reason. rivals: others that may be faster."""

    strategy: str = ""
    why: Literal["fastest", "in force", "least memory", ""] = ""
    rivals: tuple[str, ...] = ()


def recommended(rows: Sequence[Mapping[str, Any]], limit: float | None, now: str) -> Choice:
    """Return the recommended strategy among those that fit. Recommend none if too little is known.

    The step times of at least two strategies and their bounds (see `bounds_of`) must be known, including those of the
    strategy in force. The fastest strategy is recommended; of equally fast ones, the simplest. If the bounds leave open
    which of several strategies is the fastest, the strategy in force is recommended if it is one of them, since a
    switch may gain nothing. Otherwise the one of them that needs the least memory is recommended.
    rows: a table of strategies, simple ones first. limit: bytes that the fullest rank can hold; None if unknown.
    now: the strategy in force.
    """
    sizes = {row["strategy"]: row["peak_bytes"] or row["memory"].get("after", 0) for row in rows if row["ok"]}
    fits = {row["strategy"]: row for row in rows if row["ok"] and (limit is None or sizes[row["strategy"]] <= limit)}
    error = prediction_error(rows)
    bounds = {name: bounds_of(row, error) for name, row in fits.items() if _seconds(row) is not None}
    known = {name: _seconds(fits[name]) or 0.0 for name, (_, high) in bounds.items() if not math.isinf(high)}
    first = fastest(known) if len(known) > 1 else None
    if first is None or (now in fits and now not in known):
        return Choice()
    rivals = [name for name in known if name != first and ALIKE * bounds[name][0] < bounds[first][1]]
    if not rivals:
        return Choice(first, "fastest")
    tied = [name for name in known if name == first or name in rivals]
    if now in tied:
        chosen = Choice(now, "in force")
    else:
        chosen = Choice(min(tied, key=lambda name: sizes[name]), "least memory")
    return replace(chosen, rivals=tuple(name for name in tied if name != chosen.strategy))


NEAR = 1.03
"""A measured step counts as equal to the best one if it is longer by at most this factor."""


def undecided(rows: Iterable[Mapping[str, Any]], now: str) -> list[str]:
    """Return the strategies of a comparison that should be measured longer to find the fastest; [] if none.

    These are the fastest one, and those whose median is more than `NEAR` times as long, but whose interval overlaps
    with the fastest one's. now: the strategy in force. It is left out.
    """
    known = [row for row in rows if not row["error"] and row["high_s"] is not None]
    best = min(known, key=lambda row: row["step_s"], default=None)
    if best is None:
        return []
    close = [
        row["strategy"] for row in known if row["low_s"] <= best["high_s"] and row["step_s"] > NEAR * best["step_s"]
    ]
    return [one for one in (best["strategy"], *close) if one != now] if close else []


def _seconds(row: Mapping[str, Any]) -> float | None:
    found: float | None = row["step_s"] if row["step_s"] is not None else row["predicted_step_s"]
    return found


def prediction_error(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the largest factor between a measured and a predicted step time of this job; None if no row has both."""
    both = [(row["step_s"], row["predicted_step_s"]) for row in rows]
    factors = [max(took / said, said / took) for took, said in both if took and said]
    return max(factors, default=None)


def bounds_of(row: Mapping[str, Any], error: float | None = None) -> tuple[float, float]:
    """Return the lower and the upper bound of a row's step time, in seconds.

    The bounds are 0 and infinity if too few steps were measured. They are wider if the steps were long ago. For a
    prediction they follow from the factor `error`; they are 0 and infinity if it is None.
    """
    if row["step_s"] is None:
        predicted: float = row["predicted_step_s"]
        return (predicted / error, predicted * error) if error is not None else (0.0, math.inf)
    if row["step_low_s"] is None or row["step_high_s"] is None:
        return 0.0, math.inf
    wider = 1 + WIDER * (row["step_ago"] > AGED)
    return row["step_low_s"] / wider, row["step_high_s"] * wider


_WORTH = 0.95
"""A key is mentioned if a step with it takes at most this share of the time."""


def keys_that_help(strategy: Strategy, plain: float, predict: Callable[[Strategy], float | None]) -> dict[str, float]:
    """Return {key with its value: predicted seconds of a step} for keys that make the step shorter.

    Keys that keep training equal to one process come first, each with its best value. Then come the keys that change
    the training. plain: seconds of a step of `strategy` without these keys. The result is empty unless every rank holds
    whole gradients.
    """
    if strategy.zero or strategy.dp == 1 or strategy.dp < strategy.mesh.size:
        return {}
    exact, rough = dict[str, float](), dict[str, float]()
    for key in techniques.keys():
        found = {}
        for value in key.suggestions:
            try:
                took = predict(replace(strategy, settings={key.name: value}))
            except StrategyError:
                continue
            if took is not None and took <= _WORTH * plain:
                found[value] = took
        same = [value for value in found if key.deviation(value) is None]
        if same:
            best = min(same, key=lambda value: (found[value], key.word(value)))
            exact[key.word(best)] = found[best]
        rough |= {key.word(value): took for value, took in found.items() if value not in same}
    return exact | rough


def is_exact(word: str) -> bool:
    """Return True if this word of a strategy leaves the losses equal to those of one process."""
    name, _, value = word.lower().partition("=")
    if not techniques.is_key(name):  # the ranks know more keys than this process
        return False
    key = techniques.key_of(name)
    return key.deviation(key.parse(value)) is None


@dataclass(frozen=True)
class PlanRow:
    """A strategy that fits.

    strategy: as one types it. microbatch_size: rows of a forward, if there is no pipeline. recompute: as in
    nbkit.Compute. peak: bytes of the fullest rank. seconds: the step time, with its parts and its bounds low and high.
    sent: bytes that the busiest rank sends in a step, by axis. between: the part of them that crosses nodes. rate:
    tokens per second, or samples if they have no positions. limit: the part that takes longest. levers: the step time
    with each key of nbkit/techniques/ that relieves a link for which the step waits. With such a key, except bucket=,
    the training differs from that of one process.
    """

    strategy: str
    label: str
    microbatch_size: int | None
    recompute: bool | str
    peak: Peak
    seconds: float
    low: float
    high: float
    parts: Parts
    sent: dict[str, float]
    rate: float
    device_seconds_per_million: float
    limit: str
    levers: Mapping[str, float] = field(default_factory=dict)
    between: float = 0.0

    @property
    def settings(self) -> str:
        """Return all settings of a Trainer for this row, in one line."""
        words = [self.strategy] + [f"microbatch_size={self.microbatch_size}"] * (self.microbatch_size is not None)
        return " ".join(words + [_spelled(self.recompute)] * bool(self.recompute))


@dataclass(frozen=True)
class Words:
    """A text whose repr is the text itself."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Refused:
    """A strategy that does not fit. why: one sentence; numbers: the arithmetic."""

    strategy: str
    why: str
    numbers: str


@dataclass(frozen=True)
class Plan:
    """The result of `nbkit.plan`. rows: the best first; the first is recommended. considered: the number of strategies.

    on: the hardware. memory: bytes of a device. usable: the bytes that a job may use of it. unit: the unit of rates,
    "tokens" or "rows".
    """

    model: str
    batch: int
    on: str
    devices: int
    memory: float
    usable: float
    unit: str
    rows: tuple[PlanRow, ...]
    refused: tuple[Refused, ...]
    considered: int

    def why(self, first: str, second: str) -> Words:
        """Return how two rows differ, part by part. Raises UsageError for a strategy that has no row."""

        return Words(why(self, first, second))

    def __repr__(self) -> str:

        return text(self)

    def _repr_html_(self) -> str:

        return page(self)


ROWS = 16
USABLE = 0.92
"""The usable share of a device's memory. CUDA, NCCL and the allocator's gaps take the rest."""
LEAST_POSITIONS = 1024
"""The fewest positions per rank along a context axis. With fewer, the traffic costs more time than cp saves."""
_SMALL = 64
_MICROS = (1, 2, 4, 8, 16)
_ALIKE = 200
"""Steps that differ by less than 1 / _ALIKE count as equal. Then the simpler strategy comes first."""


def search(subject: Subject, batch: int, on: Hardware, *, rates: Rates | None = None, memory: float = 0.0) -> Plan:
    """Return the plan for a global batch of `batch` rows.

    memory: usable bytes of a device; 0 means the share USABLE of its memory.
    """
    rates = rates or Rates()
    usable = memory or USABLE * on.device.memory
    facts = replace(subject.facts(batch), world=on.devices, node=on.node)
    subjects = {recompute: Known(subject.recomputing(recompute)) for recompute in RECOMPUTE}
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
    rows: list[PlanRow] = []
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
    return round(_ALIKE * log(took)), of.cp > 1, RECOMPUTE.index(candidate.recompute), axes, of.zero, number


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
                # With a pipeline, zero 3 keeps all parameters gathered, so it saves little compared to zero 2.
                stages = range(4) if pp == 1 or world <= _SMALL else range(3)
                groups = [(0, dp)] if dp == 1 else [(stage, dp) for stage in stages]
                if dp * tp * cp > on.node and dp > 1 and 1 < on.node // (tp * cp) < dp and pp == 1:
                    groups.append((3, on.node // (tp * cp)))
                for zero, shard in groups:
                    if dp % shard == 0:
                        made = Strategy(dp, tp, pp, cp, zero, shard, "1f1b" if pp > 1 else None, 2 * pp)
                        yield made
                        if on.nodes > 1 and dp > 1 and pp > 1:  # either pp or dp can cross nodes
                            yield replace(made, order="dp")


def _candidates(strategy: Strategy, batch: int, blocks: int) -> Iterator[Candidate]:
    rows = batch // strategy.dp
    sizes = [micro for micro in _MICROS if rows % micro == 0] if strategy.pp > 1 or rows > 1 else [rows]
    if strategy.pp == 1 and rows not in sizes:
        sizes.append(rows)
    # Large micro-batches come first: without a pipeline, fewer forwards are better.
    for micro in sorted(sizes, reverse=True):
        for recompute in RECOMPUTE:
            if strategy.pp == 1:
                yield Candidate(strategy, micro, rows // micro, recompute)
                continue
            for schedule in ("1f1b", "interleaved") if strategy.pp > 1 else (None,):
                if schedule == "interleaved" and ((rows // micro) % strategy.pp or 2 * strategy.pp > blocks):
                    continue
                made = replace(strategy, schedule=schedule, microbatches=rows // micro)
                yield Candidate(made, micro, rows // micro, recompute)


def _least(known: Known, candidate: Candidate, rest: Rest) -> Peak:
    """Return a lower bound of the peak, which is quicker to compute than the peak.

    It counts the bytes at rest, and what forward keeps for the smallest number of micro-batches under way.
    """
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


def _row(
    known: Known, candidate: Candidate, load: Load, top: Peak, on: Hardware, rates: Rates, facts: Facts
) -> PlanRow:
    strategy, parts = candidate.strategy, seconds(load, candidate.strategy, on, rates)
    low, high = interval(load, strategy, on, rates)
    units = (facts.batch or 0) * (facts.sequence or 1)
    return PlanRow(
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
    """Return the seconds of a step with each key of the data axis that would shorten it."""

    def predict(strategy: Strategy) -> float:
        terms = tuple(data_terms_of(known, strategy, candidate.micros, on.node))
        return seconds(replace(load, terms=terms), strategy, on, rates).total

    return keys_that_help(candidate.strategy, parts.total, predict)


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
    how = f" with {candidate.rows} row{'s' * (candidate.rows > 1)} a forward"
    how += f" and {_spelled(candidate.recompute)}" * bool(candidate.recompute)
    return Refused(str(candidate.strategy), f"It does not fit{how}.", sizes + more)


def _spelled(recompute: bool | str) -> str:
    return "recompute" if recompute is True else f"recompute={recompute}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def chosen(plan: Plan) -> PlanRow:
    """Return the recommended row. Raises StrategyError if nothing fits. It names the strategy that comes closest."""
    if plan.rows:
        return plan.rows[0]
    near = plan.refused[-1] if plan.refused else None
    raise StrategyError(
        f"No strategy of {plan.devices} devices fits {plan.model} with a batch of {plan.batch}.",
        numbers=f"{near.strategy}: {near.numbers}" if near else f"{plan.considered} looked at",
        hint="more devices, or a smaller batch",
    )


_HEADS = (
    "strategy",
    "step",
    "interval",
    "limited by",
    "peak",
    "states",
    "activations",
    "working memory",
    "sent in a step",
    "most on",
    "rate",
    "device s / M",
)
_WORDS = {"strategy", "limited by", "most on"}  # other columns hold figures
_SHOWN, _REFUSED = 12, 4


def text(plan: Plan) -> str:
    """Return the plan as text: the best rows, what was refused, and how to go on."""
    if not plan.rows:
        return "\n".join([_title(plan), "Nothing fits.", *_refusals(plan)])
    table = [_HEADS, *(_cells(row, plan) for row in plan.rows[:_SHOWN])]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    marked = [f"{mark} {line}" for mark, line in zip([" ", "→", *" " * len(lines)], lines, strict=False)]
    left = len(plan.rows) - _SHOWN
    more = [f"  … {left} more that fit: .rows"] if left > 0 else []
    return "\n".join([_title(plan), *marked, *more, *_levers(plan), *_refusals(plan)])


def page(plan: Plan) -> str:
    """Return the plan as HTML, in the notebook's own colours."""
    notes = "".join(f"<div>{html.escape(line.strip())}</div>" for line in [*_levers(plan), *_refusals(plan)])
    title = html.escape(_title(plan))
    rows = [_cells(row, plan) for row in plan.rows[:_SHOWN]]
    table = html_table(_HEADS, rows, figures=set(_HEADS) - _WORDS, bold=0)
    return f"<div>{title}</div><div style='overflow-x:auto'>{table}</div>{notes}"


def why(plan: Plan, first: str, second: str) -> str:
    """Return how two rows differ, part by part.

    Raises UsageError for a strategy that has no row, with the reason if it was refused.
    """
    one, other = _find(plan, first), _find(plan, second)
    fast, slow = (one, other) if one.seconds <= other.seconds else (other, one)
    lines = [f"{fast.settings} takes {span(fast.seconds)} a step, {slow.settings} {span(slow.seconds)}:"]
    for name in ("compute", "exposed", "bubble", "optimizer"):
        a, b = getattr(fast.parts, name), getattr(slow.parts, name)
        if abs(b - a) >= 0.01 * slow.seconds:
            lines.append(f"  {name:12} {span(a):>9} and {span(b):>9}   {'+' if b >= a else '-'}{span(abs(b - a))}")
    for axis in sorted({*fast.sent, *slow.sent}):
        a, b = fast.sent.get(axis, 0.0), slow.sent.get(axis, 0.0)
        lines.append(f"  sent on {axis:4} {size(a):>9} and {size(b):>9}")
    lines.append(f"  peak         {size(fast.peak.total):>9} and {size(slow.peak.total):>9}   of {size(plan.usable)}")
    if fast.high >= slow.low:
        lines.append("Their intervals overlap: measure both before you rely on it.")
    return "\n".join(lines)


def _find(plan: Plan, wanted: str) -> PlanRow:
    words = " ".join(wanted.split())
    for row in plan.rows:
        if words in (row.settings, row.strategy, row.label):
            return row
    refused = next((one for one in plan.refused if one.strategy == words), None)
    if refused is not None:
        raise UsageError(f"{words} is refused. {refused.why}", numbers=refused.numbers, hint=plan.rows[0].strategy)
    names = ", ".join(row.strategy for row in plan.rows[:5])
    raise UsageError(
        f"{words!r} has no row in this plan.", numbers=f"the best: {names}", hint=f'"{names.split(", ")[0]}"'
    )


def _title(plan: Plan) -> str:
    return (
        f"{plan.model}, {plan.batch:,} rows a step, on {plan.on}: {len(plan.rows)} strategies fit, "
        f"{len(plan.refused)} are refused; predicted, not measured"
    )


def _levers(plan: Plan) -> list[str]:
    """Return lines about the keys that would relieve the link of the best row that has any."""
    row = next((row for row in plan.rows if row.levers), None)
    if row is None:
        return []
    return [f"  {row.strategy} waits for its link: {span(row.seconds)} a step. {in_words(row.levers)}"]


def in_words(levers: Mapping[str, float]) -> str:
    """Return the seconds of a step with each key, in words. Keys that do not change losses come first."""
    words = []
    for exact, what in ((True, "With the same sums"), (False, "Not equal to one process")):
        some = [f"{lever} {span(took)}" for lever, took in levers.items() if is_exact(lever) is exact]
        words += [f"{what}: {', '.join(some)}"] * bool(some)
    return ". ".join(words)


def _refusals(plan: Plan) -> list[str]:
    return [f"  refused: {one.strategy}: {one.why} {one.numbers}" for one in plan.refused[-_REFUSED:]]


def _cells(row: PlanRow, plan: Plan) -> Sequence[str]:
    states = row.peak.parameters + row.peak.gradients + row.peak.optimizer
    axis = max(row.sent, key=lambda one: row.sent[one], default="")
    nodes = f", {size(row.between)} between nodes" if row.between else ""
    return (
        row.settings,
        span(row.seconds),
        between(row.low, row.high),
        row.limit,
        size(row.peak.total),
        size(states),
        size(row.peak.activations),
        size(row.peak.working),
        size(sum(row.sent.values())) if row.sent else "nothing",
        f"{axis}{nodes}",
        f"{row.rate:,.0f} {plan.unit}/s",
        f"{row.device_seconds_per_million:.3g}",
    )
