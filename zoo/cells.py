"""The table's cells: which model, under which strategy or in which chain of switches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "tp=2", "pp=2", "cp=2", "dp=2 tp=2")
"""Each on two ranks, the last on four: one family each, and a product."""

CHAIN = ("ddp", "zero3", "tp=2", "pp=2", "cp=2", "zero2")
"""A live training goes through these, one step in each; what is refused is left out, and the training goes on."""

CHAINED = " > ".join(CHAIN)


@dataclass(frozen=True)
class Cell:
    """One training. strategy: one, or several with " > " between them, which are switched to."""

    subject: str
    strategy: str

    @property
    def steps(self) -> tuple[str, ...]:
        """The strategies, in order."""
        return tuple(self.strategy.split(" > "))

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return 2 ** max(1, *(each.count("=2") for each in self.steps))

    def __str__(self) -> str:
        return f"{self.subject}, {self.strategy}"


def cells(subjects: Sequence[str], words: Sequence[str] = ()) -> Iterator[Cell]:
    """Every model under every strategy and in the chain; with words, those cells that have them all.

    A word is a model, a strategy, an axis of it, or "chain".
    """
    for subject in subjects:
        for strategy in (*STRATEGIES, CHAINED):
            kinds = (
                ("chain",) if strategy == CHAINED else (strategy, *(each.split("=")[0] for each in strategy.split()))
            )
            if all(word in (subject, strategy, *kinds) for word in words):
                yield Cell(subject, strategy)
