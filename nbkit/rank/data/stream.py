"""Streams of data. A stream gives this rank's shards of the batches, and its position is a small value.

The position is (epoch, number of samples taken in the epoch). Samples that workers have read ahead do not count, so a
resumed stream neither misses nor repeats a sample.

`MapStream` reads map-style data, where a rank fetches only its own rows. The order of epoch e is
`torch.randperm(len, generator seeded by seed + e)` (or 0..n-1), cut into global batches.

`IterableStream` reads data that can only be iterated as a whole. Every rank iterates all of it and keeps its own rows.
The stream has its own generator state, so that reading again draws the same numbers.
"""

from __future__ import annotations

import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from itertools import count, islice
from typing import Any, ClassVar

import torch

from nbkit.errors import TrainingError
from nbkit.rank.data.balanced.balanced_order import BalancedOrder
from nbkit.rank.data.batch import Parts, Shard, check_rows, fingerprint, numbers_of, parts_by_speed, steps_of_epoch
from nbkit.rank.data.data_rng import Compared, content
from nbkit.rank.data.data_state import NO_STATE, READ_AGAIN, Opened, StreamPosition, checksum, has_state, read, written
from nbkit.rank.data.workers import BatchReader, Draws, ReadAhead, ToRead
from nbkit.rank.rng.seeding import ITERATED, mixed

Collate = Callable[[list[Any]], Any]


