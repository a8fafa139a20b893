"""order=dp: dp is the axis that crosses nodes. Each group along dp has ranks on several nodes."""

from __future__ import annotations

from nbkit.errors import StrategyError
from nbkit.mesh import AXES
from nbkit.techniques.key import AnyStrategy, Key


class OrderKey(Key):
    """The name of an axis. By default, nbkit chooses one."""

    name = "order"
    neutral = ""
    is_field = True

    def parse(self, text: str) -> str:
        return text

    def refuse(self, value: str, strategy: AnyStrategy) -> None:
        if value not in AXES:
            split = _split(strategy) or AXES
            raise StrategyError(
                f"{'order=' + value!r} is not an axis.",
                numbers=f"the axis that crosses nodes: one of {' '.join(split)}",
                hint=f"order={split[0]}",
            )

    def no_effect(self, value: str, strategy: AnyStrategy) -> str:
        split = _split(strategy)
        if value not in split:
            return f"because {value} is 1"
        return "because there is no other axis" if len(split) == 1 else ""


def _split(strategy: AnyStrategy) -> list[str]:
    return [axis for axis in AXES if strategy.degree(axis) > 1]
