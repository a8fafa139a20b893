"""The splits of a model that are known to be right: plain data, found once by running them (prove.py), the same on
every rank.

What goes into what says where a model may be split; a split is made where it was run beside the whole. Without an
example to run, names say it, and only classes whose source is known are split (choose_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nbkit.rank.parallel.tensor.plan.flow_plan import MapFlow
from nbkit.rank.parallel.tensor.plan.plan import Pair


@dataclass(frozen=True)
class SplitVerdict:
    """On the splits into one number of parts.

    ways: row map of a pair that was run and fits -> how it is split. wrong: row map, or single module -> why it stays
    whole. partial: parameters that are used between the maps of a pair, so that their gradients are sums. taken:
    attentions whose arguments get gradients from between their maps. positions: blocks -> why their positions are not
    split, "" where they are.
    """

    ways: Mapping[str, Pair] = field(default_factory=dict)
    wrong: Mapping[str, str] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()
    positions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Proof:
    """verdicts: by the number of parts. why: there are none. flow: where the model may be split."""

    verdicts: Mapping[int, SplitVerdict] = field(default_factory=dict)
    why: str = "no example batch was there to run it with"
    flow: MapFlow | None = None

    def of(self, size: int) -> SplitVerdict | None:
        """For `size` parts; for 1, where no part is made, any will do."""
        if size == 1:
            return next(iter(self.verdicts.values()), None)
        return self.verdicts.get(size)
