"""schedule=1f1b: the order of operations in a pipeline."""

from __future__ import annotations

from nbkit import schedules
from nbkit.techniques.key import AnyStrategy, Key


class ScheduleKey(Key):
    """The name of a schedule. The default is 1f1b. The key needs pp."""

    name = "schedule"
    is_field = True

    def parse(self, text: str) -> str:
        return text

    def refuse(self, value: str, strategy: AnyStrategy) -> None:
        schedules.type_of(value)

    def no_effect(self, value: str, strategy: AnyStrategy) -> str:
        return "with pp=1: there is no pipeline" if strategy.degree("pp") == 1 else ""

    def settle(self, value: str | None, strategy: AnyStrategy) -> str | None:
        return None if strategy.degree("pp") == 1 else value or "1f1b"
