"""The axes of a strategy: what each axis splits, and with which other axes it can be composed.

Two axes can be composed only if each of them names the other. So a new axis begins as an entry here, and as a degree in
nbkit/mesh.py and nbkit/strategy.py. Every other axis refuses it until its own entry names the new axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from nbkit.errors import StrategyError


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh.

    technique: the name of the technique. splits: what its ranks divide. goes_with: the axes with which it can be
    composed. missing: why ranks cannot run the axis yet; "" if they can.
    """

    name: str
    technique: str
    splits: str
    goes_with: frozenset[str] = frozenset()
    missing: str = ""

    def refuse(self, degrees: Mapping[str, int]) -> None:
        """Raise StrategyError if the axis cannot be part of a strategy with these `degrees`, each at least 2."""
        if self.missing:
            raise StrategyError(
                f"{self.technique} cannot run yet: {self.missing}.",
                numbers=f"{self.name} {degrees[self.name]}",
                hint=f"dp={degrees[self.name]}",
            )
        for other in degrees:
            if other != self.name and other not in self.goes_with:
                raise StrategyError(
                    f"{self.technique} splits {self.splits}, and is not known to be right together with {other}.",
                    numbers=f"{self.name} {degrees[self.name]}, {other} {degrees[other]}; {self.name} goes with "
                    f"{', '.join(axis for axis in DEGREES if axis in self.goes_with) or 'no other axis'}",
                    hint=f"{self.name}={degrees[self.name]}, or {other}={degrees[other]}",
                )


_KNOWN = (  # in the order in which a strategy is spelled
    Axis("dp", "Data parallelism", "the rows of a batch", frozenset({"tp", "pp", "cp"})),
    Axis("tp", "Tensor parallelism", "every layer", frozenset({"dp", "pp", "cp"})),
    Axis("pp", "Pipeline parallelism", "the blocks of the model", frozenset({"dp", "tp", "cp"})),
    Axis("cp", "Context parallelism", "the positions of a sequence", frozenset({"dp", "tp", "pp"})),
)
DEGREES: Mapping[str, Axis] = {axis.name: axis for axis in _KNOWN}
"""Every axis by name, in the order in which a strategy is spelled."""


@lru_cache(maxsize=256)
def refuse_axes(degrees: tuple[tuple[str, int], ...]) -> None:
    """Raise StrategyError if axes with these degrees cannot be composed."""
    split = {axis: degree for axis, degree in degrees if degree > 1}
    for axis in split:
        DEGREES[axis].refuse(split)
