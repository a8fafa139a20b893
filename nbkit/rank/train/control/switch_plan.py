"""Plan switches in advance: number of finished steps -> strategy. For scripts, where nobody can switch by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nbkit.errors import TrainingError
from nbkit.quoting import user_path
from nbkit.strategy import Strategy

SwitchSchedule = Mapping[int, str] | str | Path | None
"""Number of finished steps -> strategy, or the path of a JSON file with such a mapping. None: no switches."""


class SwitchPlan:
    """The planned switches that are not made yet. They are equal on every rank.

    Raises TrainingError for a file that cannot be read, and for steps that are not integers of at least 0.
    """

    def __init__(self, given: SwitchSchedule) -> None:
        source = "switches=" if given is None or isinstance(given, Mapping) else str(given)
        read: Any = _read(user_path(given)) if isinstance(given, str | Path) else given or {}
        if not isinstance(read, Mapping) or not all(isinstance(text, str) for text in read.values()):
            raise _wrong(source, "it is not a mapping from steps to strategies")
        self._ahead: dict[int, str] = {_step(source, key): text for key, text in read.items()}

    def first(self, otherwise: str) -> str:
        """Remove and return the strategy of step 0, or return `otherwise` if the plan has none."""
        return self._ahead.pop(0, otherwise)

    @property
    def ahead(self) -> tuple[str, ...]:
        """The strategies of the switches that are not made yet."""
        return tuple(self._ahead.values())

    def check(self, parsed: Callable[[str], Strategy], fits: Callable[[Strategy], object]) -> list[Strategy]:
        """Return the strategies of the switches that are not made yet, in order.

        Raises StrategyError or TrainingError for a strategy that these ranks or `fits` refuse.
        """
        ahead = [parsed(text) for _, text in sorted(self._ahead.items())]
        for strategy in ahead:
            fits(strategy)
        return ahead

    def due(self, step: int) -> str | None:
        """Return the strategy that is due after `step` finished steps, until `done` is called. None: nothing is due.

        If several switches are due, as after loading a checkpoint, this is the last of them.
        """
        if not self._ahead:
            return None
        passed = [at for at in self._ahead if at <= step]
        return self._ahead[max(passed)] if passed else None

    def done(self, step: int) -> None:
        """Remove the switches that were due after `step` finished steps. They were made, or all ranks refused them."""
        for at in [at for at in self._ahead if at <= step]:
            del self._ahead[at]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(str(path), str(error)) from None


def _step(source: str, key: Any) -> int:
    try:
        step = int(key)
    except (TypeError, ValueError):
        step = -1
    if step < 0:
        raise _wrong(source, f"{key!r} is not a number of finished steps")
    return step


def _wrong(source: str, why: str) -> TrainingError:
    return TrainingError(
        "The plan of switches cannot be read.", numbers=f"{source}: {why}", hint='{"0": "ddp", "100": "zero3"}'
    )
