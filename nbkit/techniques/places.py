"""places=1:0: the position of each rank in the mesh, so that a slow rank can have a small stage."""

from __future__ import annotations

from typing import ClassVar

from nbkit.techniques.key import AnyStrategy, Key, whole_number


class PlacesKey(Key):
    """A number for each rank, separated by colons. By default, rank 0 is at place 0, rank 1 at place 1, and so on."""

    name = "places"
    neutral: ClassVar[tuple[int, ...]] = ()
    is_field = True

    def parse(self, text: str) -> tuple[int, ...]:
        return tuple(whole_number(self.name, place, least=0) for place in text.split(":") if place)

    def spell(self, value: tuple[int, ...]) -> str:
        return ":".join(map(str, value))

    def no_effect(self, value: tuple[int, ...], strategy: AnyStrategy) -> str:
        return "because each rank is at its own" if value == tuple(range(strategy.mesh.size)) else ""
