"""A table of strategies as a rank sends it, made by hand."""

from __future__ import annotations

from typing import Any

from nbkit.strategy import Strategy

BLOCKS = ("before", "blocks.0", "blocks.1", "after")


def held_by(strategy: Strategy, blocks: int) -> list[list[float]]:
    """By rank and block: 0 on other stages, else the part that tensor parallelism and sharding leave."""
    found = []
    for rank in range(strategy.mesh.size):
        stage = strategy.mesh.index(rank)["pp"]
        part = 1 / strategy.tp / (strategy.shard if strategy.zero else 1)
        found.append([part if block * strategy.pp // blocks == stage else 0.0 for block in range(blocks)])
    return found


def table_of(now: str = "ddp", ranks: int = 4, **changed: Any) -> dict[str, Any]:
    strategy = Strategy.parse(now, ranks)
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
                "bytes_per_rank": [4_000_000 // parts] * ranks if fits else [],
                "held": held_by(one, len(BLOCKS)) if fits else [],
                "step_s": {"dp=4": 0.04, "dp=4 zero=3": 0.05, "tp=4": 0.03}.get(str(one)),
                "switch_s": 0.5 if fits else None,
                "arithmetic": f"global 16 = micro {16 // one.dp} x accum 1 x dp {one.dp}" if fits else "",
            }
        )
    return {
        "strategy": str(strategy),
        "label": strategy.label,
        "step": 7,
        "ranks": ranks,
        "arithmetic": f"global 16 = micro {16 // strategy.dp} x accum 1 x dp {strategy.dp}",
        "blocks": [{"name": name, "parameters": 12_704} for name in BLOCKS],
        "held": held_by(strategy, len(BLOCKS)),
        "options": options,
        "previous": None,
        "last": None,
        **changed,
    }


def answer_of(table: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """What Training.look gives."""
    return {
        "training": True,
        "held": False,
        "job": True,
        "step": table["step"],
        "strategy": table["strategy"],
        "progress": {"step": 7, "total": 100, "loss": 2.5, "tokens_per_s": 1234.0},
        "stamp": "1",
        "table": table,
        **changed,
    }
