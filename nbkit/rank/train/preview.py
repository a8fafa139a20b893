"""What each strategy would cost a job that trains, before anybody clicks: plain values, from any thread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nbkit.errors import NbkitError
from nbkit.layout import Layout
from nbkit.planner.exchange import Plan
from nbkit.rank.parallel.outline import Outline
from nbkit.rank.train.holdings import bytes_per_element
from nbkit.rank.train.job import Job
from nbkit.strategy import Strategy

__all__ = ["moved_bytes", "table"]


def table(job: Job, *, every: bool = False) -> dict[str, Any]:
    """The job as it is, and every strategy of its world with what a switch to it would take.

    every: all schedules of a pipeline, not 1f1b alone. Under "options": moved_bytes is exact; bytes_per_rank is what
    parameters, gradients and optimizer state take at rest; step_s is measured, where the strategy has run in this job;
    switch_s is predicted from the switches made so far; both are None where nothing is known.
    """
    now = job.strategy
    names = [*(job.blueprint.wishes.chain.units if job.blueprint.wishes.chain is not None else ())]
    blocks = _blocks(job, names)
    schedules = ("1f1b", "interleaved", "zb", "zbv") if every else ("1f1b",)
    options = [_option(job, strategy, blocks) for strategy in Strategy.every(job.world_size, schedules=schedules)]
    return {
        "strategy": str(now),
        "label": now.label,
        "step": job.step,
        "ranks": job.world_size,
        "arithmetic": str(job.feed.fits(now) or ""),
        "blocks": [{"name": name, "parameters": sum(sizes.values())} for name, sizes in blocks.items()],
        "held": _fractions(job.blueprint.outlines.of(now), blocks),
        "options": options,
        "previous": job.previous,
        "last": asdict(job.switches[-1]) if job.switches else None,
    }


def moved_bytes(job: Job, new: Strategy) -> tuple[int, int]:
    """(bytes over all ranks, most that one rank receives) of a switch to `new`: weights and optimizer state."""
    kinds = _kinds(job)
    plan = Plan.of(
        _holdings(job.blueprint.outlines.of(job.strategy), kinds),
        _holdings(job.blueprint.outlines.of(new), kinds),
        {f"{kind}/{name}": size for name, sizes in kinds.items() for kind, size in sizes.items()},
    )
    return plan.total_bytes, max(plan.bytes, default=0)


def _option(job: Job, strategy: Strategy, blocks: dict[str, dict[str, int]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "strategy": str(strategy),
        "label": strategy.label,
        "ok": False,
        "why": "",
        "moved_bytes": None,
        "bytes_per_rank": [],
        "held": [],
        "step_s": _measured(job, strategy),
        "switch_s": None,
        "arithmetic": "",
    }
    try:
        found["arithmetic"] = str(job.feed.fits(strategy) or "")
        outline = job.blueprint.outlines.of(strategy)
        total, most = moved_bytes(job, strategy)
    except NbkitError as error:
        found["why"] = " ".join(line for line in (error.what, error.numbers) if line)
        return found
    found.update(
        ok=True,
        moved_bytes=total,
        bytes_per_rank=_at_rest(job, strategy, outline),
        held=_fractions(outline, blocks),
        switch_s=_predicted(job, most),
    )
    return found


def _kinds(job: Job) -> dict[str, dict[str, int]]:
    return bytes_per_element(job.side, job.optimizer.inner, job.blueprint.skeleton)


def _holdings(outline: Outline, kinds: dict[str, dict[str, int]]) -> list[dict[str, Layout]]:
    return [
        {f"weight/{name}": layout for name, layout in weights.items()}
        | {
            f"{kind}/{name}": layout
            for name, layout in held.items()
            for kind in kinds.get(name, {})
            if kind != "weight"
        }
        for weights, held in zip(outline.weights, outline.held, strict=True)
    ]


def _at_rest(job: Job, strategy: Strategy, outline: Outline) -> list[int]:
    kinds = _kinds(job)
    trained = {name for name, p in job.blueprint.skeleton.named_parameters() if p.requires_grad}
    found = []
    for weights, held in zip(outline.weights, outline.held, strict=True):
        total = sum(layout.numel * kinds[name]["weight"] for name, layout in weights.items())
        for name, layout in held.items():
            sizes = kinds[name]
            total += layout.numel * sum(size for kind, size in sizes.items() if kind != "weight")
            if name in trained:
                total += (layout if strategy.zero > 1 else weights[name]).numel * sizes["weight"]
        found.append(total)
    return found


def _blocks(job: Job, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Block -> {parameter: elements}; what is in no block is "before" or "after" the chain, or "model" without one."""
    chain = job.blueprint.wishes.chain
    behind = set(chain.after) if chain is not None else set()
    sizes = {name: p.numel() for name, p in job.blueprint.skeleton.named_parameters()}
    home = {name: next((block for block in names if name.startswith(f"{block}.")), "") for name in sizes}
    loose = {
        name: ("after" if name in behind else "before") if names else "model"
        for name, block in home.items()
        if not block
    }
    found: dict[str, dict[str, int]] = {block: {} for block in ("before", *names, "after", "model")}
    for name, size in sizes.items():
        found[home[name] or loose[name]][name] = size
    return {block: inside for block, inside in found.items() if inside}


def _fractions(outline: Outline, blocks: dict[str, dict[str, int]]) -> list[list[float]]:
    """By rank, then block: the part of the block's elements that the rank updates."""
    return [
        [
            round(sum(held[name].numel for name in inside if name in held) / max(sum(inside.values()), 1), 4)
            for inside in blocks.values()
        ]
        for held in outline.held
    ]


def _measured(job: Job, strategy: Strategy) -> float | None:
    """Median seconds of the last steps under `strategy`, without the first, which makes what later ones reuse."""
    seconds = [record["seconds"] for record in job.ledger.records[-400:] if record["strategy"] == str(strategy)][1:]
    return statistics.median(seconds[-20:]) if seconds else None


def _predicted(job: Job, most: int) -> float | None:
    """Seconds: what earlier switches took to prepare, and the bytes at the speed at which they moved."""
    if not job.switches:
        return None
    prepare = statistics.median(switch.prepare_s for switch in job.switches)
    moving = [
        (switch.moved_bytes / job.world_size) / max(switch.pause_s - switch.prepare_s, 1e-6)
        for switch in job.switches
        if switch.moved_bytes
    ]
    return prepare + (most / statistics.median(moving) if moving and most else 0.0)
