"""Which draws of a model have the rows of the batch along dim 0, found by running it on two rows and on three.

A draw that grows with the rows gives each row its own numbers; any other is one for the whole batch, which every rank
and every micro-batch repeats. What cannot be keyed is noted with the module it is in.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nbkit.rank.watching_mode import WatchingMode

Place = tuple[int, int, int]
"""Of a draw: (path of the module, call of the module, draw within the call), as keyed_dropout.py counts them."""


@dataclass(frozen=True)
class DrawPlan:
    """shared: draws that are one for the whole batch. unkeyed: what each rank draws by itself, and in which module."""

    shared: frozenset[Place] = frozenset()
    unkeyed: tuple[str, ...] = ()


@dataclass
class Trace:
    """What one forward pass draws: dim 0 of each keyed draw, 0 where it has none; and what is drawn otherwise."""

    lengths: dict[Place, int] = field(default_factory=dict)
    unkeyed: dict[str, None] = field(default_factory=dict)
    replacing: bool = False

    def note(self, what: str, module: str) -> None:
        """Something that is not keyed was drawn from."""
        self.unkeyed[f"{what} in {module or 'the model'}"] = None

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Inside, what is drawn is replaced."""
        self.replacing = True
        try:
            yield
        finally:
            self.replacing = False


def plan_of(two: Trace, three: Trace) -> DrawPlan:
    """From passes of two rows and of three."""
    shared = {place for place, length in two.lengths.items() if three.lengths.get(place) == length}
    return DrawPlan(frozenset(shared), tuple(two.unkeyed))


class Elsewhere(WatchingMode):
    """Notes in a trace what torch draws and nothing replaces, dropout aside. where: the module that is being called."""

    def __init__(self, trace: Trace, where: Callable[[], str]) -> None:
        super().__init__()
        self._trace, self._where = trace, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name and "dropout" not in name
        if draws and not self._trace.replacing:
            own = (kwargs or {}).get("generator") is not None
            self._trace.note("a generator of the model's" if own else f"torch's {name}", self._where())
        return func(*args, **(kwargs or {}))


class OtherGenerators:
    """Tells whether Python's generator or numpy's was drawn from since it was asked last."""

    def __init__(self) -> None:
        self._seen = self._now()

    def changed(self) -> list[str]:
        """The names of those that were."""
        before, self._seen = self._seen, self._now()
        return [name for name, state in self._seen.items() if before.get(name) != state]

    def _now(self) -> dict[str, Any]:
        found: dict[str, Any] = {"Python's random": random.getstate()}
        if (numpy := sys.modules.get("numpy")) is not None:
            kind, key, *rest = numpy.random.get_state()
            found["numpy.random"] = (kind, key.tobytes(), *rest)
        return found
