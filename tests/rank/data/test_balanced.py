"""A training on balanced data: the losses of one process under every strategy, and each sample once an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Recording, net, points, quiet, weighted_loss
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

import nbkit
from nbkit.errors import NotFinite, TrainingError
from nbkit.rank.data.balanced.equal_shares import unevenness
from nbkit.rank.data.open_stream import open_stream
from nbkit.rank.models.gpt import GPT, GPTConfig

COSTS = [1.0 + (i * i) % 23 for i in range(52)]
GROUPS = ["ab"[i % 3 == 0] for i in range(52)]


def labelled(world: Any, batch: int, path: Path) -> dict[str, Any]:
    """Six steps, resumed after four; rows with dropout, weighed unequally."""
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


def test_losses_are_those_of_one_process_with_dropout_micro_batches_and_unequal_weights(tmp_path: Path) -> None:
    (alone,) = run_ranks(labelled, 1, 12, tmp_path)
    found = run_ranks(labelled, 2, 12, tmp_path)

    for one in found:
        torch.testing.assert_close(torch.tensor(one["loss"]), torch.tensor(alone["loss"]), rtol=1e-6, atol=0)
        torch.testing.assert_close(torch.tensor(one["weights"]), torch.tensor(alone["weights"]), rtol=1e-5, atol=1e-7)
        # 52 samples in batches of at most 12: five that differ by one at most, and the next epoch.
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
    """The same three batches, each document by itself, in plain torch."""
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


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("strategies", [STRATEGIES, pytest.param(ALSO, marks=pytest.mark.long)])
def test_packed_documents_train_as_one_by_one_under_every_strategy(strategies: tuple[str, ...]) -> None:
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


def test_the_rank_that_has_a_spoilt_sample_is_named_with_its_own_and_costs_that_are_none_are_refused() -> None:
    found = run_ranks(spoilt, 2)

    assert found[0][0] == found[1][0] and " 17" in found[0][0]
    assert "The cost of a sample is a number >= 0." in found[0][1] and "of sample 1" in found[1][1]
    assert "Another rank" in found[0][2] and "division by zero" in found[1][2]


def test_data_that_is_not_read_by_index_and_lists_of_another_length_are_refused() -> None:
    with pytest.raises(TrainingError, match="read by index"):
        nbkit.Balanced(iter([1, 2]))
    with pytest.raises(TrainingError, match="2 of cost, 3 samples"):
        _ = nbkit.Balanced([[1], [2], [3]], cost=[1, 2]).costs
    with pytest.warns(UserWarning, match="every sample costs the same"):
        _ = nbkit.Balanced(points(4), cost=len).costs
    assert list(nbkit.Balanced([{"ids": torch.zeros(n)} for n in (4, 2)]).costs) == [4.0, 2.0]
