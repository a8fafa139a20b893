"""experts=0:1-5: experts that have changed places, so that one rank does not hold all popular ones.

A layer of E experts has E places. Under ep=n, rank i of a group holds the experts at the i-th of n equal parts of these
places. Expert e is at place e, unless this key says otherwise. `nbkit.Recovery(balance=True)` sets the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

from nbkit.errors import StrategyError
from nbkit.techniques.key import AnyStrategy, Key
from nbkit.tensor_layout import bounds

Moved = tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]
"""(number of a layer, cycles of experts). Each expert of a cycle gives its place to the next one in the cycle."""


class MovedExpertsKey(Key):
    """Layers, such as `0:1-5,2-7+3:0-4`. In this example, experts 1 and 5 of layer 0 have changed places, and experts 2
    and 7 too. In layer 3, experts 0 and 4 have changed places.

    All other experts are at their own places.
    """

    name = "experts"
    neutral: ClassVar[Moved] = ()
    is_field = True

    def parse(self, text: str) -> Moved:
        found: dict[int, list[list[int]]] = {}
        for word in filter(None, text.split("+")):
            layer, _, cycles = word.partition(":")
            parts = [layer, *cycles.replace(",", "-").split("-")]
            numbers = [int(part) if part.isascii() and part.isdecimal() else -1 for part in parts]
            experts = numbers[1:]
            if min(numbers) < 0 or len(set(experts)) < len(experts) or numbers[0] in found:
                raise StrategyError(
                    f"experts={word} does not say which experts have changed places.",
                    numbers="the number of a layer, then experts by number, each layer and each expert of it once",
                    hint="experts=0:1-5,2-7   exchanges 1 and 5, and 2 and 7, in layer 0",
                )
            found[int(layer)] = [[int(expert) for expert in cycle.split("-")] for cycle in cycles.split(",")]
        return canonical(found)

    def spell(self, value: Moved) -> str:
        return "+".join(f"{layer}:{','.join('-'.join(map(str, cycle)) for cycle in cycles)}" for layer, cycles in value)

    def no_effect(self, value: Moved, strategy: AnyStrategy) -> str:
        return "because ep is 1" if strategy.ep == 1 else ""


def canonical(moved: Mapping[int, Sequence[Sequence[int]]]) -> Moved:
    """Return `moved` in one form for all equal values: sorted by layer, and each cycle begins with its least expert."""
    found = []
    for layer, cycles in sorted(moved.items()):
        turned = [(*cycle[(at := cycle.index(min(cycle))) :], *cycle[:at]) for cycle in cycles if len(cycle) > 1]
        found += [(layer, tuple(sorted(turned)))] * bool(turned)
    return tuple(found)


def experts_of(moved: Moved, layer: int, count: int, ranks: int, index: int) -> tuple[int, ...]:
    """Return which of the `count` experts of a layer rank `index` of `ranks` holds, in ascending order."""
    return _held(next((cycles for number, cycles in moved if number == layer), ()), count, ranks)[index]


@lru_cache(maxsize=4096)  # each step, and a table of strategies, ask for it many times
def _held(cycles: tuple[tuple[int, ...], ...], count: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return which experts of a layer each rank holds."""
    places = list(range(count))
    for cycle in cycles:
        for expert, following in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            places[expert] = following
    return tuple(tuple(sorted(places[slice(*bounds(count, ranks, index))])) for index in range(ranks))


def moved_to(held_by: Mapping[int, Sequence[Sequence[int]]]) -> Moved:
    """Return the value of the key with which the ranks hold the given experts of each layer.

    As few experts as possible are away from their own places.
    """
    found: dict[int, list[tuple[int, ...]]] = {}
    for layer, ranks in held_by.items():
        count, stands = sum(map(len, ranks)), dict[int, int]()
        for index, own in enumerate(ranks):
            home = range(*bounds(count, len(ranks), index))
            free, coming = [n for n in home if n not in own], sorted(set(own) - set(home))
            stands |= dict(zip(free, coming, strict=True))
        found[layer] = []
        while stands:
            cycle = [min(stands)]
            while (following := stands.pop(cycle[-1])) != cycle[0]:
                cycle.append(following)
            found[layer].append(tuple(cycle))
    return canonical(found)
