"""Estimate the seconds of a switch and of a step after it: measured if possible, otherwise predicted, or None.

Before the first step, the seconds of a step are predicted from the measured times of the blocks and the links.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from nbkit.errors import StrategyError
from nbkit.planner.exchange import orders
from nbkit.planner.step import FORWARD, MeasuredStep, StepTraffic, predicted
from nbkit.rank.data.batch import rows_of
from nbkit.rank.device import accelerator
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.state_bytes import ReshardTraffic, StateBytes
from nbkit.rank.train.step.history import StepPace
from nbkit.records.event_words import recorded
from nbkit.records.events import Switched
from nbkit.strategy import Strategy

Job = Any  # nbkit.rank.train.job's, which imports this file


def seconds_before_a_step(
    model: CostModel, builder: Builder, strategy: Strategy, batch: int, *, recompute: bool | str | None = None
) -> float | None:
    """Return the predicted seconds of a step of `batch` rows; None if a necessary measurement is missing.

    recompute: recompute blocks in backward; default: as the builder does. The time of a selective recomputation is left
    out: it depends on the speed of memory, which is not measured.
    """
    link, costs, example = builder.link, builder.facts.costs, builder.config.hints.example
    if not costs or example is None or builder.options.fp8:
        return None  # the blocks were measured without fp8
    # The costs are the seconds of forward and backward of each block, without recomputation.
    again = (builder.options.recompute if recompute is None else recompute) is True
    compute = sum(costs) / rows_of(example) * batch
    if link is None:
        return (1 + FORWARD * again) * compute
    sends = model.sends(strategy)
    if sends is None:
        return None
    alone = MeasuredStep(Strategy(), {"compute": compute})
    return predicted(alone, StepTraffic((), 0), strategy, sends, link, costs, recomputed=(False, again)).total


_SWITCHES = 12  # number of newest switches that a prediction uses
_OWN_CORES = 0.9  # least CPU time of a rank that has its cores alone, as a fraction of its computing time
_PARTS = ("compute", "exposed", "data", "optimizer", "other")


def measured_pace(job: Job, strategy: Strategy) -> StepPace | None:
    """Return the pace of the newest steps under `strategy` in this training, of any age; None if there are none."""
    pace: StepPace | None = job.ledger.paces.of(str(strategy))
    return pace


def predicted_pause(job: Job, census: StateBytes, strategy: Strategy, flow: ReshardTraffic) -> float | None:
    """Return the predicted seconds without a step.

    A switch builds a sharded model, and moves the bytes over the measured link. Earlier switches of the job show how
    long both take. Return None before the first switch, which is slower than later ones, and if no link was measured.
    """
    link, made = job.builder.link, (job.switches[1:] or job.switches)[-_SWITCHES:]
    if link is None or not made:
        return None
    moving = _moving(job, flow)
    ratios = []
    for switched in made:
        then = _flow(census, switched, job.world_size)
        if then is not None and (modelled := _moving(job, then)) > 0:
            ratios.append((switched.pause_s - switched.prepare_s) / modelled)
    return _building(strategy, made) + moving * (statistics.median(ratios) if ratios else 1.0)


def switch_seconds(job: Job, census: StateBytes, strategy: Strategy, flow: ReshardTraffic) -> float:
    """Return the predicted seconds without a step. Before the first switch of the job, only bytes count."""
    pause = predicted_pause(job, census, strategy, flow)
    return pause if pause is not None else _moving(job, flow) if job.builder.link is not None else 0.0


def _flow(census: StateBytes, switched: Switched, world_size: int) -> ReshardTraffic | None:
    """Return the traffic of an earlier switch; None if it moved less than it would now, without optimizer state."""
    try:
        old, new = (Strategy.parse(text, world_size) for text in (switched.old, switched.new))
    except StrategyError:  # of another number of ranks, before a resize
        return None
    flows = (census.flow(*pair) for pair in product(orders(old), orders(new)))
    return next((flow for flow in flows if flow.total == switched.moved_bytes), None)


def predicted_step(
    job: Job, seen: CostModel, strategy: Strategy, *, recompute: bool | str | None = None
) -> float | None:
    """Return the predicted seconds of a step of a strategy that has not run; None if something is unknown.

    It is unknown on ranks that share cores, because their seconds depend on the other ranks. seen: the cost model of
    the job, for the number of rows in a forward pass that the step would have. recompute: recompute blocks; default: as
    now.
    """
    link, now, before = job.builder.link, job.strategy, job.builder.options.recompute
    again = before if recompute is None else recompute
    if (link is not None and link.crowded) or (link is None and job.world_size > 1) or job.config.compute.compile:
        return None
    if again != before and strategy.tp * strategy.cp > 1:
        return None  # the formulas do not include what recomputed blocks send again
    if again != before and "selective" in (again, before):
        return None  # its time depends on the speed of memory, which is not measured
    parts, batch = _parts(job), getattr(seen.fits(strategy), "total", None)
    if parts is None and batch is not None:
        return seconds_before_a_step(seen, job.builder, strategy, batch, recompute=again)
    if link is None:
        more = (1 + FORWARD * (again is True)) / (1 + FORWARD * (before is True)) - 1
        return sum(parts.values()) + more * parts["compute"] if parts else None
    then, here = seen.sends(strategy), job.cost_model().sends(now)
    chain = job.builder.facts.chain
    if not parts or then is None or here is None or (chain is None and max(strategy.pp, now.pp) > 1):
        return None
    costs = job.builder.facts.costs or (1.0,) * (len(chain) if chain is not None else 1)
    recomputed = before is True, again is True
    return predicted(MeasuredStep(now, parts), here, strategy, then, link, costs, recomputed=recomputed).total


def unpredicted(job: Job) -> str:
    """Return the reason why no steps can be predicted for any strategy; "" if they can."""
    link = job.builder.link
    if job.config.compute.compile:
        return "a compiled model has to run before its time is known"
    if link is None and job.world_size > 1:
        return "the links between the ranks were not measured"
    if link is not None and link.crowded:
        return "the ranks share cores or GPUs, so the time of one depends on the others"
    if _parts(job) == {}:
        return "other programs use the cores of this rank"
    return ""


def unpredicted_pause(job: Job) -> str:
    """Return the reason why `predicted_pause` is None; "" if it is not None."""
    if job.builder.link is None:
        return "the links between the ranks were not measured"
    return "" if job.switches else "the first switch of this training shows how long later ones take"


def _building(strategy: Strategy, made: Sequence[Switched]) -> float:
    """Return the measured seconds before bytes move, for this strategy, or else for other strategies."""
    same = [switched.prepare_s for switched in made if switched.new == str(strategy)]
    return statistics.median(same or [switched.prepare_s for switched in made])


def _moving(job: Job, flow: ReshardTraffic) -> float:
    """Return the seconds that the link needs. Senders are balanced, so no rank sends much more than the mean."""
    link = job.builder.link
    assert link is not None
    seconds: float = link.moving([flow.total // job.world_size], flow.received, flow.kept)
    return seconds


def _parts(job: Job) -> Mapping[str, float] | None:
    """Return the median seconds of each part of rank 0's last steps under the strategy in force.

    Return None if there are no steps yet. Return {} if other programs compute on this rank's cores, because then
    seconds cannot be compared.
    """
    text = recorded(str(job.strategy))
    records = [one for one in job.recorder.recent if one.parts and one.numbers.get("strategy") == text][1:]
    if not records:
        return None
    parts = {part: statistics.median(one.parts.get(part, 0.0) for one in records) for part in _PARTS}
    cpu = statistics.median(one.cpu_seconds for one in records)
    alone = accelerator().holds(job.device) or cpu >= _OWN_CORES * (parts["compute"] + parts["optimizer"])
    return parts if alone else {}
