"""tp_chunks=4: a tensor-parallel layer sums its output over the ranks in 4 pieces, while it computes the next piece.

This concerns the second layer of each pair, whose inputs are split. The sums do not change, nor do the bytes sent. The
torch half is nbkit/rank/parallel/tensor/chunked_sum.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from nbkit.techniques.key import AnyStrategy, Key, whole_number
from nbkit.tensor_layout import bounds


class TpChunksKey(Key):
    """The number of pieces. The default is 1. A layer with fewer rows and positions has fewer pieces."""

    name = "tp_chunks"
    neutral = 1
    same = "the whole output is summed at once without it"
    rehearsed = True

    def parse(self, text: str) -> int:
        return whole_number(self.name, text)

    def no_effect(self, value: int, strategy: AnyStrategy) -> str:
        return "with tp=1: no layer is split" if strategy.degree("tp") == 1 else ""


def chunks_of(strategy: AnyStrategy) -> int:
    """Return the value of the key in `strategy`."""
    chunks: int = strategy.settings.get("tp_chunks", 1)
    return chunks


def num_pieces(rows: int, length: int, chunks: int) -> int:
    """Return the number of `pieces`."""
    return sum(1 for _ in pieces(max(rows, 1), max(length, 1), chunks))


def pieces(rows: int, length: int, chunks: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, one past the last, first position, one past the last) of at most `chunks` pieces.

    A piece has all `length` positions of some rows. If there are fewer rows than chunks, it has some positions of one
    row. So it is contiguous in a tensor (rows, length, ...). Both sizes are at least 1.
    """
    if rows >= chunks:
        for i in range(chunks):
            yield *bounds(rows, chunks, i), 0, length
        return
    parts = min(chunks // rows, length)
    for row in range(rows):
        for i in range(parts):
            yield row, row + 1, *bounds(length, parts, i)
