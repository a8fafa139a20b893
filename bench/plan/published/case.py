"""A published step: what was computed, where, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from nbkit.planner.choose.load import Hardware, Load
from nbkit.strategy import Strategy

NODE, HALF = 8, 2
"""Devices on a node; bytes of an element."""


@dataclass(frozen=True)
class Case:
    """A published step. all_flops: of all devices, recomputation included. measured: seconds of the step."""

    name: str
    on: Hardware
    strategy: Strategy
    load: Load
    all_flops: float
    measured: float
