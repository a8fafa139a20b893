"""The question that a lack of memory puts to the user: which of the settings that fit to go on with.

It is open on all ranks alike, from the step that was taken back until one of its rows is taken or a step is made. In a
detached cell the training is held meanwhile; elsewhere `fit` has ended with an error, and the next one goes on.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from nbkit.errors import UsageError
from nbkit.rank.train.job import Job
from nbkit.rank.train.out_of_memory.apply import apply
from nbkit.rank.train.out_of_memory.remedies import Remedies, described

COMMAND = "%train fit"


@dataclass(frozen=True)
class Question:
    """Of a job whose global batch has `batch` rows."""

    job: weakref.ref[Job]
    batch: int
    found: Remedies

    @property
    def text(self) -> str:
        """The table, with what to type for each row."""
        return "\n".join(described(self.found, lambda number: f"{COMMAND} {number}"))


_open: Question | None = None


def put(question: Question | None) -> None:
    """`question` is open from now on; None: there is none any more."""
    global _open
    _open = question


def answer(job: Job | None, number: int = 0) -> dict[str, Any]:
    """Put row `number` of the open question in force, 0: the first that fits; which it was. Collective, between two
    steps.

    Raises UsageError where there is no such row or no question, and what applying it raises.
    """
    question = _open
    if job is None or question is None or question.job() is not job:
        raise UsageError("No step has run out of memory, so there is nothing to fit.", hint="%strategy, %train pause")
    rows = question.found.rows
    if not 0 <= number <= len(rows):
        raise UsageError(f"There is no row {number}.", numbers=f"rows 1 to {len(rows)}", hint=f"{COMMAND} 1")
    row = rows[number - 1] if number else question.found.first
    if row is None:
        raise UsageError(
            "Nothing fits by arithmetic.", numbers=question.text, hint=f"{COMMAND} 1 tries it all the same"
        )
    apply(job, row.setting, question.batch)
    put(None)
    return {"changes": row.changes, "peak": row.peak, "fits": row.fits, "seconds": row.seconds}
