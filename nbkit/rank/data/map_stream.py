"""Streams of map-style data: a rank fetches its own rows alone.

Epoch e is `torch.randperm(len, generator seeded by seed + e)` (or 0..n-1), cut into global batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import count

import torch

from nbkit.errors import TrainingError
from nbkit.rank.data.balanced.balanced_order import BalancedOrder
from nbkit.rank.data.batch import Parts, Shard, numbers_of, parts_by_speed
from nbkit.rank.data.batch_size import steps_of_epoch
from nbkit.rank.data.data_rng import Compared, content
from nbkit.rank.data.stream import Stream, checked, fetched, shorter
from nbkit.rank.data.workers import Draws, ReadAhead, Reader, ToRead

Order = range | torch.Tensor | BalancedOrder


@dataclass(eq=False)
class MapStream(Stream):
    """Shards of a map-style dataset."""

    own = True

    def __post_init__(self) -> None:
        data, ranks = self.data, self.ranks
        if len(data) < self.batch_size:
            raise TrainingError(
                "The dataset is smaller than one global batch.",
                numbers=f"{len(data)} samples, batch_size {self.batch_size}",
                hint=f"batch_size={max(len(data) // ranks, 1) * ranks} or less" if len(data) else "a dataset with data",
            )
        self.length = len(data)
        self._reader = Reader(data, self.collate)
        self._ahead = ReadAhead(self._reader, self.workers) if self.workers else None
        self._compared = Compared(content(lambda: fetched(data, [0, -1 % self.length], (0, 1), self.collate).data))
        self.seek(0, 0)

    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`. Raises TrainingError when the data is shorter."""
        if offset > self.length:
            raise shorter(epoch, offset, self.length)
        self.epoch, self.offset = epoch, offset
        self._order = self._ordered(epoch)

    def after(self, step: int) -> dict[str, int]:
        """Where `step` batches end, from the first sample on."""
        epoch, left = divmod(step, steps_of_epoch(self.length, self.batch_size, drop_last=self.drop_last))
        offset = 0
        for _ in range(left):
            offset += self._rows(self.length - offset)
        return {"epoch": epoch, "offset": offset}

    def close(self) -> None:
        """End the workers; `next` starts others."""
        if self._ahead is not None:
            self._ahead.close()

    def next(self, draws: Draws | None = None) -> Shard:
        """This rank's rows of the next global batch. draws: what a worker that reads them draws from."""
        self._compared.check(self.ranks)
        shard = self._advance()
        own = self._own(shard)
        if not own:
            return shard
        wanted = ToRead(own, self.epoch, draws)
        if self._ahead is None:
            data = self._reader.read(wanted)
        else:
            data = self._ahead.next(wanted, lambda: self._following(draws))
        return replace(shard, data=checked(data, len(own)))

    def _advance(self) -> Shard:
        """The next batch without its data; the position is behind it."""
        left = self.length - self.offset
        if left < (self.batch_size if self.drop_last else 1):
            self.seek(self.epoch + 1, 0)
            left = self.length
        total = self._rows(left)
        chosen = self._order[self.offset : self.offset + total]
        indices = chosen.tolist() if isinstance(chosen, torch.Tensor) else list(chosen)
        # Lengths, seeds or batch sizes that differ between ranks show here.
        mark = repr((self.length, self.seed, self.epoch, self.offset, total, indices[0], indices[-1]))
        self.offset += total
        parts = self._parts(indices)
        rows = len(numbers_of(parts, total, self.ranks, self.rank))
        return Shard(None, rows, total, indices, fingerprint=zlib.crc32(mark.encode()), parts=parts)

    def _own(self, shard: Shard) -> tuple[int, ...]:
        """Indices of this rank's rows."""
        return tuple(shard.indices[row] for row in numbers_of(shard.parts, shard.total, self.ranks, self.rank))

    def _following(self, draws: Draws | None) -> Iterator[ToRead]:
        """This rank's rows of the batches behind the position, one for each step, if nothing happens."""
        later = copy(self)

        def each() -> Iterator[ToRead]:
            for number in count(1):
                if later._pauses():
                    return  # what comes behind is not known yet
                own = later._own(later._advance())
                by = None if draws is None else (draws[0], draws[1] + number, draws[2])
                if own:
                    yield ToRead(own, later.epoch, by)

        return each()

    def _pauses(self) -> bool:
        """Whether the batches that follow depend on steps that are not made yet."""
        return False

    def _ordered(self, epoch: int) -> Order:
        if self.shuffle:
            return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))
        return range(self.length)

    def _rows(self, left: int) -> int:
        """Rows of the next batch, with `left` samples left in the epoch."""
        return min(self.batch_size, left)

    def _parts(self, indices: Sequence[int]) -> Parts:
        """Which rows of the batch each rank has; None: as many as every other."""
        return parts_by_speed(len(indices), self.speeds)
