"""The splits of a model that are known to be correct: plain data, found once by prove.py, the same on every rank.

The data flow between maps shows where a model may be split. A split is used only if it was run and gave the same
results as the whole. Without an example to run, the names of modules decide, and only known classes are split
(choose_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nbkit.rank.parallel.tensor.plan.flow_plan import MapFlow
from nbkit.rank.parallel.tensor.plan.plan import Pair


@dataclass(frozen=True)
class SplitVerdict:
    """Verdict on the splits into one number of parts.

    ways: row map of a pair that was run and is correct -> how it is split. wrong: row map, or single module -> why it
    stays whole. partial: parameters used between the maps of a pair; their gradients must be summed. taken: attentions
    whose arguments get gradients from between their maps. positions: block -> why its positions are not split, or "".
    """

    ways: Mapping[str, Pair] = field(default_factory=dict)
    wrong: Mapping[str, str] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()
    positions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Proof:
    """All verdicts on a model.

    verdicts: number of parts -> verdict. why: the reason if there are none. flow: where the model may be split.
    """

    verdicts: Mapping[int, SplitVerdict] = field(default_factory=dict)
    why: str = "there was no example batch to test it"
    flow: MapFlow | None = None

    def of(self, size: int) -> SplitVerdict | None:
        """Return the verdict for `size` parts. For 1 part, where nothing is split, return any verdict."""
        if size == 1:
            return next(iter(self.verdicts.values()), None)
        return self.verdicts.get(size)
