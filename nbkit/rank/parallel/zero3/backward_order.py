"""The order in which one backward pass under ZeRO 3 gathers units and reduces their gradients, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from nbkit.errors import TrainingError

Stop = tuple[bool, int]
"""(whether the unit of this number is gathered; else its gradients are reduced)"""


def nested(module: nn.Module, units: Sequence[nn.Module]) -> tuple[list[nn.Module], list[int]]:
    """(`module` and then its units, each before those inside it, else in the given order; the number around each)."""
    chosen = {id(unit): unit for unit in units if unit is not module}
    around: dict[int, int] = {}
    for unit in (module, *chosen.values()):
        for part in unit.modules():
            # The smallest unit around a part is the one that has the fewest modules.
            if part is not unit and id(part) in chosen:
                best = around.get(id(part))
                if best is None or len(list(unit.modules())) < len(list(chosen.get(best, module).modules())):
                    around[id(part)] = id(unit)
    blocks: list[nn.Module] = []
    parents: list[int] = []
    # No function that calls itself: that is a cycle, which would hold the modules until the next collection.
    todo = [(module, -1)]
    while todo:
        block, parent = todo.pop()
        inside = [unit for key, unit in chosen.items() if around.get(key) == id(block)]
        todo += [(unit, len(blocks)) for unit in reversed(inside)]
        blocks.append(block)
        parents.append(parent)
    return blocks, parents


def backward_tour(parents: Sequence[int], ahead: int) -> list[Stop]:
    """Units 1, 2, ... in the order of forward, `parents[i]` the unit around i; 0 is the root, which stays gathered.

    Backward enters the last unit first, and each before those inside it. `ahead` units that it will enter next are
    gathered before the gradients of one are reduced, so that they travel while it computes.
    """
    stops: list[Stop] = []

    def visit(around: int) -> None:
        for i in reversed(range(1, len(parents))):
            if parents[i] == around:
                stops.append((True, i))
                visit(i)
                stops.append((False, i))

    visit(0)
    entered = [i for gathers, i in stops if gathers]
    tour: list[Stop] = []
    gathered = passed = 0
    for gathers, i in stops:
        passed += gathers
        for number in entered[gathered : passed if gathers else passed + ahead]:
            tour.append((True, number))
            gathered += 1
        if not gathers:
            tour.append((False, i))
    return [*tour, (False, 0)]


class Tour:
    """How far along the order this rank is."""

    def __init__(self, stops: Sequence[Stop]) -> None:
        self._stops, self._next = list(stops), 0

    def begin(self) -> None:
        """A pass begins."""
        self._next = 0

    @property
    def done(self) -> bool:
        """Whether nothing is left of it."""
        return self._next == len(self._stops)

    @property
    def at(self) -> Stop:
        """What comes next."""
        return self._stops[self._next]

    def step(self) -> Stop:
        """What comes next, and go on."""
        self._next += 1
        return self._stops[self._next - 1]


class OutOfOrder(TrainingError):
    """A rank's forward or backward runs through the units in another order than the one that all ranks keep to.

    unit: the name of the one that is needed; again: when it is computed once more in backward.
    """

    def __init__(self, unit: str, how: str, order: Sequence[str], *, again: bool = False) -> None:
        super().__init__(
            f"{unit!r} {how}.",
            numbers=f"zero=3 gathers in the order {', '.join(order[:8])}{', ...' * (len(order) > 8)}",
            hint="strategy='zero2', which gathers nothing; or a batch to see the order with beforehand: example=batch "
            "of nbkit.prepare, data that can be indexed of a Trainer",
        )
        self.unit, self.again = unit, again
