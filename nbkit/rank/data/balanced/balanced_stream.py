"""The stream of balanced data. Its shards have the same cost, and costs may be learned while the training runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from nbkit.rank.data.balanced.balanced import Balanced, Gather
from nbkit.rank.data.balanced.balanced_order import BalancedOrder
from nbkit.rank.data.balanced.equal_shares import equal_shares
from nbkit.rank.data.batch import Parts, Shard
from nbkit.rank.data.stream import MapStream, Order, Stream
from nbkit.rank.data.workers import Draws


@dataclass(eq=False)
class BalancedStream(MapStream):
    """Shards of Balanced data with the same cost on every rank.

    The sizes of batches in an epoch differ by one sample at most, because a short last batch could not be shared
    evenly. If costs are learned, ranks agree on them at the end of an epoch, between its last step and the next step.
    """

    data: Balanced
    gather: Gather = field(default=lambda own: [own], kw_only=True)

    def __post_init__(self) -> None:
        self.data.measured(together=True)
        self._before, self._learned = self.data.difficulty, self.data.begin()
        super().__post_init__()

    def next(self, draws: Draws | None = None) -> Shard:
        """Return this rank's rows of the next global batch."""
        learned = self._learned
        if learned is None:
            return super().next(draws)
        if self._pauses():
            learned.learn(self.epoch, self.gather)
        shard = super().next(draws)
        speed = float(self.speeds[self.rank]) if self.speeds else 1.0
        return replace(shard, hears=learned.reads(self.epoch, self._own(shard), replica=self.rank, speed=speed))

    def begin(self) -> None:
        """Begin a run of steps. All ranks start at the same position."""
        if self._learned is not None:
            self._learned.begin()

    def close(self) -> None:
        """End the workers, and stop measuring until steps are made again."""
        super().close()
        if self._learned is not None:
            self._learned.end()

    def follow(self, other: Stream) -> None:
        """Move to the position of `other`, and take over its learned costs."""
        if isinstance(other, BalancedStream) and other._learned is not None:
            self._before = other._learned
        super().follow(other)

    def agree(self) -> None:
        """Share the learned costs with ranks that have just joined. Collective."""
        if self._learned is not None:
            if self._before is not None and self._before.kind == self._learned.kind:
                self._learned = self.data.difficulty = self._before
            self._learned.agree(self.gather)
            self.seek(self.epoch, self.offset)

    def where(self) -> Any:
        """Return the state of the learned costs; None if costs are given. Collective."""
        return None if self._learned is None else self._learned.state(self.epoch, self.gather)

    def resume(self, epoch: int, offset: int, where: Any) -> None:
        """Seek, and restore the learned costs from the result of `where`. Warns if they are missing."""
        if self._learned is not None and (missing := self._learned.restore(epoch, where)):
            warnings.warn(missing, stacklevel=4)
        super().resume(epoch, offset, where)

    def recut(self, rank: int, ranks: int, speeds: tuple[Fraction, ...]) -> None:
        """Read another part of each batch, from the next batch on."""
        super().recut(rank, ranks, speeds)
        if self._learned is not None:
            self._learned.recut()

    def _pauses(self) -> bool:
        """Return True if ranks agree on learned costs before the next batch is cut."""
        if self._learned is None:
            return False
        ends = self.length - self.offset < (self.batch_size if self.drop_last else 1)
        return ends or self._learned.due(self.epoch, -(-self.offset // self.batch_size))

    def _ordered(self, epoch: int) -> Order:
        if not self.shuffle:
            return range(self.length)
        costs, groups = self.data.measured()
        costs = costs if self._learned is None else self._learned.of_order(epoch)
        return BalancedOrder(costs, groups, seed=self.seed, epoch=epoch)

    def _rows(self, left: int) -> int:
        if self.drop_last:
            return self.batch_size
        return -(-left // -(-left // self.batch_size))

    def _parts(self, indices: Sequence[int]) -> Parts:
        costs, groups = self.data.measured()
        costs = costs if self._learned is None else self._learned.of_shares(self.epoch)
        of_groups = None if groups is None else [groups[i] for i in indices]
        return equal_shares([costs[i] for i in indices], self.ranks, of_groups, self.speeds)
