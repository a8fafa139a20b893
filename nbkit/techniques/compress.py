"""compress=int8: gradients are rounded to fewer bytes before they are sent. The error of the sums is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from nbkit.errors import StrategyError
from nbkit.techniques.exchange import GradientExchange
from nbkit.techniques.key import AnyStrategy, GradientKey

FORMATS = ("bf16", "int8")
BLOCK = 512
"""The number of elements that share one float32 scale under compress=int8."""


class CompressKey(GradientKey):
    """The format in which gradients are sent: bf16 or int8."""

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
        what = f"compress={value}: ranks sum rounded gradients, and losses are not those of one process."
        off = "an element of a rank's gradients, or of the sums, is off by at most"
        if value == "bf16":
            return what, f"{off} 1/256 of itself"
        return (
            what,
            f"{off} 1/254 of the largest of its {BLOCK}; the error is added in the next step; a switch, a load or a "
            "step that breaks drops it",
        )

    def exchange(self, value: str, exchange: GradientExchange, strategy: AnyStrategy) -> GradientExchange:
        sent = replace(exchange, operations=("all_to_all", "all_gather"))
        if value == "bf16":
            return replace(sent, bytes_per_element=2.0)
        # Each rank keeps the rounding errors of its gradients, and of the part of the sums that it makes.
        kept = exchange.kept + 1 + 1 / strategy.degree("dp")
        return replace(sent, bytes_per_element=1 + 4 / BLOCK, kept=kept)
