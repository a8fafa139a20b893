"""Test the order of data in shards and the rank of each row: compare the arithmetic with the plain rule."""

from __future__ import annotations

from random import Random

import pytest

from nbkit.rank.data.batch import bounds
from nbkit.rank.data.split.split_stream import RoundRobin, share_out


def in_turns(lengths: list[int]) -> list[tuple[int, int]]:
    return sorted(
        ((reader, i) for reader, length in enumerate(lengths) for i in range(length)), key=lambda row: row[::-1]
    )


@pytest.mark.parametrize("seed", range(20))
def test_rows_come_from_each_reader_in_turn_at_any_start_of_the_window(seed: int) -> None:
    draw = Random(seed)
    lengths = [draw.choice([0, 1, 3, 7, 20]) for _ in range(draw.randint(1, 9))]
    whole, order = in_turns(lengths), RoundRobin(len(lengths), dict(enumerate(lengths)))
    for first in range(len(whole) + 3):
        count = draw.randint(1, 12)
        assert order.rows(first, count) == whole[first : first + count]


def test_unknown_ends_of_readers_change_no_earlier_row() -> None:
    lengths = [5, 9, 9, 4]
    whole, some = in_turns(lengths), RoundRobin(4, {3: 4})

    assert some.rows(0, 4 * 4 + 3) == whole[: 4 * 4 + 3]
    assert RoundRobin(4, {}).rows(0, 16) == whole[:16]


@pytest.mark.parametrize(("readers", "ranks", "batch"), [(8, 4, 8), (8, 2, 12), (12, 4, 20), (16, 8, 8), (6, 3, 9)])
def test_each_rank_computes_its_own_rows_if_ranks_divide_the_readers(readers: int, ranks: int, batch: int) -> None:
    for first in range(0, 5 * batch, batch):
        rows = RoundRobin(readers, {}).rows(first, batch)
        shares = share_out(rows, [batch // ranks] * ranks)
        assert all(rows[i][0] % ranks == rank for rank, share in enumerate(shares) for i in share)
        assert sorted(i for share in shares for i in share) == list(range(batch))


def test_ranks_have_the_usual_numbers_of_rows_after_readers_ended() -> None:
    rows = RoundRobin(4, {0: 2, 2: 2, 3: 3}).rows(4, 10)
    most = [len(range(*bounds(len(rows), 3, rank))) for rank in range(3)]

    shares = share_out(rows, most)

    assert [len(share) for share in shares] == most
    assert sorted(i for share in shares for i in share) == list(range(len(rows)))
