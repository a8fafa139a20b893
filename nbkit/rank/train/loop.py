"""A loop of the user's own over a job's batches: a step boundary after each, and an end wherever it is left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nbkit.rank.telemetry.phases import phase

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job

__all__ = ["Loop"]


class Loop:
    """The newest loop of a job. One that was left by an error ends when the next one begins."""

    def __init__(self) -> None:
        self._batches: weakref.ref[Generator[Any, None, None]] | None = None

    def over(self, job: Job, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, one step each."""
        self.leave()
        batches = _steps(job, loader)
        # Weak, so that a `break` ends the loop; after an error the traceback holds it, and it is ended by name.
        self._batches = weakref.ref(batches)
        return batches

    def leave(self, tell: Callable[[Any], object] | None = None, error: BaseException | None = None) -> None:
        """Nothing more comes of it. tell: gets the error first, if a loop is under way."""
        if self._batches is not None and (batches := self._batches()) is not None:
            if tell is not None:
                tell(error)
            batches.close()
        self._batches = None


def _steps(job: Job, loader: Iterable[Any]) -> Generator[Any, None, None]:
    """What the loader gives, seeded for each step; the time it takes is the loader's."""
    with job.running():
        with phase("data"):
            job.seed_data(own=False)
            batches = iter(loader)
        end = object()
        while True:
            with phase("data"):
                batch = next(batches, end)
            if batch is end:
                return
            yield batch
            job.at_boundary()
            with phase("data"):
                job.seed_data(own=False)
