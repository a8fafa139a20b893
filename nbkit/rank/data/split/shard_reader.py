"""One reader: the samples of some data shards one after the other, with the draws of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.rank.data import data_rng
from nbkit.rank.data.sample_rows import undrawn
from nbkit.rank.data.split.data_shards import DataShards
from nbkit.rank.rng.seeding import ITERATED, Drawn, mixed


@dataclass(frozen=True)
class Course:
    """One pass over the data. readers: how many share it. seed: of what reading draws."""

    shards: DataShards
    readers: int
    epoch: int
    seed: int

    def of(self, reader: int) -> range:
        """The data shards of a reader."""
        return range(reader, self.shards.number, self.readers)


class ShardReader:
    """Reads the samples of reader `number` in their order. index: which one comes next."""

    def __init__(self, course: Course, number: int) -> None:
        self.course, self.number, self.index = course, number, 0
        self.left = iter(course.of(number))
        self._shard = -1
        self._samples: Iterator[Any] | None = None
        self._drawn: tuple[torch.Tensor, Drawn] | None = None

    def read(self, count: int) -> list[Any]:
        """The next `count` samples; fewer where they end. Raises TrainingError, which names shard and sample."""
        found: list[Any] = []
        with undrawn():
            if self._drawn is None:
                data_rng.seed_host(mixed(self.course.seed, self.course.epoch, ITERATED), self.number, 0)
            else:
                torch.set_rng_state(self._drawn[0])
                self._drawn[1].restore()
            while len(found) < count:
                if self._samples is None and (shard := next(self.left, None)) is None:
                    break
                elif self._samples is None:
                    self._shard = shard  # type: ignore[assignment]
                try:
                    with self.course.shards.reading(self._shard):
                        if self._samples is None:
                            self._samples = self.course.shards.samples(self._shard, self.course.epoch)
                        some = list(islice(self._samples, count - len(found)))
                except Exception as error:
                    raise TrainingError(
                        f"Shard {self._shard} of the data could not be read: {type(error).__name__}: {error}",
                        numbers=f"behind {self.index + len(found)} samples of reader {self.number} of "
                        f"{self.course.readers}, epoch {self.course.epoch}",
                        hint="workers=0 reads without workers, and shows where",
                    ) from error
                found += some
                if len(found) < count:
                    self._samples = None
            self._drawn = torch.get_rng_state(), Drawn.so_far()
        self.index += len(found)
        return found
