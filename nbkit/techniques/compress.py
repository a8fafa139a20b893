"""compress=int8 (or bf16): gradients travel in fewer bytes, and their sums are off within a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from nbkit.errors import StrategyError
from nbkit.techniques.exchange import GradientExchange
from nbkit.techniques.key import AnyStrategy, GradientKey

FORMATS = ("bf16", "int8")
BLOCK = 512
"""Elements that share one float32 scale under compress=int8."""


class CompressKey(GradientKey):
    """The value is one of FORMATS."""

    name = "compress"
    suggestions: ClassVar[Sequence[str]] = FORMATS
    engine = "nbkit.rank.parallel.data_parallel.compress:apply"

    def parse(self, text: str) -> str:
        if text not in FORMATS:
            raise StrategyError(
                f"{'compress=' + text!r} is not a format.",
                numbers=f"formats: {' '.join(FORMATS)}",
                hint="compress=int8",
            )
        return text

    def deviation(self, value: str) -> tuple[str, str]:
        what = (
            f"compress={value}: the gradients that ranks sum are rounded, so that losses are not those of one process."
        )
        if value == "bf16":
            return what, "an element of a rank, and of their sum, is off by at most 1/256 of itself"
        return (
            what,
            f"an element of a rank, and of their sum, is off by at most 1/254 of the largest of its {BLOCK}; what "
            "is off is added in the next step, and dropped by a switch, a load or a step that breaks",
        )

    def exchange(self, value: str, exchange: GradientExchange, strategy: AnyStrategy) -> GradientExchange:
        sent = replace(exchange, operations=("all_to_all", "all_gather"))
        if value == "bf16":
            return replace(sent, bytes_per_element=2.0)
        # What rounding takes off is kept, for a rank's gradients and for the sums that it makes.
        kept = exchange.kept + 1 + 1 / strategy.degree("dp")
        return replace(sent, bytes_per_element=1 + 4 / BLOCK, kept=kept)
