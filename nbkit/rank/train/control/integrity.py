"""Remembers whether the weights of this rank are whole, and whether a step was broken off, for after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Integrity:
    """broken_off: a step was begun and not finished, so that ranks may differ by a step. half_way: the weights are
    partly those of before a change and partly those of after it.
    """

    def __init__(self) -> None:
        self.broken_off = self.half_way = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The weights change inside. Left by an error, they stay half-way."""
        self.half_way = True
        yield
        self.half_way = False

    def restored(self, *, ranks_agree: bool) -> None:
        """The weights are whole again; ranks_agree: and every rank stands at the same step."""
        self.half_way = False
        self.broken_off &= not ranks_agree
