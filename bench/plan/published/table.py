"""Compare published steps of large models with the planner's predictions.

gpt.csv and llama.csv contain what was reported; nothing in them was fitted. The first case of each kind of hardware
calibrates the planner. The table also has a simpler prediction: one constant share of the hardware's peak, taken from
the same case. It counts recomputed FLOPs too, which favours it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.plan.published import gpt, llama
from bench.plan.published.case import Case
from nbkit.planner.choose.load import calibrated, seconds


@dataclass(frozen=True)
class Found:
    """Seconds of a case: as published, as the planner predicts, and from one constant share of the peak."""

    name: str
    measured: float
    predicted: float
    constant: float

    def __str__(self) -> str:
        errors = f"{self.predicted / self.measured - 1:+7.1%} {self.constant / self.measured - 1:+7.1%}"
        return f"{self.name:64} {self.measured:7.2f} s  {self.predicted:7.2f} s  {self.constant:7.2f} s {errors}"


def run() -> list[Found]:
    """Predict every case except those that calibrate; print and return the results."""
    found, first = [], dict[str, Case]()
    for case in cases():
        name = case.on.device.name
        if name not in first:
            first[name] = case
            continue
        one = first[name]
        rates = calibrated(one.load, one.strategy, one.on, one.measured)
        share = one.all_flops / one.measured / one.on.devices
        found.append(
            Found(
                case.name,
                case.measured,
                seconds(case.load, case.strategy, case.on, rates).total,
                case.all_flops / share / case.on.devices,
            )
        )
        print(found[-1], flush=True)
    return found


def bars(found: Sequence[Found]) -> tuple[bool, str]:
    """Return whether the mean error is at most half of the constant share's, and a text with the figures."""
    ours = statistics.fmean(abs(one.predicted / one.measured - 1) for one in found)
    constant = statistics.fmean(abs(one.constant / one.measured - 1) for one in found)
    text = f"{len(found)} published steps: {ours:.1%} off on average, one constant share of the peak {constant:.1%}"
    return ours <= constant / 2, f"{text} (bar: half of it)"


def cases() -> list[Case]:
    """Return the cases of both files, in their order. The first one of each hardware calibrates."""
    return [*gpt.cases(), *llama.cases()]
