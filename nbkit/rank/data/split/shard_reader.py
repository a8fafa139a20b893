"""A reader gives the samples of some data shards, one shard after the other, with its own random draws."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from nbkit.errors import TrainingError
from nbkit.rank.data import data_rng
from nbkit.rank.data.data_state import Opened, StreamPosition, draw_from, draws_now, same_draws
from nbkit.rank.data.sample_rows import undrawn
from nbkit.rank.data.split.data_shards import DataShards
from nbkit.rank.rng.seeding import ITERATED, mixed


@dataclass(frozen=True)
class Course:
    """A pass over the data. readers: the number of readers that share it. seed: for random draws while reading."""

    shards: DataShards
    readers: int
    epoch: int
    seed: int

    def of(self, reader: int) -> range:
        """Return the data shards of a reader."""
        return range(reader, self.shards.number, self.readers)


class ShardReader:
    """Reads the samples of reader `number` in their order. index: the number of the next sample.

    mark: the position to begin at, in the same epoch, instead of the first sample.
    """

    def __init__(self, course: Course, number: int, mark: StreamPosition | None = None) -> None:
        self.course, self.number = course, number
        self.index = 0 if mark is None else mark.index
        self.left = iter([shard for shard in course.of(number) if mark is None or shard > mark.shard])
        self._shard = -1 if mark is None else mark.shard
        self._from = mark
        self._opened: Opened | None = None
        with undrawn():
            data_rng.seed_host(mixed(course.seed, course.epoch, ITERATED), number, 0)
            self._seeded = self._drawn = draws_now()
        if mark is not None and mark.drawn is not None:
            self._drawn = mark.drawn

    def mark(self) -> StreamPosition | None:
        """Return the current position; None between shards, or if the data has no state."""
        if self._opened is None or not self._opened.has_state:
            return None
        data, iterator = self._opened.states()
        drawn = None if same_draws(self._seeded, self._drawn) else self._drawn
        return StreamPosition(self.index, self._shard, data, iterator, drawn)

    def read(self, count: int) -> list[Any]:
        """Return the next `count` samples, or fewer at the end. Raises TrainingError, which names shard and sample."""
        found: list[Any] = []
        with undrawn():
            draw_from(self._drawn)
            while len(found) < count:
                if self._opened is None and self._from is None:
                    if (shard := next(self.left, None)) is None:
                        break
                    self._shard = shard
                try:
                    with self.course.shards.reading(self._shard):
                        if self._opened is None:
                            mark, self._from = self._from, None
                            self._opened = self.course.shards.opened(self._shard, self.course.epoch, mark)
                        some = list(islice(self._opened.samples, count - len(found)))
                except Exception as error:
                    raise TrainingError(
                        f"Shard {self._shard} of the data could not be read: {type(error).__name__}: {error}",
                        numbers=f"behind {self.index + len(found)} samples of reader {self.number} of "
                        f"{self.course.readers}, epoch {self.course.epoch}",
                        hint="loading=nbkit.Loading(workers=0) reads without workers, and shows where",
                    ) from error
                found += some
                if len(found) < count:
                    self._opened = None
            self._drawn = draws_now()
        self.index += len(found)
        return found
