"""speeds=2:1:1:1: the speeds of unequal ranks. Rows and stages are divided in this ratio."""

from __future__ import annotations

from typing import ClassVar

from nbkit.device_speeds import settled
from nbkit.techniques.key import AnyStrategy, Key, whole_number


class SpeedsKey(Key):
    """A whole number for each rank, separated by colons. Only their ratios count. By default, all are equal."""

    name = "speeds"
    neutral: ClassVar[tuple[int, ...]] = ()
    is_field = True

    def parse(self, text: str) -> tuple[int, ...]:
        return tuple(whole_number(self.name, speed) for speed in text.split(":") if speed)

    def spell(self, value: tuple[int, ...]) -> str:
        return ":".join(map(str, value))

    def no_effect(self, value: tuple[int, ...], strategy: AnyStrategy) -> str:
        return "" if settled(value, strategy.mesh) else "because all ranks are equally fast"

    def settle(self, value: tuple[int, ...], strategy: AnyStrategy) -> tuple[int, ...]:
        return settled(value, strategy.mesh) if value else value
