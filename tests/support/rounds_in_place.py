"""Memory of the rounds of an exchange in place, computed from the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbkit.planner.exchange import ExchangePlan, Holding
from nbkit.planner.exchange_rounds import Round


def peaks(plan: ExchangePlan, made: Sequence[Round]) -> tuple[int, ...]:
    """Return, for each rank, the most bytes of old and new tensors that it holds at once during `made` in place."""
    level = [sum(_num_bytes(holding, key, plan.itemsize) for key in holding) for holding in plan.old]
    most, opened = list(level), set[str]()
    for each in made:
        fresh = list(dict.fromkeys(key for part in each.parts for key in part.keys if key not in opened))
        opened.update(fresh)
        for rank, (old, new) in enumerate(zip(plan.old, plan.new, strict=True)):
            level[rank] += sum(_num_bytes(new, key, plan.itemsize) for key in fresh)
            most[rank] = max(most[rank], level[rank])
            level[rank] -= sum(_num_bytes(old, key, plan.itemsize) for key in each.closes)
    return tuple(most)


def _num_bytes(holding: Holding, key: str, itemsize: Mapping[str, int]) -> int:
    return 0 if (layout := holding.get(key)) is None else layout.numel * itemsize[key]
