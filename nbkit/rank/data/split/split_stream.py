"""Batches of data that comes in shards: each data-parallel rank reads its readers' samples, and only these.

Where readers end is known to who reads them. A rank reads two batches ahead, and says in the step's small reduction
when one of its readers ends there; then the ranks compare, before the first batch that it concerns. They compare also
before the first batch behind a jump. Rows that a rank computes and another reads, as there are when some readers have
ended or dp does not divide their number, are sent with that comparison.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from typing import Any

from nbkit.device_speeds import rows_by_speed
from nbkit.errors import TrainingError
from nbkit.rank.data import data_rng
from nbkit.rank.data.batch import Shard, bounds
from nbkit.rank.data.data_state import NO_STATE, READ_AGAIN, Mark, read, written
from nbkit.rank.data.split.data_shards import DataShards, refuse_unasked
from nbkit.rank.data.split.round_robin import MOST_READERS, RoundRobin, Row, share_out
from nbkit.rank.data.split.sample_queues import SampleQueues
from nbkit.rank.data.split.shard_reader import Course
from nbkit.rank.data.stream import Stream, checked
from nbkit.rank.data.workers import Draws

_SEED = "seed what shuffles: shuffle(seed=0), and detshuffle in the place of webdataset's shuffle"
_AHEAD = 2  # batches: what is said in a step is known to all before the next but one


@dataclass(eq=False)
class SplitStream(Stream):
    """Shards of iterable data that each rank reads a part of.

    gather: what every rank gives, by rank; collective over all ranks.
    """

    own = False
    _: KW_ONLY
    shards: DataShards
    gather: Callable[[Any], list[Any]]
    _ends: dict[int, int] = field(default_factory=dict, init=False)
    _found: dict[int, int] = field(default_factory=dict, init=False)
    _compares: bool = field(default=True, init=False)
    _queues: SampleQueues | None = field(default=None, init=False)
    _marks: dict[int, Mark] = field(default_factory=dict, init=False)
    _begun: dict[int, Mark] = field(default_factory=dict, init=False)
    _proven: bool = field(default=True, init=False)
    _trusts: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.readers = min(self.shards.number, MOST_READERS)
        if not self.shards.by_method:
            self.shards.copied()
        # Where nothing can be read, that is said where it is read to train.
        self.takes_part, self.has_state = True, False
        self._compare()

    def _compare(self) -> None:
        """Raises TrainingError where ranks hold other data, or for data that has shards and gives all samples for each.

        Collective.
        """

        def read() -> Any:
            found = self.shards.first_samples(2)
            self.takes_part, self.has_state = found.takes_part, found.has_state
            return self.collate(found.samples)

        found = self.gather(data_rng.content(read))
        self._drawn_anew, self._world_size = 0 in found, len(found)
        if self.shards.counted and not self.takes_part:
            raise refuse_unasked(self.shards)
        if (others := [rank for rank, mark in enumerate(found) if mark != found[0]]) and 0 not in found:
            raise TrainingError(
                "The ranks hold different data: the first samples of its first shard differ.",
                numbers=f"rank {others[0]} beside rank 0, {self.shards.number} shards",
                hint="seed what shuffles, without the rank: shuffle(seed=0); the data is not split for ranks before",
            )
        if self._drawn_anew:
            warnings.warn(
                f"the data gives other samples each time that it is read: behind a switch, load or rewind some come "
                f"twice, and others not at all. {_SEED}",
                stacklevel=6,
            )

    def _check_drawn(self) -> None:
        """Raises TrainingError where several ranks work on the same rows, and each would read others."""
        if self._drawn_anew and self.ranks < self._world_size:
            raise TrainingError(
                "The data gives other samples each time that it is read, and several ranks work on the same rows.",
                numbers=f"{self._world_size} ranks, {self._world_size // self.ranks} of them work on each row together",
                hint=_SEED,
            )

    def recut(self, rank: int, ranks: int, speeds: tuple[Fraction, ...]) -> None:
        """From now on read another part of each batch."""
        super().recut(rank, ranks, speeds)
        self._compares = True

    def begin(self) -> None:
        """Ranks may have been broken off in different places: they compare before the next batch."""
        self._compares = True

    def shards_end(self) -> None:
        """A rank has said that one of its readers ends in one of the next batches."""
        self._compares = True

    def close(self) -> None:
        """End the workers; `next` starts others."""
        if self.workers:
            self._drop()

    def seek(self, epoch: int, offset: int) -> None:
        """Go on with sample number `offset` of `epoch`: samples before it are read and passed over, by who reads them.

        Collective with the next batch.
        """
        if epoch != self.epoch:
            self._forget()
        self.epoch, self.offset, self._compares = epoch, offset, True

    def where(self) -> Any:
        """The ends that are known, and a mark of each reader that has one. Collective where the data has states."""
        if not self.has_state:
            return None
        self._share_marks()
        marks = [[reader, written(mark)] for reader, mark in sorted(self._marks.items())]
        return {"shards": self.shards.number, "ends": [list(each) for each in self._ends.items()], "marks": marks}

    def resume(self, epoch: int, offset: int, where: Any) -> None:
        """As `seek`. where: of data in as many shards, else it is read again."""
        self._forget()
        self.seek(epoch, offset)
        if self.has_state and isinstance(where, dict) and where.get("shards") == self.shards.number:
            self._ends = dict(where["ends"])
            marks = {reader: read(mark) for reader, mark in where["marks"]}
            self._marks = {reader: mark for reader, mark in marks.items() if mark is not None}
        if not offset or self._marks:
            return
        why = "the checkpoint has no state of such data" if self.has_state else NO_STATE
        warnings.warn(READ_AGAIN.format(offset=offset, epoch=epoch, why=why), stacklevel=4)

    def _share_marks(self) -> None:
        """Have the marks of all readers. Collective."""
        self._note_marks()
        if self._world_size > 1:
            for epoch, marks in self.gather((self.epoch, self._marks)):
                here = {reader: mark for reader, mark in marks.items() if epoch == self.epoch}
                self._marks |= {r: m for r, m in here.items() if r not in self._marks or m.index > self._marks[r].index}

    def next(self, draws: Draws | None = None) -> Shard:
        """This rank's rows of the next global batch."""
        self._check_drawn()
        try:
            return self._next()
        except BaseException:
            # Broken off inside a batch: the position is still before it, and the readers are opened again.
            self._drop()
            raise

    def _next(self) -> Shard:
        rows = self._rows()
        if len(rows) < self.batch_size and (self.drop_last or not rows):
            if not self.offset:
                raise TrainingError(
                    "The data ended before one global batch was full.",
                    numbers=f"{len(rows)} samples in epoch {self.epoch}, batch_size {self.batch_size}",
                    hint="a smaller batch_size, or more data",
                )
            self.seek(self.epoch + 1, 0)
            return self._next()
        parts = share_out(rows, self._most(len(rows)))
        read = {row: self._take(row) for row in rows if row[0] % self.ranks == self.rank}
        read |= self._sent(rows, parts, read)
        samples = [read[rows[number]] for number in parts[self.rank]]
        first, self.offset = self.offset, self.offset + len(rows)
        mark = repr((self.shards.number, self.seed, self.epoch, first, len(rows), sorted(self._ends.items())))
        return Shard(
            data=checked(self.collate(samples), len(samples)) if samples else None,
            rows=len(samples),
            total=len(rows),
            indices=range(first, self.offset),
            fingerprint=zlib.crc32(mark.encode()),
            parts=parts,
            ends=self._found != self._ends,
        )

    def _rows(self) -> list[Row]:
        """Those of the next batch, the same on every rank."""
        if self._compares and self.has_state:
            self._share_marks()
        known = self._read_ahead()
        while self._compares and self.ranks > 1:
            everyone = self.gather((self.epoch, known))
            self._ends = {reader: end for _, ends in everyone for reader, end in ends.items()}
            self._compares = any(one != everyone[0] for one in everyone)
            if self._compares:
                known = self._read_ahead()
        if self.ranks == 1:
            self._ends = known
        self._compares = False
        return self._order.rows(self.offset, self.batch_size)

    @property
    def _order(self) -> RoundRobin:
        return RoundRobin(self.readers, self._ends)

    def _read_ahead(self) -> dict[int, int]:
        """Read what this rank's readers give to this batch and the next; all ends that are known now."""
        while True:
            read = (1 + _AHEAD) * self.batch_size
            rows = self._order.rows(self.offset, max(read, self.readers))
            own = [(number, row) for number, row in enumerate(rows) if row[0] % self.ranks == self.rank]
            queues = self._open([row for _, row in own])
            try:
                for number, (reader, index) in own:
                    if number < read:
                        queues.fill(reader, index + 1)
            except TrainingError:
                if self._proven:
                    raise
                self._read_anew()
                continue
            if not self._proven and not all(
                queues.queues[reader].follows(mark, self.collate) for reader, mark in self._begun.items()
            ):
                self._read_anew()
                continue
            self._proven = True
            ends = {reader: queue.end for reader, queue in queues.queues.items() if queue.end is not None}
            self._found = self._ends | ends
            if self.ranks > 1 or self._found == self._ends:
                return self._found
            self._ends = self._found  # nobody else has to be asked

    def _open(self, rows: Sequence[Row]) -> SampleQueues:
        """The queues, which give the samples of `rows` and those behind them; opened where they are not."""
        starts = dict.fromkeys(range(self.rank, self.readers, self.ranks), 0)
        first = dict[int, int]()
        for reader, index in rows:
            first.setdefault(reader, index)
        held = self._queues.queues if self._queues is not None else {}
        if held.keys() != starts.keys() or any(held[reader].first > index for reader, index in first.items()):
            self._drop()
        if self._queues is None:
            course = Course(self.shards, self.readers, self.epoch, self.seed)
            chunk, at = -(-self.batch_size // self.readers), starts | first
            marks = {reader: mark for reader, mark in self._marks.items() if mark.index <= at.get(reader, -1)}
            marks = marks if self._trusts else {}
            self._begun, self._proven = marks, not marks
            ended = {reader: end for reader, end in self._ends.items() if reader in starts and reader not in first}
            self._queues = SampleQueues(course, at, workers=self.workers, chunk=chunk, marks=marks, ended=ended)
        return self._queues

    def _read_anew(self) -> None:
        """The data does not go on where its states say: what they lead to is read from its beginning."""
        why = "behind its own load_state_dict() it gives other samples"
        warnings.warn(READ_AGAIN.format(offset=self.offset, epoch=self.epoch, why=why), stacklevel=4)
        self._close_queues()
        self._marks, self._proven, self._trusts = {}, True, False

    def _most(self, total: int) -> list[int]:
        """Rows of each rank."""
        if self.speeds:
            return [stop - start for start, stop in rows_by_speed(total, self.speeds)]
        return [len(range(*bounds(total, self.ranks, rank))) for rank in range(self.ranks)]

    def _sent(self, rows: Sequence[Row], parts: Sequence[Sequence[int]], read: dict[Row, Any]) -> dict[Row, Any]:
        """The samples of rows that another rank computes than reads. Collective where there are any."""
        moved = [rows[i] for rank, part in enumerate(parts) for i in part if rows[i][0] % self.ranks != rank]
        if not moved:
            return {}
        everyone = self.gather({row: read[row] for row in moved if row in read})
        return {row: sample for each in everyone for row, sample in each.items()}

    def _take(self, row: Row) -> Any:
        assert self._queues is not None
        return self._queues.queues[row[0]].take(row[1])

    def _note_marks(self) -> None:
        if self._queues is not None and self.has_state and self._trusts:
            self._marks |= self._queues.marks(self.collate)

    def _drop(self) -> None:
        self._note_marks()
        self._close_queues()

    def _close_queues(self) -> None:
        if self._queues is not None:
            self._queues.close()
        self._queues = None

    def _forget(self) -> None:
        self._close_queues()
        self._ends, self._found, self._marks = {}, {}, {}
