"""The order of data that is read by several readers: a sample of each in turn; one that has ended is left out.

Reader k reads the data shards k, k + readers, ... one after the other. The order depends on the data alone, not on
ranks, batches or workers. Which rank computes a row follows from who reads it, as far as every rank gets its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_READERS = 64

Row = tuple[int, int]
"""(reader, which of its samples)"""


@dataclass(frozen=True)
class RoundRobin:
    """readers: how many there are. ends: the readers of which it is known how many samples they have."""

    readers: int
    ends: Mapping[int, int]

    def rows(self, first: int, count: int) -> list[Row]:
        """The samples at positions first, first + 1, ...; fewer than `count` where all readers have ended."""
        found: list[Row] = []
        begun, turn, living = 0, 0, list(range(self.readers))
        for end in [*sorted(set(self.ends.values())), None]:
            if not living:
                break
            whole = (end - turn) * len(living) if end is not None else first + count - begun
            at = max(first - begun, 0)
            until = min(whole, first + count - begun)
            found += [(living[i % len(living)], turn + i // len(living)) for i in range(at, until)]
            if end is None:
                break
            begun, turn = begun + whole, end
            living = [reader for reader in living if self.ends.get(reader, end + 1) > end]
        return found


def share_out(rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
    """Which of `rows` each rank computes, `most` of them: what it reads first, then what others have too many of.

    Rank r reads the readers r, r + ranks, ...
    """
    shares: list[list[int]] = [[] for _ in most]
    left: list[int] = []
    for number, (reader, _) in enumerate(rows):
        rank = reader % len(most)
        (shares[rank] if len(shares[rank]) < most[rank] else left).append(number)
    for rank, share in enumerate(shares):
        room = most[rank] - len(share)
        share += left[:room]
        share.sort()
        del left[:room]
    return shares
