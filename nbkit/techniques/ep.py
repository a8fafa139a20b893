"""ep=2: the experts of a mixture are spread over the ranks of each group of 2 along dp.

A rank holds the weights, gradients and optimizer state of its own experts. All other parameters are handled as by dp
(and zero=) alone. Each layer sends a token to the ranks that hold the token's experts, and gets their outputs back. The
torch half is in nbkit/rank/parallel/experts/.
"""

from __future__ import annotations

from nbkit.errors import StrategyError
from nbkit.techniques.key import AnyStrategy, Key, whole_number


class ExpertsKey(Key):
    """A number of ranks that divides dp. With 1, each rank holds all experts."""

    name = "ep"
    neutral = 1
    is_field = True

    def parse(self, text: str) -> int:
        return whole_number(self.name, text)

    def refuse(self, value: int, strategy: AnyStrategy) -> None:
        dp = strategy.degree("dp")
        if value < 1 or dp % value:
            fitting = [n for n in range(2, dp + 1) if dp % n == 0]
            raise StrategyError(
                "dp is not a multiple of ep.",
                numbers=f"dp {dp} / ep {value} = {dp / max(value, 1):.3g} groups",
                hint="ep=" + " or ".join(map(str, fitting)) if fitting else f"dp={max(value, 2)} ep={max(value, 2)}",
            )
