"""Make the table of all strategies and their costs for a running job, as plain values, from any thread."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from nbkit.errors import NbkitError
from nbkit.planner.choose.search import keys_that_help, recommended
from nbkit.planner.peak import during
from nbkit.planner.traffic import wire_bytes
from nbkit.rank.train.estimate import free_memory
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.peak_bytes import largest
from nbkit.rank.train.estimate.time_model import (
    measured_pace,
    predicted_pause,
    predicted_step,
    unpredicted,
    unpredicted_pause,
)
from nbkit.rank.train.job import Job
from nbkit.schedules import registered
from nbkit.strategy import Strategy

_PROVEN = "a whole step of it was compared with one process"
_UNPROVEN = "a whole step of it is compared with one process before a switch"
_REST = 1.0  # pause after each row, as a multiple of its time: the training thread needs the interpreter too


def table(job: Job, *, every: bool = False) -> dict[str, Any]:
    """Return facts about the job, and a row for every strategy of its world with the cost of a switch to it.

    every: include all schedules of a pipeline, not only 1f1b and the user's.

    "nodes": the node number of each rank. "limit_bytes": bytes that the fullest rank can hold; None if unknown.
    "held": the distinct rows of fractions by block, and the index of each rank's row. "recommended": the strategy to
    choose, "" without evidence. "unpredicted", "unpredicted_pause": why steps or pauses are not predicted, "" if they
    are. "levers": if plain data parallelism waits for its link, its "strategy", its predicted "step_s", and in "each"
    the predicted seconds of a step with each key that would help; otherwise {}.

    Each row of "options" has these keys. Values are None if unknown.
    moved_bytes: exact bytes that a switch moves. memory: bytes of the fullest rank between steps now, during the
    switch, and between steps under the new strategy. peak_bytes: the peak of the fullest rank in a step. step_bytes:
    bytes that the busiest rank sends in a step. Formulas predict these two until they are measured (peak_counted,
    sent_counted). between_bytes: bytes that all ranks send to other nodes in a step.
    step_s: the measured median of step_steps steps, if the strategy has run in this job. step_low_s, step_high_s: its
    confidence interval; None for too few steps. step_ago: the number of steps since then. predicted_step_s: seconds of
    a step, predicted from the steps of the strategy in force, for other strategies. switch_s: the predicted pause.
    untried: the model was not run to find out if the strategy fits. Then it is not "ok", but can be chosen; see
    `look_at_all`. proof: the state of the proof, if "ok". cut: the stages of a pipeline and their costs, in words.
    """
    now, seen = job.strategy, job.cost_model()
    ends, left = seen.census.at_rest(now), free_memory.left(job.device, ranks=_on_this_node(job))
    holds = [rest.total for rest in ends]
    link = job.builder.link
    own = [each.name for each in registered()]
    schedules = ("1f1b", "interleaved", "zb", "zbv", *own) if every else ("1f1b", *own)
    options = []
    offered = list(Strategy.every(job.world_size, schedules=schedules, experts=bool(job.builder.facts.experts)))
    for strategy in offered if str(now) in map(str, offered) else [now, *offered]:
        began = time.perf_counter()
        options.append(_option(job, seen, strategy, holds, left))
        time.sleep(_REST * (time.perf_counter() - began))
    return {
        "strategy": str(now),
        "label": now.label,
        "step": job.step,
        "ranks": job.world_size,
        "nodes": list(link.node_of) if link is not None else [0] * job.world_size,
        "link": str(link) if link is not None else "",
        "limit_bytes": holds[0] + left if left is not None else None,
        "arithmetic": str(job.feed.fits(now) or ""),
        "blocks": [{"name": name, "parameters": sum(sizes.values())} for name, sizes in seen.blocks.items()],
        "held": _fractions(seen, now),
        "options": options,
        "recommended": recommended(options, holds[0] + left if left is not None else None, str(now)).strategy,
        "unpredicted": unpredicted(job),
        "unpredicted_pause": unpredicted_pause(job),
        "levers": _levers(job, seen),
        "previous": job.previous,
        "last": asdict(job.switches[-1]) if job.switches else None,
    }


def option(job: Job, text: str) -> dict[str, Any]:
    """Return the row of `table` for any strategy of these ranks.

    Raises StrategyError if `text` is not a strategy.
    """
    new, seen = job.parsed(text), job.cost_model()
    left = free_memory.left(job.device, ranks=_on_this_node(job))
    return _option(job, seen, new, [rest.total for rest in seen.census.at_rest(job.strategy)], left)


def moved_bytes(job: Job, new: Strategy) -> tuple[int, int]:
    """Return (bytes that all ranks receive, the most that one rank receives) in a switch to `new`.

    Raises StrategyError if the model cannot be split, or was not examined for `new`; see FactFinder.sync.
    """
    seen = job.cost_model()
    flow = seen.census.flow(job.strategy, seen.placed(new, now=job.strategy))
    return flow.total, max(flow.received, default=0)


def predicted_switch(job: Job, text: str) -> dict[str, Any]:
    """Return moved_bytes and switch_s of a switch to `text`, and the reason if switch_s is None. Collective.

    The numbers are the same as in the table. Raises StrategyError if the model cannot be split.
    """
    new = job.parsed(text)
    job.builder.finder.sync([new])
    seen = job.cost_model()
    new = seen.placed(new, now=job.strategy)
    flow = seen.census.flow(job.strategy, new)
    return {
        "moved_bytes": flow.total,
        "switch_s": predicted_pause(job, seen.census, new, flow),
        "why": unpredicted_pause(job),
    }


def _option(job: Job, seen: CostModel, strategy: Strategy, holds: Sequence[int], left: int | None) -> dict[str, Any]:
    pace = measured_pace(job, strategy)
    found: dict[str, Any] = {
        "strategy": str(strategy),
        "label": strategy.label,
        "ok": False,
        "untried": bool(job.builder.facts.missing([strategy])),
        "why": "",
        "proof": _UNPROVEN,
        "moved_bytes": None,
        "memory": {},
        "peak_bytes": None,
        "peak_counted": False,
        "held": {},
        "step_bytes": None,
        "sent_counted": False,
        "between_bytes": None,
        "step_s": pace.seconds if pace is not None else None,
        "step_low_s": pace.low if pace is not None else None,
        "step_high_s": pace.high if pace is not None else None,
        "step_steps": pace.steps if pace is not None else 0,
        "step_ago": pace.ago if pace is not None else 0,
        "predicted_step_s": None,
        "switch_s": None,
        "arithmetic": "",
        "cut": "",
    }
    try:
        found["arithmetic"] = str(job.feed.fits(strategy) or "")
        job.builder.plan(strategy)
        strategy = seen.placed(strategy, now=job.strategy)
        flow = seen.census.flow(job.strategy, strategy)
    except NbkitError as error:
        found["why"] = _told(error)
        return found
    if (proof := job.builder.step_proofs.get(strategy.composed)) is not None:
        if proof.refusal is not None:
            return {**found, "why": _told(proof.refusal)}
        found["proof"] = f"not everything was compared: {proof.unproven}" if proof.unproven else _PROVEN
    after = [rest.total for rest in seen.later.at_rest(strategy)]
    peak = _peak(job.device, holds, after, flow.received, left) if strategy != job.strategy else max(holds)
    found.update(
        ok=True,
        moved_bytes=flow.total,
        memory={"now": max(holds), "during": peak, "after": max(after)},
        held=_fractions(seen, strategy),
        cut=seen.facts.cut(strategy),
        step_bytes=max(map(wire_bytes, seen.terms(strategy)), default=None),
        between_bytes=seen.between_nodes(strategy),
        switch_s=predicted_pause(job, seen.census, strategy, flow),
    )
    peak, sent = job.ledger.counts.get(str(strategy), (0, 0))
    found.update(peak_bytes=peak or _at_the_peak(job, seen, strategy), peak_counted=peak > 0, sent_counted=sent > 0)
    found["step_bytes"] = sent or found["step_bytes"]
    if strategy != job.strategy or found["step_s"] is None:
        found["predicted_step_s"] = predicted_step(job, seen, strategy)
    return found


def findings(job: Job) -> Iterator[None]:
    """Find the facts that are missing in the table and that take seconds to find. Yield after each.

    Run it in a thread during a training. Known facts are not examined again.
    """
    if look_at_all(job):
        yield
    yield from measure_peaks(job)


def look_at_all(job: Job) -> bool:
    """Find, on rank 0, the facts about the model that all strategies need.

    Return True if any was missing. The model runs on a few rows, for seconds. Run it in a thread during a training.
    """
    builder, before = job.builder, job.builder.facts
    if builder.rank == 0:
        every = Strategy.every(job.world_size, schedules=("1f1b",), experts=bool(builder.facts.experts))
        builder.finder.find(every, beside=True)
    return builder.facts is not before


def measure_peaks(job: Job) -> Iterator[None]:
    """Run the model on tensors without memory for each pair (tp, cp), if that was not done yet.

    A pair takes about a second. Yield once if anything was found.
    """
    if job.config.hints.example is None:
        return
    axes = sorted({(one.tp, one.cp) for one in Strategy.every(job.world_size, schedules=("1f1b",))})
    if job.cost_model().peaks.measure(axes, job.builder.aside):
        yield


def _at_the_peak(job: Job, seen: CostModel, strategy: Strategy) -> int | None:
    """Return the peak bytes of the fullest rank in a step, including activations; None if unknown."""
    batch = getattr(job.feed.fits(strategy), "total", None)
    if batch is None or strategy.ep > 1 or not seen.peaks.knows(strategy.tp, strategy.cp):
        return None
    top = largest(seen.peaks.of(strategy, batch))
    return top.total if top is not None else None


def _levers(job: Job, seen: CostModel) -> dict[str, Any]:
    """Return the keys that help plain data parallelism. Both times are predicted, because the keys have not run yet."""
    plain = Strategy(dp=job.world_size)
    took = predicted_step(job, seen, plain)
    if took is None:
        return {}
    each = keys_that_help(plain, took, lambda strategy: predicted_step(job, seen, strategy))
    return {"strategy": str(plain), "step_s": took, "each": each} if each else {}


def _peak(
    device: torch.device, now: Sequence[int], after: Sequence[int], received: Sequence[int], left: int | None
) -> int:
    """Return the bytes of the fullest rank during a switch. Assumes that all ranks have as much room as this one."""
    buffers = 2 * min(max(received, default=0), free_memory.round_bytes(max(after), device, free=left))
    return max(during(now, after, buffers=buffers, left=[left] * len(now)).num_bytes)


def _on_this_node(job: Job) -> int:
    link = job.builder.link
    return link.node_of.count(link.node_of[job.rank]) if link is not None else 1


def _told(error: NbkitError) -> str:
    return " ".join(line for line in (error.what, error.numbers) if line)


def _fractions(seen: CostModel, strategy: Strategy) -> dict[str, Any]:
    rows, of_ranks = seen.census.fractions(strategy)
    return {"rows": rows, "ranks": of_ranks}