def is_map_style(data: Any) -> bool:
    """Return True if `data` has a length and items by index, as torch's map-style datasets do."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


@dataclass(eq=False)
class Stream(ABC):
    """An endless series of shards, and the position in it: `offset` samples into `epoch`.

    rank, ranks, speeds: these determine the part of each global batch to read. own: True if random draws while reading
    differ by rank. goes_back: True if samples can be read again. workers: the number of processes that read ahead, if
    the data allows it.
    """

    data: Any
    _: KW_ONLY
    batch_size: int
    rank: int
    ranks: int
    speeds: tuple[Fraction, ...] = ()
    seed: int
    shuffle: bool
    drop_last: bool
    collate: Collate
    workers: int = 0
    epoch: int = field(default=0, init=False)
    offset: int = field(default=0, init=False)
    own: ClassVar[bool]
    goes_back: bool = field(default=True, init=False)

    @abstractmethod
    def next(self, draws: Draws | None = None) -> Shard:
        """Return this rank's rows of the next global batch. draws: the seeds for a worker that reads them."""

    def recut(self, rank: int, ranks: int, speeds: tuple[Fraction, ...]) -> None:
        """Read another part of each batch, from the next batch on."""
        self.rank, self.ranks, self.speeds = rank, ranks, speeds

    def begin(self) -> None:  # noqa: B027
        """Begin a run of steps. All ranks start at the same position."""

    def shards_end(self) -> None:  # noqa: B027
        """Note that some rank has reported in a step that shards of the data end soon: see Shard.ends."""

    def close(self) -> None:  # noqa: B027
        """End the workers, if there are any. `next` starts new ones."""

    def follow(self, other: Stream) -> None:
        """Move to the position of `other`, which is no longer read."""
        other.close()
        self.seek(other.epoch, other.offset)

    def agree(self) -> None:  # noqa: B027
        """Share what was learned about the data with ranks that have just joined. Collective."""

    @abstractmethod
    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`. Raises TrainingError if the data cannot go there."""

    def where(self) -> Any:
        """Return the data's own state at the position, for a checkpoint; None if it has no state. Collective."""
        return None

    def resume(self, epoch: int, offset: int, where: Any) -> None:
        """Seek with the result of `where` at that position. Warns if data is read again.

        Collective with the next batch.
        """
        self.seek(epoch, offset)

    def after(self, step: int) -> dict[str, int]:
        """Return the position after `step` batches from the first sample; in epoch 0 if the length is unknown."""
        return {"epoch": 0, "offset": step * self.batch_size}


@contextmanager
def reading(current: Callable[[], Stream]) -> Iterator[None]:
    """Begin the stream on entry, and end its workers on exit. Steps are made inside this context.

    current: returns the stream, which may be replaced by a new one meanwhile.
    """
    try:
        current().begin()
        yield
    finally:
        current().close()


def fetched(data: Any, indices: list[int], mine: Sequence[int], collate: Collate) -> Shard:
    own = [indices[row] for row in mine]
    if not own:
        return Shard(None, 0, len(indices), indices)
    samples = data.__getitems__(own) if hasattr(data, "__getitems__") else [data[i] for i in own]
    return Shard(checked(collate(samples), len(own)), len(own), len(indices), indices)


def checked(batch: Any, samples: int) -> Any:
    """Return `batch`. Raises TrainingError if it does not have one row for each of `samples` samples."""
    check_rows(batch, samples)
    return batch


def shorter(epoch: int, offset: int, samples: int) -> TrainingError:
    return TrainingError(
        "The data ends before the position from which the training must continue.",
        numbers=f"position {offset} of epoch {epoch}, {samples} samples",
        hint="resume with the data that the checkpoint was made with",
    )


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
                hint=f"batch_size={max(len(data) // ranks, 1) * ranks} or less"
                if len(data)
                else "a dataset that is not empty",
            )
        self.length = len(data)
        self._reader = BatchReader(data, self.collate)
        self._ahead = ReadAhead(self._reader, self.workers) if self.workers else None
        self._compared = Compared(content(lambda: fetched(data, [0, -1 % self.length], (0, 1), self.collate).data))
        self.seek(0, 0)

    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`. Raises TrainingError if the data is shorter."""
        if offset > self.length:
            raise shorter(epoch, offset, self.length)
        self.epoch, self.offset = epoch, offset
        self._order = self._ordered(epoch)

    def after(self, step: int) -> dict[str, int]:
        """Return the position after `step` batches from the first sample."""
        epoch, left = divmod(step, steps_of_epoch(self.length, self.batch_size, drop_last=self.drop_last))
        offset = 0
        for _ in range(left):
            offset += self._rows(self.length - offset)
        return {"epoch": epoch, "offset": offset}

    def close(self) -> None:
        """End the workers. `next` starts new ones."""
        if self._ahead is not None:
            self._ahead.close()

    def next(self, draws: Draws | None = None) -> Shard:
        """Return this rank's rows of the next global batch. draws: the seeds for a worker that reads them."""
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
        """Return the next batch without its data, and move the position to its end."""
        left = self.length - self.offset
        if left < (self.batch_size if self.drop_last else 1):
            self.seek(self.epoch + 1, 0)
            left = self.length
        total = self._rows(left)
        chosen = self._order[self.offset : self.offset + total]
        indices = chosen.tolist() if isinstance(chosen, torch.Tensor) else list(chosen)
        # With this fingerprint, ranks notice lengths, seeds or batch sizes that differ between them.
        mark = repr((self.length, self.seed, self.epoch, self.offset, total, indices[0], indices[-1]))
        self.offset += total
        parts = self._parts(indices)
        rows = len(numbers_of(parts, total, self.ranks, self.rank))
        return Shard(None, rows, total, indices, fingerprint=zlib.crc32(mark.encode()), parts=parts)

    def _own(self, shard: Shard) -> tuple[int, ...]:
        """Return the indices of this rank's rows."""
        return tuple(shard.indices[row] for row in numbers_of(shard.parts, shard.total, self.ranks, self.rank))

    def _following(self, draws: Draws | None) -> Iterator[ToRead]:
        """Return this rank's rows of the following batches as expected now, one item for each step."""
        later = copy(self)

        def each() -> Iterator[ToRead]:
            for number in count(1):
                if later._pauses():
                    return  # the batches after this are not known yet
                own = later._own(later._advance())
                by = None if draws is None else (draws[0], draws[1] + number, draws[2])
                if own:
                    yield ToRead(own, later.epoch, by)

        return each()

    def _pauses(self) -> bool:
        """Return True if the following batches depend on steps that have not been made."""
        return False

    def _ordered(self, epoch: int) -> Order:
        if self.shuffle:
            return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))
        return range(self.length)

    def _rows(self, left: int) -> int:
        """Return the number of rows of the next batch, if the epoch has `left` more samples."""
        return min(self.batch_size, left)

    def _parts(self, indices: Sequence[int]) -> Parts:
        """Return the rows of the batch that each rank has; None if all ranks have equal numbers."""
        return parts_by_speed(len(indices), self.speeds)


class _Unfaithful(Exception):
    """The state of a checkpoint leads to other samples than it did before."""


