"""All cells, in the sets of rank processes of the parity, and one process for each model to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ranks import run_ranks

from parity.rounds import in_lanes
from zoo.cells import Cell
from zoo.training import Known, known, ours
from zoo.verdicts import Verdict, judged

PATIENCE = 180
"""Seconds that a cell may take; then it counts as crashed."""


def verdicts(cells: Sequence[Cell], *, lanes: int = 2) -> Iterator[tuple[Cell, Verdict]]:
    """What became of each cell, as it is known; cells in any order."""
    asked: dict[str, list[str]] = {}
    for cell in cells:
        asked.setdefault(cell.subject, []).extend(cell.steps)
    with ThreadPoolExecutor(1) as pool:
        # In the order in which the cells come.
        asked = {subject: asked[subject] for subject in sorted(asked)}
        alone = {subject: pool.submit(_alone, subject, tuple(dict.fromkeys(some))) for subject, some in asked.items()}
        for cell, found in in_lanes(cells, lanes, train=ours, patience=PATIENCE):
            yield cell, judged(cell, found, alone[cell.subject].result())


def _alone(subject: str, strategies: tuple[str, ...]) -> Known:
    found: list[Known] = run_ranks(known, 1, subject, strategies, timeout=900, join=False)
    return found[0]
