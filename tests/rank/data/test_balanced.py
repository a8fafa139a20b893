"""Test that balanced data trains as in one process under every strategy, and each sample comes once per epoch.

The shares of a batch cost the same, in every part of an epoch.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from code_files import lengths as file_lengths
from jobs import Recording, net, points, quiet, weighted_loss
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

import nbkit
from nbkit.errors import NotFinite, TrainingError
from nbkit.rank.data.balanced.balanced import Balanced
from nbkit.rank.data.balanced.balanced_order import BalancedOrder
from nbkit.rank.data.balanced.balanced_stream import BalancedStream
from nbkit.rank.data.balanced.equal_shares import equal_shares, unevenness
from nbkit.rank.data.open_stream import open_stream
from nbkit.rank.models.gpt import GPT, GPTConfig

COSTS = [1.0 + (i * i) % 23 for i in range(52)]
GROUPS = ["ab"[i % 3 == 0] for i in range(52)]


def labelled(world: Any, batch: int, path: Path) -> dict[str, Any]:
    """Make six steps, resumed after four, with dropout and unequal weights of rows."""
    how = {"data": nbkit.Balanced(points(52), cost=COSTS, group=GROUPS), "batch_size": batch}
    how |= {"model": lambda: net(0.3), "loss": weighted_loss, "compute": nbkit.Compute(microbatch_size=2)}
    first = quiet(**how)
    first.fit(4)
    first.save(path / str(world.place.world_size))
    second = quiet(**how)
    second.load(path / str(world.place.world_size))
    second.fit(2)
    asked = {"rank": 0, "ranks": 2, "seed": 7, "shuffle": True, "drop_last": False, "collate": list}
    shard = open_stream(how["data"], batch_size=batch, **asked).next()
    return {
        "loss": [record["loss"] for record in second.history],
        "weights": torch.cat([p.detach().flatten() for p in second.model.parameters()]).tolist(),
        "samples": [record["samples"] for record in second.history],
        "uneven": unevenness([COSTS[i] for i in shard.indices], shard.parts or ()),
    }


def test_balanced_losses_equal_one_process_with_dropout_and_unequal_weights(tmp_path: Path) -> None:
    (alone,) = run_ranks(labelled, 1, 12, tmp_path)
    found = run_ranks(labelled, 2, 12, tmp_path)

    for one in found:
        torch.testing.assert_close(torch.tensor(one["loss"]), torch.tensor(alone["loss"]), rtol=1e-6, atol=0)
        torch.testing.assert_close(torch.tensor(one["weights"]), torch.tensor(alone["weights"]), rtol=1e-5, atol=1e-7)
        # 52 samples in batches of at most 12 are five batches, whose sizes differ by one at most. The sixth batch
        # belongs to the next epoch.
        assert one["samples"] == alone["samples"] == [11, 11, 10, 10, 10, 11]
        assert one["uneven"] <= 1.02


def docs() -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(50, (int(n),), generator=draw) for n in torch.randint(2, 30, (40,), generator=draw)]


CONFIG = GPTConfig(vocab=50, block=32, layers=2, heads=2, width=16)
STRATEGIES, ALSO = ("zero3", "pp", "cp=2"), ("ddp", "tp")


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def packed_losses(world: Any, strategies: tuple[str, ...]) -> dict[str, list[float]]:
    data = nbkit.Balanced(docs(), cost=lambda ids: len(ids) ** 2, pack=32)
    return {
        strategy: [
            record["loss"]
            for record in quiet(
                model=lambda: GPT(CONFIG).double(), loss=token_loss, data=data, batch_size=8, strategy=strategy
            ).fit(3)
        ]
        for strategy in strategies
    }


def one_by_one() -> list[float]:
    """Train on the same three batches in plain torch, one document at a time."""
    data = nbkit.Balanced(docs(), cost=lambda ids: len(ids) ** 2, pack=32)
    stream = open_stream(
        data,
        batch_size=8,
        rank=0,
        ranks=1,
        seed=7,
        shuffle=True,
        drop_last=False,
        collate=lambda rows: torch.zeros(len(rows)),
    )
    torch.manual_seed(7)
    model = GPT(CONFIG).double()
    optimizer, losses = Recording(model), []
    for _ in range(3):
        sums, count = torch.zeros((), dtype=torch.float64), 0
        for block in stream.next().indices:
            for piece in data.data.blocks[block]:
                ids = docs()[piece.document][piece.start : piece.stop + 1]
                sums = sums + F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="sum")
                count += len(piece)
        optimizer.zero_grad()
        (sums / count).backward()
        optimizer.step()
        losses.append(float(sums.detach() / count))
    return losses


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("strategies", [STRATEGIES, pytest.param(ALSO, marks=pytest.mark.long)])
def test_packed_documents_train_as_single_ones_under_every_strategy(strategies: tuple[str, ...]) -> None:
    expected = one_by_one()
    for found in run_ranks(packed_losses, 2, strategies, timeout=120):
        for strategy in strategies:
            assert found[strategy] == pytest.approx(expected, rel=1e-9), strategy


def spoilt(world: Any) -> tuple[str, str, str]:
    samples = points(52)
    bad = 17
    samples[bad] = (torch.full((6,), float("nan")), samples[bad][1])
    trainer = quiet(data=nbkit.Balanced(samples, cost=COSTS), batch_size=12)
    with pytest.raises(NotFinite) as raised:
        trainer.fit(5)
    with pytest.raises(TrainingError) as refused:
        quiet(data=nbkit.Balanced(points(52), cost=lambda sample: -1.0 if world.place.rank else 1.0))
    with pytest.raises((TrainingError, ZeroDivisionError)) as failed:
        quiet(data=nbkit.Balanced(points(52), cost=lambda sample: 1 / (1 - world.place.rank)))
    return str(raised.value), str(refused.value), str(failed.value)


def test_bad_samples_and_bad_costs_are_reported_with_sample_and_rank() -> None:
    found = run_ranks(spoilt, 2)

    assert found[0][0] == found[1][0] and " 17" in found[0][0]
    assert "The cost of a sample must be a number >= 0." in found[0][1] and "of sample 1" in found[1][1]
    assert "Another rank" in found[0][2] and "division by zero" in found[1][2]


def test_data_without_an_index_and_costs_of_another_length_are_refused() -> None:
    with pytest.raises(TrainingError, match="read by index"):
        nbkit.Balanced(iter([1, 2]))
    with pytest.raises(TrainingError, match="2 of cost, 3 samples"):
        _ = nbkit.Balanced([[1], [2], [3]], cost=[1, 2]).costs
    with pytest.warns(UserWarning, match="every sample costs the same"):
        _ = nbkit.Balanced(points(4), cost=len).costs
    assert list(nbkit.Balanced([{"ids": torch.zeros(n)} for n in (4, 2)]).costs) == [4.0, 2.0]


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


def test_equal_shares_are_close_to_the_best_of_all_ways() -> None:
    for seed in range(6):
        draw = Random(seed)
        costs = [draw.randint(1, 60) for _ in range(9)]
        best = min(
            max(sum(c for c, rank in zip(costs, way, strict=True) if rank == r) for r in range(3))
            for way in product(range(3), repeat=9)
        )
        reached = max(sum(costs[row] for row in share) for share in equal_shares(costs, 3))
        assert best <= reached <= 1.07 * best


def test_ranks_get_equal_numbers_of_rows_of_each_group() -> None:
    draw = Random(1)
    groups = draw.choices("abc", [6, 3, 1], k=70)
    costs = [draw.randint(50, 100) * {"a": 1, "b": 2, "c": 5}[group] for group in groups]
    shares = equal_shares(costs, 4, groups)

    for group in "abc":
        counts = [sum(groups[row] == group for row in share) for share in shares]
        assert max(counts) - min(counts) <= 1
    assert [len(share) for share in shares] == [18, 18, 17, 17]
    assert unevenness(costs, shares) <= 1.01


def test_numbers_of_rows_differ_if_equal_numbers_have_unequal_cost() -> None:
    assert equal_shares([30, 10, 10, 10], 2) == ((1, 2, 3), (0,))
    assert [len(share) for share in equal_shares([12, 10, 10, 10], 2)] == [2, 2]


def test_the_last_ranks_get_no_rows_if_there_are_fewer_rows_than_ranks() -> None:
    assert equal_shares([5, 7], 4) == ((0,), (1,), (), ())
    assert equal_shares([0, 0, 0], 2) in (((0, 1), (2,)), ((0, 2), (1,)), ((1, 2), (0,)))


def test_eight_ranks_get_equal_tokens_of_real_code_at_every_step() -> None:
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


def test_every_part_of_an_epoch_has_its_share_of_cost_and_groups() -> None:
    draw = Random(2)
    groups = draw.choices("ab", [3, 1], k=1000)
    costs = [draw.expovariate(0.01) for _ in groups]
    order = BalancedOrder(costs, groups, seed=3, epoch=0)
    whole = order[0:1000]

    assert sorted(whole) == list(range(1000))
    assert [i for start in range(0, 1000, 30) for i in order[start : min(start + 30, 1000)]] == whole
    # The same samples do not stay together: two epochs share as few as two random draws of 64 from 1,024.
    first, second = (BalancedOrder(range(1024), None, seed=3, epoch=epoch)[0:64] for epoch in (0, 1))
    assert len(set(first) & set(second)) < 20
    share = Counter(groups)["b"] / 1000
    for start in range(0, 937, 21):
        stretch = whole[start : start + 63]
        assert abs(sum(groups[i] == "b" for i in stretch) - share * 63) <= 3
        assert sum(costs[i] for i in stretch) == pytest.approx(63 * sum(costs) / 1000, rel=0.2)


def test_uneven_cells_exchange_samples_with_their_neighbours() -> None:
    draw = Random(0)
    costs = [2048] * 196 + [int(2047 * draw.random() ** 0.5) + 1 for _ in range(60)]
    order = BalancedOrder(costs, None, seed=4, epoch=0)
    for start in range(0, 256, 64):
        cell = [costs[i] for i in order[start : start + 64]]
        assert unevenness(cell, equal_shares(cell, 8)) <= 1.013  # without the exchange: 1.0155


def test_a_stream_resumes_at_its_position_for_any_ranks_and_batch_size() -> None:
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