@dataclass(eq=False)
class IterableStream(Stream):
    """Shards of a stream that can only be iterated; every rank iterates all of it."""

    own = False

    def __post_init__(self) -> None:
        self._samples: Iterator[Any] | None = None
        self._started = False
        self._drawn = torch.empty(0)
        # For data that cannot begin again. _newest: begin and end of the newest batch, and its samples. _again: samples
        # to return once more.
        self._newest: tuple[list[tuple[int, int]], list[Any]] | None = None
        self._again: list[Any] | None = None
        self.goes_back = not isinstance(self.data, Iterator)
        # The data object may remember how far it was read. This state makes it begin again.
        self._begins = self.data.state_dict() if has_state(self.data) and self.goes_back else None
        self._opened: Opened | None = None
        self._before: tuple[int, StreamPosition] | None = None  # (epoch, position before the newest batch)
        self._resumes: StreamPosition | None = None

    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`. The samples before it are read and skipped.

        Raises TrainingError if the data is an iterator that has been read, because it cannot begin again. Such data can
        go back only by its newest batch.
        """
        if (epoch, offset) != (self.epoch, self.offset):
            if (newest := self._newest) is not None and (epoch, offset) in newest[0]:
                self._again = newest[1] if (epoch, offset) == newest[0][0] else None
            else:
                self._check_can_start()
                self._samples = None
        self.epoch, self.offset = epoch, offset

    def where(self) -> Any:
        """Return the position before the newest batch, with checksums of the batch; None if there is none.

        All ranks read the same data, so any rank may write it.
        """
        if self._before is None or self._before[0] != self.epoch or self._before[1].first != self.offset:
            return None
        return written(self._before[1])

    def resume(self, epoch: int, offset: int, where: Any) -> None:
        """Seek by the data's own state if that leads to the batch before `offset`; else warn and read again."""
        self.seek(epoch, offset)
        mark = read(where)
        self._resumes = mark if mark is not None and mark.first == offset else None
        if not offset or self._resumes is not None:
            return
        why = NO_STATE if not has_state(self.data) else "the checkpoint has no state of such data"
        warnings.warn(READ_AGAIN.format(offset=offset, epoch=epoch, why=why), stacklevel=4)

    def _open(self, mark: StreamPosition | None = None) -> Iterator[Any]:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self.epoch)
        self._check_can_start()
        data = self.data
        if has_state(data) and self.goes_back:
            with suppress(Exception):  # if the data cannot be copied, the data itself is read
                data = copy(data)  # a state that is loaded into the data would also apply at the next beginning
            if mark is None and self._begins is not None:
                data.load_state_dict(self._begins)
        torch.default_generator.manual_seed(mixed(self.seed, self.epoch, ITERATED))
        self._opened = Opened.at(data, mark)
        self._started = True
        if mark is not None and mark.drawn is not None:
            torch.set_rng_state(mark.drawn)
        passed = 0 if mark is None else mark.index
        batch = list(islice(self._opened.samples, self.offset - passed)) if mark is not None else []
        if mark is not None and self._checksum(batch) != mark.checks:
            raise _Unfaithful
        if mark is None and (passed := sum(1 for _ in islice(self._opened.samples, self.offset))) < self.offset:
            raise shorter(self.epoch, self.offset, passed)
        return self._opened.samples

    def _go_on(self) -> Iterator[Any]:
        """Open the data at a checkpoint's state, if there is one and its checksums match; else at the beginning."""
        mark, self._resumes = self._resumes, None
        if mark is not None and mark.first == self.offset:
            try:
                return self._open(mark)
            except Exception as error:
                why = "the data gives different samples after its load_state_dict()"
                why = why if isinstance(error, _Unfaithful) else f"{type(error).__name__}: {error}"
                warnings.warn(READ_AGAIN.format(offset=self.offset, epoch=self.epoch, why=why), stacklevel=4)
        return self._open()

    def _checksum(self, samples: list[Any]) -> tuple[int, ...]:
        return tuple(checksum(self.collate, sample) for sample in (*samples[:1], *samples[-1:]))

    def next(self, draws: Draws | None = None) -> Shard:
        """Return this rank's rows of the next global batch."""
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
                hint="an IterableDataset, or any object whose __iter__ starts again",
            )

    def _read(self) -> list[Any]:
        if self._again is not None:
            samples, self._again = self._again, None
            return samples
        try:
            with torch.random.fork_rng(devices=[]):
                if self._samples is None:
                    self._samples = self._go_on()
                else:
                    torch.set_rng_state(self._drawn)
                before = self._standing()
                samples = list(islice(self._samples, self.batch_size))
                self._drawn = torch.get_rng_state()
            self._before = None
            if before is not None:
                behind = self.offset + len(samples)
                self._before = self.epoch, replace(before, first=behind, checks=self._checksum(samples))
            return samples
        except BaseException:
            # Reading stopped inside a batch. The position is before this batch, so the data is read again up to there.
            self._samples = None
            raise

    def _standing(self) -> StreamPosition | None:
        if self._opened is None or not self._opened.has_state:
            return None
        return StreamPosition(self.offset, 0, *self._opened.states(), drawn=torch.get_rng_state())

    def _enough(self, samples: list[Any]) -> bool:
        return len(samples) == self.batch_size or (bool(samples) and not self.drop_last)
