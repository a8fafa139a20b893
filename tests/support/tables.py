"""A table of strategies as a rank sends it, written by hand."""

from __future__ import annotations

from typing import Any

from nbkit.strategy import Strategy

BLOCKS = ("before", "blocks.0", "blocks.1", "after")


def held_by(strategy: Strategy, blocks: int) -> dict[str, Any]:
    """Return the share of each block that a rank of each stage holds, and the stage of each rank."""
    part = 1 / strategy.tp / (strategy.shard if strategy.zero else 1)
    rows = [
        [part if block * strategy.pp // blocks == stage else 0.0 for block in range(blocks)]
        for stage in range(strategy.pp)
    ]
    return {"rows": rows, "ranks": [strategy.mesh.index(rank)["pp"] for rank in range(strategy.mesh.size)]}


def memory_of(after: int, now: int, *, stays: bool) -> dict[str, int]:
    return {"now": now, "during": now if stays else now + after, "after": after}


def table_of(now: str = "ddp", ranks: int = 4, nodes: int = 1, **changed: Any) -> dict[str, Any]:
    strategy = Strategy.parse(now, ranks)
    now_parts = strategy.tp * strategy.pp * (strategy.shard if strategy.zero else 1)
    options = []
    for place, one in enumerate(Strategy.every(ranks, schedules=("1f1b",))):
        fits = one.cp == 1
        parts = one.tp * one.pp * (one.shard if one.zero else 1)
        options.append(
            {
                "strategy": str(one),
                "label": one.label,
                "ok": fits,
                "why": "" if fits else "The blocks do not say which positions they attend to.",
                "moved_bytes": 1_000_000 * place if fits else None,
                "memory": memory_of(4_000_000 // parts, 4_000_000 // now_parts, stays=one == strategy) if fits else {},
                "peak_bytes": 12_000_000 // parts if fits and one.cp == 1 else None,
                "peak_counted": one == strategy,
                "held": held_by(one, len(BLOCKS)) if fits else {},
                "step_bytes": 250_000 * place if fits else None,
                "sent_counted": one == strategy,
                "step_s": {"dp=4": 0.04, "dp=4 zero=3": 0.05, "tp=4": 0.03}.get(str(one)),
                "step_low_s": {"dp=4": 0.039, "dp=4 zero=3": 0.049, "tp=4": 0.029}.get(str(one)),
                "step_high_s": {"dp=4": 0.041, "dp=4 zero=3": 0.051, "tp=4": 0.031}.get(str(one)),
                "step_steps": 20 * (str(one) in ("dp=4", "dp=4 zero=3", "tp=4")),
                "step_ago": 0,
                "predicted_step_s": {"pp=4 schedule=1f1b microbatches=8": 0.02, "tp=4": 0.031}.get(str(one)),
                "switch_s": 0.5 if fits else None,
                "arithmetic": f"global 16 = micro {16 // one.dp} x accum 1 x dp {one.dp}" if fits else "",
                "cut": "stages of 1+1 blocks, with 50% + 50% of the measured compute" if one.pp == 2 else "",
            }
        )
    return {
        "strategy": str(strategy),
        "label": strategy.label,
        "step": 7,
        "ranks": ranks,
        "nodes": [rank * nodes // ranks for rank in range(ranks)],
        "link": f"1.5 GB/s and 200 µs between {ranks} ranks",
        "limit_bytes": 16_000_000,
        "arithmetic": f"global 16 = micro {16 // strategy.dp} x accum 1 x dp {strategy.dp}",
        "blocks": [{"name": name, "parameters": 12_704} for name in BLOCKS],
        "held": held_by(strategy, len(BLOCKS)),
        "options": options,
        "recommended": "pp=4 schedule=1f1b microbatches=8" if ranks == 4 else "",
        "unpredicted": "",
        "unpredicted_pause": "",
        "levers": {},
        "previous": None,
        "last": None,
        **changed,
    }


def answer_of(table: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Return an answer of Training.look."""
    return {
        "training": True,
        "held": False,
        "job": True,
        "step": table["step"],
        "strategy": table["strategy"],
        "progress": {"step": 7, "goal": 100, "loss": 2.5, "tokens_per_s": 1234.0, "unit": "tokens"},
        "stamp": "1",
        "table": table,
        **changed,
    }
