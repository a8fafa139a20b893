"""A key of a strategy from outside of nbkit: `ddp wire=fp16` sums gradients as fp16. This is its pure half."""

from __future__ import annotations

from dataclasses import replace

import nbkit
from nbkit.errors import StrategyError
from nbkit.techniques import AnyStrategy, GradientExchange, GradientKey


class Wire(GradientKey):
    name = "wire"
    suggestions = ("fp16",)
    engine = "tests.plugins.wire_on_ranks:apply"

    def parse(self, text: str) -> str:
        if text != "fp16":
            raise StrategyError(f"{'wire=' + text!r} is not a format.", numbers="formats: fp16", hint="wire=fp16")
        return text

    def refuse(self, value: str, strategy: AnyStrategy) -> None:
        super().refuse(value, strategy)
        if strategy.degree("dp") > 1024:
            raise StrategyError(
                "So many gradients overflow in fp16.", numbers=f"dp {strategy.degree('dp')}", hint="compress=bf16"
            )

    def deviation(self, value: str) -> tuple[str, str]:
        return "wire=fp16: gradients are rounded.", "an element is off by at most 1/2048 of itself"

    def exchange(self, value: str, exchange: GradientExchange, strategy: AnyStrategy) -> GradientExchange:
        return replace(exchange, bytes_per_element=2.0)


nbkit.techniques.register(Wire)
