"""Shares of a batch cost the same, and every stretch of an epoch can be shared so."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

import pytest
from code_files import lengths as file_lengths

from nbkit.rank.data.balanced.balanced import Balanced
from nbkit.rank.data.balanced.balanced_order import BalancedOrder
from nbkit.rank.data.balanced.balanced_stream import BalancedStream
from nbkit.rank.data.balanced.equal_shares import equal_shares, unevenness
from nbkit.rank.data.open_stream import open_stream


def stream_of(data: Balanced, **changed: object) -> BalancedStream:
    how = {"batch_size": 64, "rank": 0, "ranks": 8, "seed": 7, "shuffle": True, "drop_last": False, "collate": list}
    stream = open_stream(data, **(how | changed))
    assert isinstance(stream, BalancedStream)
    return stream


DRAW = Random(0)
SHAPES = {
    "uniform": [DRAW.randint(1, 2048) for _ in range(64)],
    "squares": [DRAW.randint(1, 100) ** 2 for _ in range(64)],
    "lognormal": [DRAW.lognormvariate(5, 0.8) for _ in range(64)],
    "exponential": [DRAW.expovariate(1) for _ in range(96)],
    "two sizes": [DRAW.choice([10, 11, 12]) for _ in range(32)] + [2000] * 32,
    "equal": [3.0] * 64,
    "code": file_lengths()[::28][:63],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shares_of_many_shapes_cost_the_same(shape: str, ranks: int) -> None:
    costs = SHAPES[shape]
    shares = equal_shares(costs, ranks)

    assert sorted(row for share in shares for row in share) == list(range(len(costs)))
    assert unevenness(costs, shares) <= max(1.02, max(costs) * ranks / sum(costs))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)


def test_nothing_is_shared_better_by_trying_all_ways() -> None:
    for seed in range(6):
        draw = Random(seed)
        costs = [draw.randint(1, 60) for _ in range(9)]
        best = min(
            max(sum(c for c, rank in zip(costs, way, strict=True) if rank == r) for r in range(3))
            for way in product(range(3), repeat=9)
        )
        reached = max(sum(costs[row] for row in share) for share in equal_shares(costs, 3))
        assert best <= reached <= 1.07 * best


def test_ranks_have_as_many_rows_and_as_many_of_each_group() -> None:
    draw = Random(1)
    groups = draw.choices("abc", [6, 3, 1], k=70)
    costs = [draw.randint(50, 100) * {"a": 1, "b": 2, "c": 5}[group] for group in groups]
    shares = equal_shares(costs, 4, groups)

    for group in "abc":
        counts = [sum(groups[row] == group for row in share) for share in shares]
        assert max(counts) - min(counts) <= 1
    assert [len(share) for share in shares] == [18, 18, 17, 17]
    assert unevenness(costs, shares) <= 1.01


def test_rows_move_where_equal_numbers_of_rows_leave_a_rank_with_more() -> None:
    assert equal_shares([30, 10, 10, 10], 2) == ((1, 2, 3), (0,))
    assert [len(share) for share in equal_shares([12, 10, 10, 10], 2)] == [2, 2]


def test_fewer_rows_than_ranks_leave_the_last_ranks_without() -> None:
    assert equal_shares([5, 7], 4) == ((0,), (1,), (), ())
    assert equal_shares([0, 0, 0], 2) in (((0, 1), (2,)), ((0, 2), (1,)), ((1, 2), (0,)))


def test_tokens_of_real_code_are_the_same_on_eight_ranks_at_every_step_and_no_file_is_left_out() -> None:
    lengths = file_lengths()
    data = stream_of(Balanced(lengths, cost=lengths))
    worst, seen = 0.0, list[int]()
    while data.epoch == 0 and len(seen) < len(lengths):
        shard = data.next()
        assert shard.parts is not None
        worst = max(worst, unevenness([lengths[i] for i in shard.indices], shard.parts))
        seen += shard.indices
        assert 60 <= shard.total <= 64

    assert sorted(seen) == list(range(len(lengths)))
    assert worst <= 1.02


def test_every_stretch_of_an_epoch_has_its_share_of_cost_and_groups() -> None:
    draw = Random(2)
    groups = draw.choices("ab", [3, 1], k=1000)
    costs = [draw.expovariate(0.01) for _ in groups]
    order = BalancedOrder(costs, groups, seed=3, epoch=0)
    whole = order[0:1000]

    assert sorted(whole) == list(range(1000))
    assert [i for start in range(0, 1000, 30) for i in order[start : min(start + 30, 1000)]] == whole
    # As two draws of 64 of 1,024 do: the same samples do not stay together.
    first, second = (BalancedOrder(range(1024), None, seed=3, epoch=epoch)[0:64] for epoch in (0, 1))
    assert len(set(first) & set(second)) < 20
    share = Counter(groups)["b"] / 1000
    for start in range(0, 937, 21):
        stretch = whole[start : start + 63]
        assert abs(sum(groups[i] == "b" for i in stretch) - share * 63) <= 3
        assert sum(costs[i] for i in stretch) == pytest.approx(63 * sum(costs) / 1000, rel=0.2)


def test_cells_that_eight_ranks_could_not_share_evenly_exchange_samples_with_their_neighbours() -> None:
    draw = Random(0)
    costs = [2048] * 196 + [int(2047 * draw.random() ** 0.5) + 1 for _ in range(60)]
    order = BalancedOrder(costs, None, seed=4, epoch=0)
    for start in range(0, 256, 64):
        cell = [costs[i] for i in order[start : start + 64]]
        assert unevenness(cell, equal_shares(cell, 8)) <= 1.013  # 1.0155 without


def test_a_stream_goes_on_where_it_stood_whatever_the_ranks_and_the_batch() -> None:
    lengths = file_lengths()[:300]
    through = stream_of(Balanced(lengths, cost=lengths), ranks=2)
    batches = [list(through.next().indices) for _ in range(8)]

    resumed = stream_of(Balanced(lengths, cost=lengths), ranks=5)
    resumed.seek(0, len(batches[0]) + len(batches[1]))
    assert [list(resumed.next().indices) for _ in range(6)] == batches[2:]
    assert sorted(i for batch in batches[:5] for i in batch) == list(range(300)) and through.epoch == 1
    smaller = stream_of(Balanced(lengths, cost=lengths), batch_size=20)
    smaller.seek(0, len(batches[0]))
    rest = [i for _ in range(12) for i in smaller.next().indices]
    assert sorted(batches[0] + rest) == list(range(300))
