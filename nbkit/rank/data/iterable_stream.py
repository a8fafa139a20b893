"""The stream of data that can only be iterated, and not in parts: every rank iterates it and keeps its rows.

What it draws comes from a generator state of the stream's own, so that it is drawn again alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import Shard, fingerprint, numbers_of, parts_by_speed
from nbkit.rank.data.data_state import NO_STATE, READ_AGAIN, Mark, Opened, checksum, has_state, read, written
from nbkit.rank.data.stream import Stream, shorter
from nbkit.rank.data.workers import Draws
from nbkit.rank.rng.seeding import ITERATED, mixed


class _Unfaithful(Exception):
    """The state leads to other samples."""


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
        # Data may stand in itself where it was read to: it is told to begin anew.
        self._begins = self.data.state_dict() if has_state(self.data) and self.goes_back else None
        self._opened: Opened | None = None
        self._before: tuple[int, Mark] | None = None  # (epoch, where the newest batch began)
        self._resumes: Mark | None = None

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

    def where(self) -> Any:
        """Where the newest batch began, and a checksum of it: all ranks read alike, so one of them may write it."""
        if self._before is None or self._before[0] != self.epoch or self._before[1].first != self.offset:
            return None
        return written(self._before[1])

    def resume(self, epoch: int, offset: int, where: Any) -> None:
        """As `seek`, by the data's own state, if that leads to the batch before `offset`."""
        self.seek(epoch, offset)
        mark = read(where)
        self._resumes = mark if mark is not None and mark.first == offset else None
        if not offset or self._resumes is not None:
            return
        why = NO_STATE if not has_state(self.data) else "the checkpoint has no state of such data"
        warnings.warn(READ_AGAIN.format(offset=offset, epoch=epoch, why=why), stacklevel=4)

    def _open(self, mark: Mark | None = None) -> Iterator[Any]:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self.epoch)
        self._check_can_start()
        data = self.data
        if has_state(data) and self.goes_back:
            with suppress(Exception):
                data = copy(data)  # a state that it was told once would hold at its next beginning too
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
        """From the state of a checkpoint, if there is one and it is faithful; else from the beginning."""
        mark, self._resumes = self._resumes, None
        if mark is not None and mark.first == self.offset:
            try:
                return self._open(mark)
            except Exception as error:
                why = "behind its own load_state_dict() it gives other samples"
                why = why if isinstance(error, _Unfaithful) else f"{type(error).__name__}: {error}"
                warnings.warn(READ_AGAIN.format(offset=self.offset, epoch=self.epoch, why=why), stacklevel=4)
        return self._open()

    def _checksum(self, samples: list[Any]) -> tuple[int, ...]:
        return tuple(checksum(self.collate, sample) for sample in (*samples[:1], *samples[-1:]))

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
            # Broken off inside a batch: the position is still before it, so the stream is read up to there again.
            self._samples = None
            raise

    def _standing(self) -> Mark | None:
        if self._opened is None or not self._opened.has_state:
            return None
        return Mark(self.offset, 0, *self._opened.states(), drawn=torch.get_rng_state())

    def _enough(self, samples: list[Any]) -> bool:
        return len(samples) == self.batch_size or (bool(samples) and not self.drop_last)
