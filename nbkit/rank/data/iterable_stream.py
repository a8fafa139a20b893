"""The stream of data that can only be iterated, and not in parts: every rank iterates it and keeps its rows.

What it draws comes from a generator state of the stream's own, so that it is drawn again alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import Shard, fingerprint, numbers_of, parts_by_speed
from nbkit.rank.data.stream import Stream, shorter
from nbkit.rank.data.workers import Draws
from nbkit.rank.rng.seeding import ITERATED, mixed


@dataclass(eq=False)
class IterableStream(Stream):
    """Shards of a stream that can only be iterated; every rank iterates all of it."""

    own = False

    def __post_init__(self) -> None:
        self._samples: Iterator[Any] | None = None
        self._started = False
        self._drawn = torch.empty(0)
        # Of data that cannot begin again: where the newest batch begins and ends, its samples; those to be given again.
        self._newest: tuple[list[tuple[int, int]], list[Any]] | None = None
        self._again: list[Any] | None = None
        self.goes_back = not isinstance(self.data, Iterator)

    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`: the samples before it are read and passed over.

        Raises TrainingError when the data is an iterator that has been read and cannot begin again: it goes back by the
        newest batch only.
        """
        if (epoch, offset) != (self.epoch, self.offset):
            if (newest := self._newest) is not None and (epoch, offset) in newest[0]:
                self._again = newest[1] if (epoch, offset) == newest[0][0] else None
            else:
                self._check_can_start()
                self._samples = None
        self.epoch, self.offset = epoch, offset

    def _open(self) -> Iterator[Any]:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self.epoch)
        self._check_can_start()
        torch.default_generator.manual_seed(mixed(self.seed, self.epoch, ITERATED))
        samples: Iterator[Any] = iter(self.data)
        self._started = True
        passed = sum(1 for _ in islice(samples, self.offset))
        if passed < self.offset:
            raise shorter(self.epoch, self.offset, passed)
        return samples

    def next(self, draws: Draws | None = None) -> Shard:
        """This rank's rows of the next global batch."""
        samples = self._read()
        if not self._enough(samples) and (self.offset or not samples):
            self.epoch, self.offset, self._samples = self.epoch + 1, 0, None
            samples = self._read()
        if not self._enough(samples):
            raise TrainingError(
                "The data ended before one global batch was full.",
                numbers=f"{len(samples)} samples in epoch {self.epoch}, batch_size {self.batch_size}",
                hint="a smaller batch_size, or more data",
            )
        first, total = self.offset, len(samples)
        self.offset += total
        if not self.goes_back:
            self._newest = [(self.epoch, first), (self.epoch, self.offset)], samples
        parts = parts_by_speed(total, self.speeds)
        mine = numbers_of(parts, total, self.ranks, self.rank)
        return Shard(
            data=self.collate([samples[row] for row in mine]) if mine else None,
            rows=len(mine),
            total=total,
            indices=range(first, first + total),
            fingerprint=fingerprint(self.collate([samples[0], samples[-1]]), 2),
            everything=lambda: (self.collate(samples), samples, self.collate),
            parts=parts,
        )

    def _check_can_start(self) -> None:
        if self._started and not self.goes_back:
            raise TrainingError(
                "The data is an iterator that cannot start again.",
                numbers=f"epoch {self.epoch}, {self.offset} samples into it",
                hint="an IterableDataset, or any object whose __iter__ begins anew",
            )

    def _read(self) -> list[Any]:
        if self._again is not None:
            samples, self._again = self._again, None
            return samples
        try:
            with torch.random.fork_rng(devices=[]):
                if self._samples is None:
                    self._samples = self._open()
                else:
                    torch.set_rng_state(self._drawn)
                samples = list(islice(self._samples, self.batch_size))
                self._drawn = torch.get_rng_state()
            return samples
        except BaseException:
            # Broken off inside a batch: the position is still before it, so the stream is read up to there again.
            self._samples = None
            raise

    def _enough(self, samples: list[Any]) -> bool:
        return len(samples) == self.batch_size or (bool(samples) and not self.drop_last)
