"""Which of several strategies to choose by their seconds alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

ALIKE = 1.02
"""Seconds this close count as equal: the simpler strategy is recommended."""

T = TypeVar("T")


def fastest(seconds: Mapping[T, float]) -> T | None:
    """The first of those that take least: in the order from simple to not so simple, as Strategy.every has it."""
    least = min(seconds.values(), default=0.0)
    return next((one for one, took in seconds.items() if took <= ALIKE * least), None)
