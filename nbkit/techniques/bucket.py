"""bucket=25M: the bytes of gradients that are sent in one message. The sums do not change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from nbkit.errors import StrategyError
from nbkit.techniques.exchange import BUCKET, GradientExchange
from nbkit.techniques.key import AnyStrategy, GradientKey

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class BucketKey(GradientKey):
    """A number of bytes, which can be written as 25M or 1G. zero=3 has no buckets."""

    name = "bucket"
    neutral = BUCKET
    same = "buckets are as large without it"
    suggestions: ClassVar[Sequence[int]] = (1 << 20, 4 << 20, 100 << 20)
    needs_whole = False

    def parse(self, text: str) -> int:
        found = re.fullmatch(r"(\d+)([kmg]?)b?", text, re.ASCII)
        size = int(found[1]) * _UNITS[found[2]] if found else 0
        if size < 1:
            raise StrategyError(
                f"{'bucket=' + text!r} is not a size.",
                numbers="bytes, or with K, M or G behind the number",
                hint="bucket=25M",
            )
        return size

    def spell(self, value: int) -> str:
        for unit in "gmk":
            if value % _UNITS[unit] == 0:
                return f"{value // _UNITS[unit]}{unit.upper()}"
        return str(value)

    def refuse(self, value: int, strategy: AnyStrategy) -> None:
        super().refuse(value, strategy)
        if strategy.zero == 3:
            raise StrategyError(
                "zero3 has no buckets: it gathers and sums the parameters of a block together.",
                numbers=f"{self.word(value)} zero=3",
                hint=f"zero2 {self.word(value)}",
            )

    def exchange(self, value: Any, exchange: GradientExchange, strategy: AnyStrategy) -> GradientExchange:
        return replace(exchange, bucket=value)
