"""Seeds, saves and observes the generators of Python and numpy, from which models and data may draw."""

from __future__ import annotations

import importlib
import random
import sys
from dataclasses import dataclass
from typing import Any


def seed_others(value: int) -> None:
    """Seed the generators of Python, and of numpy if it is imported."""
    random.seed(value)
    if (numpy := numpy_random()) is not None:
        numpy.seed(value & 0xFFFFFFFF)


@dataclass(frozen=True)
class Drawn:
    """Saved states of the generators of Python and numpy. Steps do not seed these, but models and data may use them."""

    python: Any
    numpy: Any

    @classmethod
    def so_far(cls) -> Drawn:
        """Return the current states."""
        numpy = numpy_random()
        return cls(random.getstate(), numpy.get_state() if numpy is not None else None)

    def restore(self) -> None:
        """Restore the states, so that later draws repeat those since `so_far`."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


class OtherGenerators:
    """Tells whether Python's or numpy's generator was used since the last call of `changed`."""

    def __init__(self) -> None:
        self._seen = self._now()

    def changed(self) -> dict[str, Any]:
        """Return name -> current state, for the generators that were used since the last call."""
        before, self._seen = self._seen, self._now()
        return {name: state for name, state in self._seen.items() if before.get(name) != state}

    def _now(self) -> dict[str, Any]:
        found: dict[str, Any] = {"Python's random": random.getstate()}
        if (numpy := numpy_random()) is not None:
            kind, key, *rest = numpy.get_state()
            found["numpy.random"] = (kind, key.tobytes(), *rest)
        return found


def numpy_random() -> Any:
    """Return numpy.random; None if numpy is not imported, so that nobody can have drawn from it.

    numpy imports `numpy.random` at its first use. This function imports it, so that a first draw inside a model is
    seeded too.
    """
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None
