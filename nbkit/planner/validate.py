"""Checks whether a strategy fits a model, a batch and a world, and shows the arithmetic, before anything moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbkit.errors import StrategyError
from nbkit.planner.job_facts import Facts
from nbkit.planner.stages import ranks_of_stages, spelled, stage_ranges, too_few
from nbkit.strategy import Strategy, divisors
from nbkit.techniques import DEGREES
from nbkit.tensor_layout import bounds


@dataclass(frozen=True)
class Finding:
    """A remark on a strategy. error: True if the strategy cannot run; False if the remark is only information.

    what: one sentence. numbers: the arithmetic. hint: what to type instead, or "".
    """

    error: bool
    what: str
    numbers: str
    hint: str = ""

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.numbers, self.hint and f"→ {self.hint}") if line)


def validate(strategy: Strategy, facts: Facts) -> list[Finding]:
    """Return all findings on `strategy` for a job with these `facts`, errors first."""
    found = [*_world(strategy, facts), *_tensor(strategy, facts), *_pipeline(strategy, facts)]
    found += [*_batch(strategy, facts), *_context(strategy, facts)]
    found += [Finding(False, *deviation) for deviation in strategy.deviations]
    found += [Finding(False, "A setting has no effect.", note) for note in strategy.without_effect]
    return sorted(found, key=lambda finding: not finding.error)


def refuse(strategy: Strategy, facts: Facts) -> list[Finding]:
    """Return the remarks on a strategy that can run. Raises StrategyError with the first reason if it cannot."""
    found = validate(strategy, facts)
    for finding in found:
        if finding.error:
            raise StrategyError(finding.what, numbers=finding.numbers, hint=finding.hint)
    return found


def _world(strategy: Strategy, facts: Facts) -> Iterator[Finding]:
    size = strategy.mesh.size
    if facts.world is not None and size != facts.world:
        degrees = " x ".join(f"{axis} {strategy.mesh.degree(axis)}" for axis in _split(strategy)) or "dp 1"
        more = "more" if size > facts.world else "fewer"
        yield Finding(
            True,
            f"The strategy needs {more} ranks than there are.",
            f"{degrees} = {size} rank{'s' * (size != 1)}, the world has {facts.world}",
            "strategy='ddp', which uses all ranks",
        )
    # Ranks of a tp group are neighbours, so a group stays within a node if tp divides the node.
    if facts.node is not None and strategy.tp > 1 and (facts.node % strategy.tp or strategy.order == "tp"):
        yield Finding(
            False,
            "Tensor parallelism sends more than other axes, and here it crosses nodes.",
            f"{facts.node} ranks of a node / tp {strategy.tp} = {facts.node / strategy.tp:.3g}",
            "tp=" + _listed([n for n in divisors(facts.node) if n > 1]) if facts.node > 1 else "",
        )


def _tensor(strategy: Strategy, facts: Facts) -> Iterator[Finding]:
    tp = strategy.tp
    if tp == 1:
        return
    heads = facts.heads, facts.kv_heads
    for count, name in zip(heads, ("heads", "key and value heads"), strict=True):
        if count is not None and count % tp:
            fitting = [n for n in divisors(count) if all(other is None or other % n == 0 for other in heads)]
            yield Finding(
                True,
                f"Tensor parallelism gives each rank whole attention heads, and {count} {name} cannot be divided by "
                f"{tp} ranks.",
                f"{count} {name} / tp {tp} = {count / tp:.3g}",
                f"tp={_listed(fitting)}",
            )
    if facts.vocab is not None and facts.vocab % tp:
        yield from _uneven("vocabulary", facts.vocab, "tp", tp, "rows of the embedding", error=facts.vocab < tp)
    if facts.sequence is not None and facts.sequence % tp:
        yield from _uneven("sequence", facts.sequence, "tp", tp, "positions between the blocks", error=False)


def _pipeline(strategy: Strategy, facts: Facts) -> Iterator[Finding]:
    pp, micro, schedule = strategy.pp, strategy.microbatches, strategy.schedule
    if pp == 1 or micro is None:
        return
    stages = len(ranks_of_stages(strategy))
    blocks = len(facts.costs) if facts.costs is not None else facts.blocks
    if blocks is not None and blocks < stages:
        yield Finding(True, *too_few(strategy, blocks))
    elif blocks is not None and (blocks % stages or facts.costs is not None):
        costs = facts.costs if facts.costs is not None else (1.0,) * blocks
        ranges = stage_ranges(costs, strategy)
        loads = [sum(costs[start:stop]) for start, stop in ranges]
        over = max(loads) * stages / sum(loads) if sum(loads) else 1.0
        if over > 1:
            yield Finding(
                False,
                "The stages are not equal.",
                f"{blocks} blocks in {stages} stages = {spelled(ranges)}; the longest takes {over:.3g} x the mean",
            )
    if micro < pp:
        idle = (pp - 1) / (micro + pp - 1)
        yield Finding(
            False,
            "The pipeline has fewer micro-batches than ranks, so some ranks always wait.",
            f"{micro} micro-batch{'es' * (micro > 1)}, pp {pp}: (p-1)/(m+p-1) = "
            f"{pp - 1}/{micro + pp - 1} = {idle:.0%} of a gpipe or 1f1b step is idle",
            f"microbatches={2 * pp}",
        )
    elif schedule == "interleaved" and micro % pp:
        yield Finding(
            False,
            "The schedule interleaved takes micro-batches in rounds of pp, and its last round is not full.",
            f"{micro} micro-batches / pp {pp} = {micro / pp:.3g} rounds",
            f"microbatches={micro // pp * pp} or {(micro // pp + 1) * pp}",
        )


def _batch(strategy: Strategy, facts: Facts) -> Iterator[Finding]:
    batch, dp, micro = facts.batch, strategy.dp, strategy.microbatches
    if batch is None:
        return
    if batch % dp:
        below, above = batch // dp * dp, (batch // dp + 1) * dp
        yield Finding(
            True,
            "The global batch cannot be divided evenly over the data axis."
            if batch > dp
            else "The global batch is smaller than the data axis.",
            f"batch_size {batch} / dp {dp} = {batch / dp:.3g} rows per rank",
            f"batch_size={above}" + (f" or {below}" if below else ""),
        )
        return
    rows = batch // dp
    if micro is not None and rows < micro:
        yield Finding(
            True,
            "There are more micro-batches than rows.",
            f"batch_size {batch} / dp {dp} = {rows} row{'s' * (rows != 1)} per pipeline, {micro} micro-batches",
            f"microbatches={rows}, or batch_size={dp * micro}",
        )
    elif micro is not None and rows % micro:
        fewer = max(n for n in divisors(rows) if n < micro)
        more = min(n for n in divisors(rows) if n > micro)
        yield Finding(
            False,
            "The micro-batches are not equal.",
            f"batch_size {batch} / dp {dp} = {rows} rows per pipeline, in {micro} micro-batches of "
            f"{rows // micro + 1} and {rows // micro}",
            f"microbatches={fewer} or {more}",
        )


def _context(strategy: Strategy, facts: Facts) -> Iterator[Finding]:
    if strategy.cp > 1 and facts.sequence is not None and facts.sequence % strategy.cp:
        error = facts.sequence < strategy.cp
        yield from _uneven("sequence", facts.sequence, "cp", strategy.cp, "positions", error=error)


def _uneven(what: str, total: int, axis: str, degree: int, of: str, *, error: bool) -> Iterator[Finding]:
    parts = [stop - start for start, stop in (bounds(total, degree, index) for index in range(degree))]
    shown = "+".join(map(str, parts)) if degree <= 8 else f"{parts[0]} or {parts[-1]} each"
    yield Finding(
        error,
        f"The {what} is too small: some ranks would get no part of it."
        if total < degree
        else f"The {what} is cut unevenly.",
        f"{total} {of} over {axis} {degree} = {shown}",
        f"{axis}={total} or fewer" if error else "",
    )


def _split(strategy: Strategy) -> list[str]:
    return [axis for axis in DEGREES if strategy.mesh.degree(axis) > 1]


def _listed(numbers: list[int]) -> str:
    *most, last = map(str, numbers or [1])
    return f"{', '.join(most)} or {last}" if most else last
