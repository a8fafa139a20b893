"""What the formulas say of a job under its present strategy: nbkit.planner, fed with what the job really holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbkit.forecast import Forecast, forecast
from nbkit.planner.facts import Facts, Weight
from nbkit.planner.memory import Bytes, Rest
from nbkit.rank.train.holdings import bytes_per_element

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["foresee"]


def foresee(job: Job, *, since: int) -> Forecast:
    """For the steps after `since`. To be asked after an optimizer step, when its state is there to be counted.

    Memory: exact, of every rank, from what the strategy has each hold. Traffic: of the data axis, where the parameters
    alone decide it; empty under tp, pp and cp, whose traffic hangs on the width of hidden states.
    """
    strategy, skeleton = job.strategy, job.blueprint.skeleton
    kinds = bytes_per_element(job.side, job.optimizer.inner, skeleton)
    trained = {name for name, p in skeleton.named_parameters() if p.requires_grad}
    outline = job.blueprint.outlines.of(strategy)
    memory = []
    for weights, held in zip(outline.weights, outline.held, strict=True):
        grads = held if strategy.zero > 1 else weights
        memory.append(
            Rest(
                parameters=sum(layout.numel * kinds[name]["weight"] for name, layout in weights.items()),
                gradients=sum(x.numel * kinds[name]["weight"] for name, x in grads.items() if name in trained),
                optimizer=sum(layout.numel * _state(kinds[name]) for name, layout in held.items()),
            )
        )
    return Forecast(since, str(strategy), tuple(memory), _data_axis(job, kinds, trained).traffic)


def _data_axis(job: Job, kinds: dict[str, dict[str, int]], trained: set[str]) -> Forecast:
    strategy, unknown = job.strategy, Forecast(0, "")
    sizes = {size["weight"] for size in kinds.values()}
    accumulation = getattr(job.feed.fits(strategy), "accum", 1 if job.setup.microbatch is None else None)
    if strategy.mesh.size != strategy.dp or len(sizes) != 1 or accumulation is None:
        return unknown
    chain = job.blueprint.wishes.chain
    if chain is None and strategy.zero == 3:
        return unknown
    units = chain.units if chain is not None else ()
    weights = [
        Weight(
            name,
            tuple(p.shape),
            outside=not any(name.startswith(f"{unit}.") for unit in units),
            trained=name in trained,
        )
        for name, p in job.blueprint.skeleton.named_parameters()
    ]
    size = sizes.pop()
    each = Bytes(size, size, max((_state(one) for one in kinds.values()), default=0))
    return forecast(weights, Facts(), strategy, each=each, accumulation=accumulation)


def _state(kinds: dict[str, int]) -> int:
    return sum(size for kind, size in kinds.items() if kind != "weight")
